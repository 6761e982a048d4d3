"""Param groups: rates of their own, a group per table, and what is frozen or has no gradient."""

import pytest
import torch
from torch import nn

from mpifleet.errors import ConfigError
from tests.unit.local_job import connect, table_of
from tests.unit.torch_reference import TwoTables, batches, follow, loss_of, net


def test_groups_keep_their_own_rates_momenta_and_decay():
    def build(model):
        return torch.optim.SGD(
            [
                {"params": [model[0].weight], "lr": 0.3},
                {"params": [model[0].bias, model[2].weight], "momentum": 0.5, "nesterov": True},
                {"params": [model[2].bias], "weight_decay": 0.2, "lr": 0.01},
            ],
            lr=0.1,
        )

    follow(build)


def test_a_group_per_table():
    model = TwoTables()
    inner = torch.optim.SGD(
        [
            {"params": [model.fast.weight], "lr": 4.0},
            {"params": [model.slow.weight], "lr": 0.25, "momentum": 0.5},
            {"params": [model.dense]},
        ],
        lr=1.0,
    )
    optimizer = connect(model, inner)
    for _ in range(2):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
    assert table_of(model.fast, optimizer)[1].tolist() == [-8, -8]
    assert table_of(model.slow, optimizer)[1].tolist() == [-0.25 * 2.5] * 2
    assert model.dense.tolist() == [-2, -2]


@pytest.mark.parametrize("how", ["no group", "requires_grad"])
def test_a_frozen_table_stays_and_is_not_counted_in_the_norm(how):
    model = TwoTables()
    params = [model.fast.weight, model.dense]
    if how == "requires_grad":
        model.slow.weight.requires_grad_(False)
        params.append(model.slow.weight)
    optimizer = connect(model, torch.optim.SGD(params, lr=1.0))
    model().backward()
    assert optimizer.clip_grad_norm_(100.0).item() == pytest.approx(2.0)  # two rows of ones
    optimizer.step()
    assert not table_of(model.slow, optimizer).any()
    assert table_of(model.fast, optimizer)[1].tolist() == [-1, -1]


def test_frozen_parameters_stay():
    model = net()
    model[0].requires_grad_(False)
    first = model[0].weight.clone()
    optimizer = connect(model, torch.optim.Adam(model.parameters(), lr=0.1))
    loss_of(model, batches(1)[0]).backward()
    optimizer.step()
    assert torch.equal(model[0].weight, first)
    assert not torch.equal(model[2].weight, net()[2].weight)


def test_parameters_without_a_gradient_keep_values_state_and_step():
    """Every parameter has its own step, as in torch: here layer 2 sees every third batch only."""
    turn = {}

    def drop(model, stepper):
        turn[id(model)] = turn.get(id(model), -1) + 1
        if turn[id(model)] % 3:
            model[2].weight.grad = model[2].bias.grad = None

    follow(lambda model: torch.optim.Adam(model.parameters(), lr=0.05), each=drop)


def test_groups_cannot_be_added_later():
    model, extra = net(), nn.Parameter(torch.zeros(1))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = connect(model, inner)
    with pytest.raises(ConfigError, match="before"):
        optimizer.add_param_group({"params": [extra]})
    inner.add_param_group({"params": [extra]})
    with pytest.raises(ConfigError, match="2 param groups, it had 1"):
        optimizer.step()
