"""Update rules: against torch.optim, numpy oracles and SparseAdam, and bit identity of slices."""

import itertools

import numpy as np
import pytest
import torch

from mpifleet.errors import ConfigError, TableError
from mpifleet.ps.update_rules import (
    HYPER_NAMES,
    HYPER_SIZE,
    RuleSpec,
    hyper_of_group,
    make_rule,
    rule_of_group,
)
from tests.oracles import lazy_rules

ELEMENTS = 77  # not a multiple of any vector width
STEPS = 100

TORCH_CASES = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd-decay": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.02),
    "sgd-maximize": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.02, maximize=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "momentum-damped": lambda p: torch.optim.SGD(
        p, lr=0.05, momentum=0.9, dampening=0.3, weight_decay=0.01
    ),
    "nesterov": lambda p: torch.optim.SGD(
        p, lr=0.05, momentum=0.8, nesterov=True, weight_decay=0.01
    ),
    "momentum-maximize": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.8, maximize=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adagrad-all": lambda p: torch.optim.Adagrad(
        p,
        lr=0.1,
        lr_decay=0.05,
        weight_decay=0.01,
        initial_accumulator_value=0.3,
        eps=1e-6,
        maximize=True,
    ),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam-decay": lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.99), weight_decay=0.02),
    "adam-maximize": lambda p: torch.optim.Adam(p, lr=0.01, maximize=True),
    "adam-tensor-rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01, dtype=torch.float64)),
    "adam-decoupled": lambda p: torch.optim.Adam(
        p, lr=0.01, weight_decay=0.02, decoupled_weight_decay=True
    ),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw-decay": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.3, maximize=True),
}


def rule_of(optimizer):
    """The rule of an optimizer with one param group."""
    (group,) = optimizer.param_groups
    return rule_of_group(optimizer, group)


def fresh_state(rule, values, hyper):
    """State tensors for `values` before the first update."""
    return {
        slot: torch.full_like(values, first) for slot, first in rule.initial_state(hyper).items()
    }


SCHEDULES = {
    "constant": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda _: 1.0),
    "warm-up-and-decay": lambda o: torch.optim.lr_scheduler.LambdaLR(
        o, lambda t: min((t + 1) / 10, 1.0) * 0.97**t
    ),
}

# name, flags, hyper-parameters of the lazy rules
LAZY_CASES = {
    "sgd": ("sgd", {}, {"lr": 0.1}),
    "sgd-decay": ("sgd", {"maximize": True}, {"lr": 0.1, "weight_decay": 0.05}),
    "momentum": ("momentum", {}, {"lr": 0.1, "momentum": 0.9}),
    "momentum-damped": (
        "momentum",
        {},
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.25, "weight_decay": 0.01},
    ),
    "nesterov": (
        "momentum",
        {"nesterov": True},
        {"lr": 0.1, "momentum": 0.8, "weight_decay": 0.01},
    ),
    "adagrad": (
        "adagrad",
        {},
        {
            "lr": 0.1,
            "lr_decay": 0.02,
            "eps": 1e-8,
            "initial_accumulator_value": 0.1,
            "weight_decay": 0.01,
        },
    ),
    "adam": ("adam", {}, {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-3}),
    "adam-decay": (
        "adam",
        {"maximize": True},
        {"lr": 0.01, "beta1": 0.7, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.1},
    ),
    "adamw": (
        "adamw",
        {},
        {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-3, "weight_decay": 0.3},
    ),
}

both_routes = pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def vector(name, hyper):
    out = np.zeros(HYPER_SIZE)
    for slot, field in enumerate(HYPER_NAMES[name]):
        out[slot] = hyper.get(field, 0.0)
    return out


def gradient_steps(shape, dtype, steps=STEPS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(-2, 1, int(np.prod(shape)), dtype=dtype).view(shape)
    for _ in range(steps):
        yield torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) * scale


def assert_close(got, wanted, tolerance):
    scale = wanted.abs().max()
    assert (got - wanted).abs().max() <= tolerance * scale


@both_routes
@both_dtypes
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", TORCH_CASES)
def test_dense_equals_torch_over_100_steps(case, schedule, dtype, fused):
    start = torch.linspace(-2, 2, ELEMENTS, dtype=dtype)
    parameter = torch.nn.Parameter(start.clone())
    optimizer = TORCH_CASES[case]([parameter])
    scheduler = SCHEDULES[schedule](optimizer)
    spec = rule_of(optimizer)
    rule = make_rule(spec, fused=fused)
    values = start.clone()
    state = fresh_state(rule, values, hyper_of_group(spec, optimizer.param_groups[0]))
    for step, grads in enumerate(gradient_steps((ELEMENTS,), dtype), start=1):
        hyper = hyper_of_group(spec, optimizer.param_groups[0])
        before = grads.clone()
        rule.apply_dense(values, grads, state, step, hyper)
        assert torch.equal(grads, before)
        parameter.grad = grads.clone()
        optimizer.step()
        scheduler.step()
    assert_close(values, parameter.detach(), 1e-6)
    if dtype is torch.float64:
        assert_close(values, parameter.detach(), 1e-12)
    for slot in rule.slots:
        assert_close(state[slot], optimizer.state[parameter][slot], 1e-6)


@both_routes
def test_a_schedule_that_cycles_momentum_travels_with_the_push(fused):
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, ELEMENTS, dtype=torch.float64))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=STEPS + 1)
    spec = rule_of(optimizer)
    rule = make_rule(spec, fused=fused)
    values = parameter.detach().clone()
    state = fresh_state(rule, values, hyper_of_group(spec, optimizer.param_groups[0]))
    seen = set()
    for step, grads in enumerate(gradient_steps((ELEMENTS,), torch.float64), start=1):
        hyper = hyper_of_group(spec, optimizer.param_groups[0])
        seen.add(hyper[2])
        rule.apply_dense(values, grads, state, step, hyper)
        parameter.grad = grads
        optimizer.step()
        scheduler.step()
    assert len(seen) > 50
    assert_close(values, parameter.detach(), 1e-12)


@both_routes
@pytest.mark.parametrize("case", LAZY_CASES)
def test_dense_equals_the_numpy_oracle(case, fused):
    name, flags, hyper = LAZY_CASES[case]
    rule = make_rule(RuleSpec(name, **flags), fused=fused)
    values = torch.linspace(-2, 2, ELEMENTS, dtype=torch.float64)
    state = fresh_state(rule, values, vector(name, hyper))
    wanted, kept = values.numpy().copy(), {k: v.numpy().copy() for k, v in state.items()}
    for step, grads in enumerate(gradient_steps((ELEMENTS,), torch.float64), start=1):
        rule.apply_dense(values, grads, state, step, vector(name, hyper))
        wanted, kept = lazy_rules.dense_step(
            name, wanted, grads.numpy(), kept, step, **flags, **hyper
        )
    np.testing.assert_allclose(values.numpy(), wanted, rtol=1e-9, atol=1e-11)
    for slot in rule.slots:
        np.testing.assert_allclose(state[slot].numpy(), kept[slot], rtol=1e-9, atol=1e-11)


@both_routes
@both_dtypes
@pytest.mark.parametrize("case", LAZY_CASES)
def test_rows_equal_the_lazy_oracle(case, dtype, fused):
    name, flags, hyper = LAZY_CASES[case]
    num_rows, dim = 23, 5
    never = [3, 11]
    generator = np.random.default_rng(5)
    rule = make_rule(RuleSpec(name, **flags), fused=fused)
    table = torch.from_numpy(generator.normal(size=(num_rows, dim))).to(dtype)
    state = fresh_state(rule, table, vector(name, hyper))
    first = table.clone()
    wanted = table.numpy().astype(np.float64)
    kept = {slot: tensor.numpy().astype(np.float64) for slot, tensor in state.items()}
    usual = np.setdiff1d(np.arange(num_rows), never)
    for step in range(1, STEPS + 1):
        keys = generator.choice(usual, size=generator.integers(1, 9), replace=False)
        grads = torch.from_numpy(generator.normal(size=(len(keys), dim))).to(dtype)
        before = grads.clone()
        rows = table[keys]
        gathered = {slot: tensor[keys] for slot, tensor in state.items()}
        rule.apply_rows(rows, grads, gathered, step, vector(name, hyper))
        assert torch.equal(grads, before)
        table[keys] = rows
        for slot, tensor in gathered.items():
            state[slot][keys] = tensor
        wanted, kept = lazy_rules.lazy_step(
            name, wanted, keys, grads.numpy(), kept, step, **flags, **hyper
        )
    tolerance = 1e-5 if dtype is torch.float32 else 1e-11
    np.testing.assert_allclose(table.numpy(), wanted, rtol=tolerance, atol=tolerance)
    for slot in rule.slots:
        np.testing.assert_allclose(state[slot].numpy(), kept[slot], rtol=tolerance, atol=tolerance)
    assert torch.equal(table[never], first[never])
    assert not torch.equal(table[usual], first[usual])


@both_routes
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("eps", [1e-8, 1e-2])
def test_lazy_adam_equals_torch_sparse_adam(maximize, eps, fused):
    num_rows, dim = 31, 7
    generator = torch.Generator().manual_seed(2)
    table = torch.randn(num_rows, dim, generator=generator, dtype=torch.float64)
    weight = torch.nn.Parameter(table.clone())
    optimizer = torch.optim.SparseAdam([weight], lr=0.02, eps=eps, maximize=maximize)
    spec = rule_of(optimizer)
    assert spec == RuleSpec("adam", maximize=maximize)
    rule = make_rule(spec, fused=fused)
    hyper = hyper_of_group(spec, optimizer.param_groups[0])
    state = fresh_state(rule, table, hyper)
    for step in range(1, STEPS + 1):
        keys = torch.randperm(num_rows - 1, generator=generator)[:6]  # the last row: never
        grads = torch.randn(6, dim, generator=generator, dtype=torch.float64)
        rows, gathered = table[keys], {slot: state[slot][keys] for slot in rule.slots}
        rule.apply_rows(rows, grads, gathered, step, hyper)
        table[keys] = rows
        for slot in rule.slots:
            state[slot][keys] = gathered[slot]
        weight.grad = torch.sparse_coo_tensor(
            keys[None], grads, (num_rows, dim), check_invariants=True
        )
        optimizer.step()
    assert_close(table, weight.detach(), 1e-12)
    assert torch.equal(table[-1], weight.detach()[-1])


@both_routes
@both_dtypes
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("case", LAZY_CASES)
def test_slices_give_the_bits_of_the_whole(case, threads, dtype, fused):
    name, flags, hyper = LAZY_CASES[case]
    rule = make_rule(RuleSpec(name, **flags), fused=fused)
    size = 100_003
    cuts = {"thirds": [0, 33_335, 66_669, size], "odd": [0, 5, 18, 50_001, 50_002, size]}
    generator = torch.Generator().manual_seed(8)
    values = torch.randn(size, generator=generator, dtype=dtype)
    many = [torch.randn(size, generator=generator, dtype=dtype) for _ in range(3)]

    def run(first, last):
        part = values[first:last].clone()
        state = fresh_state(rule, part, vector(name, hyper))
        for step, grads in enumerate(many, start=1):
            rule.apply_dense(part, grads[first:last], state, step, vector(name, hyper))
        return torch.stack([part, *(state[slot] for slot in rule.slots)])

    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = run(0, size)
        assert torch.equal(whole, run(0, size))
        for edges in cuts.values():
            parts = [run(a, b) for a, b in itertools.pairwise(edges)]
            assert torch.equal(torch.cat(parts, dim=1), whole)
    finally:
        torch.set_num_threads(threads_before)


@both_routes
@pytest.mark.parametrize("case", LAZY_CASES)
def test_rows_give_the_same_bits_in_any_company(case, fused):
    name, flags, hyper = LAZY_CASES[case]
    rule = make_rule(RuleSpec(name, **flags), fused=fused)
    generator = torch.Generator().manual_seed(9)
    rows = torch.randn(200, 10, generator=generator)
    grads = torch.randn(200, 10, generator=generator)

    def run(picked):
        part = rows[picked]
        state = fresh_state(rule, part, vector(name, hyper))
        for step in (1, 2, 3):
            rule.apply_rows(part, grads[picked], state, step, vector(name, hyper))
        return part

    whole = run(torch.arange(200))
    for server in range(3):
        mine = torch.arange(server, 200, 3)
        assert torch.equal(run(mine), whole[mine])


def test_additive_scale_is_the_whole_of_plain_sgd():
    rows, grads = torch.randn(4, 3), torch.randn(4, 3)
    for maximize in (False, True):
        rule = make_rule(RuleSpec("sgd", maximize=maximize))
        hyper = vector("sgd", {"lr": 0.25})
        scale = rule.additive_scale(hyper)
        assert scale == (0.25 if maximize else -0.25)
        wanted = rows + scale * grads
        got = rows.clone()
        rule.apply_rows(got, grads, {}, 1, hyper)
        torch.testing.assert_close(got, wanted)
    assert make_rule(RuleSpec("sgd")).additive_scale(vector("sgd", {"weight_decay": 0.1})) is None
    for name in ("momentum", "adagrad", "adam", "adamw"):
        assert make_rule(RuleSpec(name)).additive_scale(np.zeros(HYPER_SIZE)) is None


def test_initial_state_starts_where_torch_starts():
    rule = make_rule(RuleSpec("adagrad"))
    state = fresh_state(
        rule, torch.ones(3, 2), vector("adagrad", {"initial_accumulator_value": 0.5})
    )
    assert torch.equal(state["sum"], torch.full((3, 2), 0.5))
    assert fresh_state(make_rule(RuleSpec("sgd")), torch.ones(2), np.zeros(HYPER_SIZE)) == {}


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


@pytest.mark.parametrize("name", HYPER_NAMES)
def test_empty_slices_and_empty_pushes_do_nothing(name):
    rule = make_rule(RuleSpec(name))
    for shape, apply in (((0,), rule.apply_dense), ((0, 4), rule.apply_rows)):
        empty = torch.empty(shape)
        apply(empty, empty.clone(), fresh_state(rule, empty, np.zeros(HYPER_SIZE)), 1, [0.1] * 8)
