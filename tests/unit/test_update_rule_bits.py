"""A server's part of a table gets the bits that the whole would get."""

import itertools

import numpy as np
import pytest
import torch

from mpifleet.ps.update_rules import (
    HYPER_NAMES,
    HYPER_SIZE,
    RuleSpec,
    make_rule,
)
from tests.unit.rule_cases import LAZY_CASES, both_dtypes, both_routes, fresh_state, vector


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


@pytest.mark.parametrize("name", HYPER_NAMES)
def test_empty_slices_and_empty_pushes_do_nothing(name):
    rule = make_rule(RuleSpec(name))
    for shape, apply in (((0,), rule.apply_dense), ((0, 4), rule.apply_rows)):
        empty = torch.empty(shape)
        apply(empty, empty.clone(), fresh_state(rule, empty, np.zeros(HYPER_SIZE)), 1, [0.1] * 8)
