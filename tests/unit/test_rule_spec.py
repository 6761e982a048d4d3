"""Which rule a torch optimizer's group becomes, and what is refused by name."""

import numpy as np
import pytest
import torch

from mpifleet.errors import ConfigError, TableError
from mpifleet.ps.update_rules import (
    HYPER_SIZE,
    RuleSpec,
    hyper_of_group,
    make_rule,
    rule_of_group,
)
from tests.unit.rule_cases import rule_of


def test_rules_of_groups_differ():
    one, two = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD(
        [{"params": [one]}, {"params": [two], "momentum": 0.9, "nesterov": True}], lr=0.1
    )
    rules = [rule_of_group(optimizer, group) for group in optimizer.param_groups]
    assert rules == [RuleSpec("sgd"), RuleSpec("momentum", nesterov=True)]


class OwnAdam(torch.optim.Adam):
    pass


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda p: torch.optim.RMSprop(p), "RMSprop"),
        (lambda p: OwnAdam(p), "OwnAdam"),
        (lambda p: torch.optim.Adam(p, amsgrad=True), "amsgrad"),
        (lambda p: torch.optim.AdamW(p, differentiable=True), "differentiable"),
        (lambda p: torch.optim.Adam(p, capturable=True), "capturable"),
    ],
)
def test_what_cannot_be_mapped_is_refused_with_the_list(make, named):
    optimizer = make([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(ConfigError, match=named) as caught:
        rule_of(optimizer)
    for mapped in ("SGD", "Adagrad", "Adam", "AdamW", "SparseAdam"):
        assert mapped in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lr", float("nan")),
        ("lr", -0.1),
        ("weight_decay", float("inf")),
        ("betas", (0.9, 1.0)),
        ("betas", (-0.1, 0.9)),
        ("eps", -1e-8),
        ("lr", torch.ones(2)),
    ],
)
def test_hyper_parameters_out_of_range_are_named(field, value):
    group = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))]).param_groups[0] | {field: value}
    with pytest.raises(ConfigError, match="beta" if field == "betas" else field):
        hyper_of_group(RuleSpec("adam"), group)


def test_bad_specs_and_tensors_are_refused():
    with pytest.raises(ConfigError, match="rprop"):
        RuleSpec("rprop")
    with pytest.raises(ConfigError, match="nesterov"):
        RuleSpec("adam", nesterov=True)
    rule, hyper = make_rule(RuleSpec("sgd")), np.zeros(HYPER_SIZE)
    rows = torch.ones(4, 3)
    with pytest.raises(TableError, match="contiguous"):
        rule.apply_rows(rows, torch.ones(3, 4).T, {}, 1, hyper)
    with pytest.raises(TableError, match="grads"):
        rule.apply_rows(rows, torch.ones(4, 2), {}, 1, hyper)
    with pytest.raises(TableError, match="float16"):
        rule.apply_rows(rows.half(), rows.half(), {}, 1, hyper)
    with pytest.raises(TableError, match="step"):
        rule.apply_rows(rows, rows, {}, 0, hyper)
    with pytest.raises(TableError, match="state"):
        rule.apply_rows(rows, rows, {"exp_avg": rows}, 1, hyper)
