"""Update rules against torch.optim, numpy oracles and SparseAdam."""

import numpy as np
import pytest
import torch

from mpifleet.ps.update_rules import (
    HYPER_SIZE,
    RuleSpec,
    hyper_of_group,
    make_rule,
)
from tests.oracles import lazy_rules
from tests.unit.rule_cases import (
    ELEMENTS,
    LAZY_CASES,
    STEPS,
    assert_close,
    both_dtypes,
    both_routes,
    fresh_state,
    gradient_steps,
    rule_of,
    vector,
)

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
SCHEDULES = {
    "constant": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda _: 1.0),
    "warm-up-and-decay": lambda o: torch.optim.lr_scheduler.LambdaLR(
        o, lambda t: min((t + 1) / 10, 1.0) * 0.97**t
    ),
}


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


def test_initial_state_starts_where_torch_starts():
    rule = make_rule(RuleSpec("adagrad"))
    state = fresh_state(
        rule, torch.ones(3, 2), vector("adagrad", {"initial_accumulator_value": 0.5})
    )
    assert torch.equal(state["sum"], torch.full((3, 2), 0.5))
    assert fresh_state(make_rule(RuleSpec("sgd")), torch.ones(2), np.zeros(HYPER_SIZE)) == {}
