"""What is not finite is refused, and only that."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mpifleet.errors import NonFiniteGradient
from mpifleet.log import get_logger
from mpifleet.ps.finite import FiniteGuard, first_nonfinite, is_finite

TABLES = [SimpleNamespace(name="dense0"), SimpleNamespace(name="emb")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_kind_of_number(dtype):
    assert is_finite(torch.zeros(0, dtype=dtype))
    assert is_finite(torch.randn(100, 3, dtype=dtype))
    for bad in (float("nan"), float("inf"), float("-inf")):
        for place in (0, 57, 299):
            values = torch.zeros(300, dtype=dtype)
            values[place] = bad
            assert not is_finite(values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_finite_values_whose_sum_overflows_are_finite(dtype):
    values = torch.full((100,), torch.finfo(dtype).max, dtype=dtype)
    assert not torch.isfinite(values.sum()), "the case in question"
    assert is_finite(values)
    values[::2] *= -1  # the partial sums may be infinite with both signs
    assert is_finite(values)
    values[3] = float("inf")
    assert not is_finite(values)


def test_infinities_that_cancel_are_not_finite():
    assert not is_finite(torch.tensor([float("inf"), float("-inf")]))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_first_array_that_is_not_finite_is_found(bad):
    good, wrong = np.ones(3, np.float32), np.array([[1, 2], [3, bad]], np.float32)
    assert first_nonfinite([]) == 0
    assert first_nonfinite([good, good]) == 0
    assert first_nonfinite([good, wrong, wrong]) == 2


def test_the_error_names_worker_table_and_step():
    guard = FiniteGuard(skip=False)
    assert guard.accept(0, TABLES, worker=2, step=7)
    with pytest.raises(NonFiniteGradient, match=r"worker 3 .* table 'emb' at step 11") as caught:
        guard.accept(2, TABLES, worker=3, step=11)
    assert isinstance(caught.value, ArithmeticError)


def test_skipping_counts_and_says_so_less_and_less(caplog):
    guard = FiniteGuard(skip=True)
    logger = get_logger()
    logger.addHandler(caplog.handler)
    try:
        for step in range(20):
            assert not guard.accept(1, TABLES, worker=0, step=step)
            assert guard.accept(0, TABLES, worker=0, step=step)
    finally:
        logger.removeHandler(caplog.handler)
    assert guard.skipped == 20
    numbers = [record.getMessage().rpartition(" ")[2] for record in caplog.records]
    assert numbers == ["1)", "2)", "4)", "8)", "16)"]
    assert "table 'dense0' at step 15" in caplog.records[-1].getMessage()
