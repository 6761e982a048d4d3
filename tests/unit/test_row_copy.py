"""Rows written by number, against a plain loop."""

import numpy as np
import pytest

from mpifleet.ps.row_copy import put_rows


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("dim", [1, 3, 10, 16])
@pytest.mark.parametrize("num_written", [0, 1, 7, 40])
def test_only_the_named_rows_change(dim, dtype, num_written):
    rng = np.random.default_rng(dim)
    table = rng.random((40, dim)).astype(dtype)
    rows = rng.permutation(40)[:num_written]
    values = rng.random((num_written, dim)).astype(dtype)
    expected = table.copy()
    for row, value in zip(rows, values, strict=True):
        expected[row] = value
    put_rows(table, rows, values)
    np.testing.assert_array_equal(table, expected)


def test_bits_of_odd_numbers_stay():
    table = np.zeros((3, 2), np.float32)
    odd = np.array([[np.nan, -0.0]], np.float32)
    put_rows(table, np.array([1]), odd)
    assert table[1:2].tobytes() == odd.tobytes()


def test_a_part_of_a_larger_table_is_written_in_place():
    whole = np.zeros((10, 4), np.float32)
    put_rows(whole[2:8], np.array([0, 5]), np.ones((2, 4), np.float32))
    np.testing.assert_array_equal(np.flatnonzero(whole[:, 0]), [2, 7])


def test_a_table_that_is_not_contiguous_is_refused():
    with pytest.raises(ValueError, match="contiguous"):
        put_rows(np.zeros((6, 8), np.float32)[:, ::2], np.array([1]), np.ones((1, 4), np.float32))
