"""Sums of gradients: exact where the numbers are, in the order given where they are not."""

import numpy as np
import pytest
import torch

from mpifleet.errors import KeyRangeError
from mpifleet.partition import unique_keys
from mpifleet.ps import merge
from mpifleet.ps.merge import DenseMerger, RowsMerger, add_rows, segment_sum, sum_duplicates
from mpifleet.ps.message import DenseGradient, RowsGradient
from mpifleet.ps.spec import TableSpecs, layouts
from tests.unit.table_examples import dense_spec, hyper, sparse_spec, two_and_two


def sums_by_numpy(keys, values, num_rows):
    """np.add.at adds element after element, in order."""
    total = np.zeros((num_rows, values.shape[1]), values.dtype)
    np.add.at(total, keys, values)
    return total[np.unique(keys)]


def dyadic(rng, shape, dtype):
    """Multiples of 1/1024 below 1: every sum of up to 2**13 of them is exact in float32."""
    return (rng.integers(-1024, 1024, shape) / 1024).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("dim", [1, 3, 10, 16, 67])
@pytest.mark.parametrize(("num_keys", "num_rows"), [(1, 1), (7, 7), (500, 3), (500, 400)])
def test_segment_sums_are_exact(num_keys, num_rows, dim, dtype):
    rng = np.random.default_rng(dim)
    keys = rng.integers(0, num_rows, num_keys)
    values = dyadic(rng, (num_keys, dim), dtype)
    unique = unique_keys(keys, num_rows, 1, "emb")
    sums = segment_sum(torch.from_numpy(values), unique.order, unique.starts).numpy()
    np.testing.assert_array_equal(sums, sums_by_numpy(keys, values, num_rows), strict=True)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("dim", [1, 10, 16, 67])
def test_segment_sums_round_in_the_order_of_positions(dim, dtype):
    """Values of very different size: another order of addition gives other bits."""
    rng = np.random.default_rng(dim)
    keys = rng.integers(0, 5, 300)
    values = (rng.normal(size=(300, dim)) * 10.0 ** rng.integers(-6, 6, (300, 1))).astype(dtype)
    unique = unique_keys(keys, 5, 1, "emb")
    sums = segment_sum(torch.from_numpy(values), unique.order, unique.starts).numpy()
    np.testing.assert_array_equal(sums, sums_by_numpy(keys, values, 5), strict=True)
    if dim > 1:
        other = sums_by_numpy(keys[::-1], values[::-1], 5)
        assert (sums != other).any(), "the values cannot tell orders apart"


def test_a_sum_of_nothing():
    empty = np.empty(0, np.int64)
    sums = segment_sum(torch.empty(0, 4, dtype=torch.float64), empty, empty)
    assert sums.shape == (0, 4)
    assert sums.dtype == torch.float64


def test_duplicates_become_one_row():
    values = torch.tensor([[1.0, 2], [4, 8], [16, 32]])
    rows, sums = sum_duplicates(np.array([5, 1, 5]), values, 6, "emb")
    assert rows.tolist() == [1, 5]
    assert sums.tolist() == [[4, 8], [17, 34]]
    with pytest.raises(KeyRangeError, match="'emb': key 5"):
        sum_duplicates(np.array([5]), values[:1], 5, "emb")


SPECS = two_and_two()


def dense_push(layout, rng, present):
    return [
        DenseGradient(
            hyper(rng.random()),
            np.array(flags, np.uint8),
            dyadic(rng, part.stop - part.start, spec.dtype),
        )
        for spec, part, flags in zip(SPECS.dense, layout.dense, present, strict=True)
    ]


@pytest.mark.parametrize("server", range(3))
def test_the_mean_of_dense_gradients(server):
    layout = layouts(SPECS, 3)[server]
    rng = np.random.default_rng(server)
    merger = DenseMerger(layout)
    for present in ([[1, 0, 0], [1]], [[0, 0, 1], [0]], [[1, 0, 1], [0]], [[0, 0, 0], [0]]):
        pushes = [dense_push(layout, rng, present), dense_push(layout, rng, [[0, 0, 0], [1]])]
        for push in pushes:
            merger.add(push)
        assert merger.count == 2
        for table, mean in enumerate(merger.take_mean()):
            a, b = (push[table] for push in pushes)
            np.testing.assert_array_equal(mean.values, (a.values + b.values) / 2, strict=True)
            np.testing.assert_array_equal(mean.present, a.present | b.present)
            np.testing.assert_array_equal(mean.hyper, a.hyper)
        assert merger.count == 0


def test_dense_gradients_are_copied():
    layout = layouts(SPECS, 1)[0]
    rng = np.random.default_rng(0)
    merger, push = DenseMerger(layout), dense_push(layout, rng, [[1, 1, 1], [1]])
    wanted = [gradient.values.copy() for gradient in push]
    merger.add(push)
    for gradient in push:
        gradient.values[:], gradient.present[:], gradient.hyper[:] = np.nan, 0, np.nan
    for mean, values in zip(merger.take_mean(), wanted, strict=True):
        np.testing.assert_array_equal(mean.values, values)
        assert mean.present.all()
        assert np.isfinite(mean.hyper).all()


def test_one_worker_alone_is_not_divided():
    layout = layouts(TableSpecs((dense_spec("d", (3,)),), ()), 1)[0]
    merger = DenseMerger(layout)
    tiny = np.float32([1e-45, -0.0, 3.4e38])
    merger.add([DenseGradient(hyper(), np.ones(1, np.uint8), tiny)])
    assert merger.take_mean()[0].values.tobytes() == tiny.tobytes()


def rows_push(rng, specs, layout):
    parts = []
    for spec, bound in zip(specs.sparse, layout.sparse_rows, strict=True):
        rows = rng.permutation(bound)[: rng.integers(0, bound + 1)]
        values = dyadic(rng, (rows.size, spec.dim), spec.dtype)
        parts.append(RowsGradient(hyper(rng.random()), rows, values, int(rows.size) + 1))
    return parts


@pytest.mark.parametrize("num_workers", [1, 2, 4])
@pytest.mark.parametrize("server", range(3))
def test_the_mean_of_row_gradients(server, num_workers):
    layout = layouts(SPECS, 3)[server]
    rng = np.random.default_rng(10 * server + num_workers)
    merger = RowsMerger(layout)
    for _ in range(5):
        pushes = [rows_push(rng, SPECS, layout) for _ in range(num_workers)]
        expected = []
        for table, spec in enumerate(SPECS.sparse):
            # A row that a worker did not push counts as zero there.
            total = np.zeros((layout.sparse_rows[table], spec.dim), spec.dtype)
            for push in pushes:
                total[push[table].rows] += push[table].values
            expected.append(total / num_workers)
        hypers = [gradient.hyper.copy() for gradient in pushes[0]]
        touched = [set().union(*(push[t].rows.tolist() for push in pushes)) for t in range(2)]
        pushed = [sum(push[t].num_pushed for push in pushes) for t in range(2)]
        for push in pushes:
            merger.add(push)
            for gradient in push:  # copied: the lane is written again
                gradient.values[:], gradient.rows[:], gradient.hyper[:] = np.nan, -1, np.nan
        assert merger.count == num_workers
        for table, mean in enumerate(merger.take_mean()):
            assert sorted(mean.rows.tolist()) == sorted(touched[table]), "each row once"
            np.testing.assert_array_equal(mean.values, expected[table][mean.rows], strict=True)
            np.testing.assert_array_equal(mean.hyper, hypers[table])
            assert mean.num_pushed == pushed[table]
        assert merger.count == 0


def test_row_gradients_add_up_in_worker_order():
    """1e8 + 1 - 1e8 is 0 in float32, 1e8 - 1e8 + 1 is 1."""
    specs = TableSpecs((), (sparse_spec("emb", 1, 1),))
    results = []
    for order in ([1e8, 1, -1e8], [1e8, -1e8, 1]):
        merger = RowsMerger(layouts(specs, 1)[0])
        for value in order:
            merger.add([RowsGradient(hyper(), np.zeros(1, int), np.float32([[value]]), 1)])
        results.append(merger.take_mean()[0].values.item())
    assert results == [0, np.float32(1) / np.float32(3)]


def increasing(rng, count, num_rows, dim, dtype):
    rows = np.sort(rng.permutation(num_rows)[:count])
    values = (rng.normal(size=(count, dim)) * 10.0 ** rng.integers(-6, 6, (count, 1))).astype(dtype)
    values[rng.random(values.shape) < 0.2] = -0.0
    return rows, values


def added(left, right, num_rows):
    """What add_rows writes, and nothing behind it."""
    room = len(left[0]) + len(right[0])
    rows, values = np.full(room, -1), np.full((room, left[1].shape[1]), np.nan, left[1].dtype)
    size = add_rows(left, right, (rows, values), num_rows, "emb")
    assert (rows[size:] == -1).all()
    return rows[:size], values[:size]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("ours", "theirs"), [(0, 0), (0, 9), (40, 0), (1, 1), (90, 3), (55, 71)])
@pytest.mark.parametrize("dim", [1, 7, 16])
def test_a_compiled_merge_has_the_bits_of_a_sort(dim, ours, theirs, dtype, monkeypatch):
    pytest.importorskip("numba")
    rng = np.random.default_rng(ours)
    left, right = (increasing(rng, count, 100, dim, dtype) for count in (ours, theirs))
    rows, values = added(left, right, 100)
    monkeypatch.setattr(merge, "compiled_merge", lambda: None)
    by_sort = added(left, right, 100)
    np.testing.assert_array_equal(rows, by_sort[0], strict=True)
    assert values.tobytes() == by_sort[1].tobytes()
    total = np.zeros((100, dim), dtype)
    total[left[0]] += left[1]
    total[right[0]] += right[1]
    np.testing.assert_array_equal(values, total[rows])


def test_rows_in_any_order_are_sorted():
    left = np.array([9, 2]), np.float32([[1], [2]])
    right = np.array([2, 5]), np.float32([[10], [20]])
    rows, values = added(left, right, 10)
    assert rows.tolist() == [2, 5, 9]
    assert values.tolist() == [[12], [20], [1]]


def test_a_server_without_rows_merges_nothing():
    specs = TableSpecs((), (sparse_spec("emb", 1, 4),))
    merger = RowsMerger(layouts(specs, 3)[2])
    nothing = RowsGradient(hyper(), np.empty(0, np.int64), np.empty((0, 4), np.float32), 1)
    merger.add([nothing])
    merger.add([nothing])
    (mean,) = merger.take_mean()
    assert mean.values.shape == (0, 4)
    assert mean.num_pushed == 2
