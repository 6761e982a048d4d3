"""Rows updated by compiled code have the bits of torch's single operations."""

import numpy as np
import pytest
import torch

from mpifleet.ps import compiled_rows, update_rules
from mpifleet.ps.update_rules import RuleSpec, make_rule
from tests.unit.rule_cases import LAZY_CASES, both_dtypes, fresh_state, vector

NUM_ROWS, STEPS = 300, 7


def train(case, dtype, dim, num_touched):
    """The table and its state after some steps, as one tensor."""
    name, flags, hyper = LAZY_CASES[case]
    rule, numbers = make_rule(RuleSpec(name, **flags)), vector(name, hyper)
    generator = torch.Generator().manual_seed(4)
    table = torch.randn(NUM_ROWS, dim, generator=generator, dtype=dtype)
    state = fresh_state(rule, table, numbers)
    draw = np.random.default_rng(5)
    for step in range(1, STEPS + 1):
        rows = np.sort(draw.choice(NUM_ROWS, num_touched, replace=False))
        grads = torch.randn(num_touched, dim, generator=generator, dtype=dtype)
        grads[::3] *= 1e-6
        before = table.clone()
        changed = rule.update_rows(table, rows, grads, state, step, numbers)
        assert torch.equal(table, before), "the values are the caller's to write"
        table[torch.from_numpy(rows)] = changed
    return torch.stack([table, *(state[slot] for slot in rule.slots)])


@pytest.fixture
def without_numba(monkeypatch):
    return lambda: monkeypatch.setattr(update_rules, "compiled_rows", lambda: None)


@both_dtypes
@pytest.mark.parametrize(("dim", "num_touched"), [(1, 1), (3, 70), (10, 130), (16, 0), (33, 300)])
@pytest.mark.parametrize("case", LAZY_CASES)
def test_the_bits_are_those_of_single_operations(case, dtype, dim, num_touched, without_numba):
    pytest.importorskip("numba")
    compiled = train(case, dtype, dim, num_touched)
    without_numba()
    plain = train(case, dtype, dim, num_touched)
    assert torch.equal(compiled, plain)


@pytest.mark.parametrize("case", LAZY_CASES)
def test_rows_that_are_not_touched_keep_their_bits(case):
    name, flags, hyper = LAZY_CASES[case]
    rule, numbers = make_rule(RuleSpec(name, **flags)), vector(name, hyper)
    table = torch.randn(50, 4)
    state = fresh_state(rule, table, numbers)
    before = {slot: values.clone() for slot, values in state.items()}
    rows = np.array([3, 17, 49])
    rule.update_rows(table, rows, torch.ones(3, 4), state, 1, numbers)
    others = np.setdiff1d(np.arange(50), rows)
    for slot, values in state.items():
        assert torch.equal(values[others], before[slot][others])


def test_without_a_folder_to_keep_it_in_it_is_compiled_anew(monkeypatch):
    pytest.importorskip("numba")
    fresh = compiled_rows.CompiledRows()
    njit, asked = fresh._compiler._njit, []

    def refusing(**options):
        asked.append(options.get("cache", False))
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return njit(**options)

    monkeypatch.setattr(fresh._compiler, "_njit", refusing)
    monkeypatch.setattr(update_rules, "compiled_rows", lambda: fresh)
    train("sgd", torch.float32, 3, 5)
    assert asked == [True, False]


def test_without_room_for_the_cache_it_is_compiled_anew(monkeypatch):
    pytest.importorskip("numba")
    fresh = compiled_rows.CompiledRows()
    njit = fresh._compiler._njit

    def full(**options):
        def compile_(function):
            def refusing(*_):
                raise OSError(28, "No space left on device")

            return refusing if options.get("cache") else njit(**options)(function)

        return compile_

    monkeypatch.setattr(fresh._compiler, "_njit", full)
    monkeypatch.setattr(update_rules, "compiled_rows", lambda: fresh)
    compiled = train("adam", torch.float32, 3, 70)
    monkeypatch.setattr(update_rules, "compiled_rows", lambda: None)
    assert torch.equal(compiled, train("adam", torch.float32, 3, 70))
