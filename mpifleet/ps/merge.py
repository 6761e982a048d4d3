"""Adding gradients up, exactly and in a fixed order. Pure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from mpifleet.partition import chunks, row_chunk, unique_keys
from mpifleet.ps.compiled_merge import compiled_merge
from mpifleet.ps.message import DenseGradient, RowsGradient
from mpifleet.ps.spec import ShardLayout, TableSpecs


def segment_sum(values: torch.Tensor, order: np.ndarray, starts: np.ndarray) -> torch.Tensor:
    """out[i] = sum of values[order[starts[i]:starts[i + 1]]], added in that order.

    values: [n, dim]; order: int64 [n]; starts: int64 [u], strictly increasing.  Returns [u, dim].
    One pass over the values; torch's index_add_ gives the same bits and takes five times as long.
    """
    if not starts.size:
        return values.new_zeros((0, values.shape[1]))
    return torch.nn.functional.embedding_bag(
        torch.from_numpy(order), values, torch.from_numpy(starts), mode="sum"
    )


def sum_duplicates(
    rows: np.ndarray, values: torch.Tensor, num_rows: int, table: str
) -> tuple[np.ndarray, torch.Tensor]:
    """Distinct rows, increasing, and the sum of each one's values in the order given.

    rows: int64 [n]; values: [n, dim].
    """
    unique = unique_keys(rows, num_rows, 1, table)
    return unique.keys, segment_sum(values, unique.order, unique.starts)


Rows = tuple[np.ndarray, np.ndarray]
"""Rows of a table, int64 [n], and a value for each, [n, dim]."""


def add_rows(left: Rows, right: Rows, out: Rows, num_rows: int, table: str) -> int:
    """Write distinct rows, increasing, and the sums of their values into `out`; how many.

    The left side comes first in every sum. out: room for both.  Compiled where numba is installed
    and both sides increase; then O(bytes moved), else a sort.
    """
    compiled = compiled_merge()
    if compiled is not None and all(_increases(rows) for rows, _ in (left, right)):
        return compiled.merge(left, right, out)
    keys = np.concatenate([left[0], right[0]])
    values = torch.from_numpy(np.concatenate([left[1], right[1]]))
    merged, sums = sum_duplicates(keys, values, num_rows, table)
    out[0][: merged.size], out[1][: merged.size] = merged, sums.numpy()
    return merged.size


def _increases(rows: np.ndarray) -> bool:
    return bool((rows[1:] > rows[:-1]).all())


class DenseMerger:
    """Sums the workers' dense gradients in the order they are added, then divides.

    breathe: called between chunks of work.  Memory: one slice of every dense table.
    """

    def __init__(self, layout: ShardLayout, breathe: Callable[[], None] = lambda: None) -> None:
        self._sums = [
            torch.zeros(part.stop - part.start, dtype=getattr(torch, spec.dtype))
            for spec, part in zip(layout.specs.dense, layout.dense, strict=True)
        ]
        self._present = [np.zeros(len(spec.params), np.uint8) for spec in layout.specs.dense]
        self._hypers: list[np.ndarray] = []
        self._breathe = breathe
        self.count = 0

    def add(self, gradients: Sequence[DenseGradient]) -> None:
        """Add one worker's gradients; what absent parameters carry is zero."""
        for gradient, total, present in zip(gradients, self._sums, self._present, strict=True):
            values = torch.from_numpy(gradient.values)
            for start, stop in chunks(values.numel(), values.itemsize):
                if self.count:
                    total[start:stop].add_(values[start:stop])
                else:
                    total[start:stop] = values[start:stop]
                self._breathe()
            np.maximum(present * (self.count > 0), gradient.present, out=present)
        if not self.count:
            self._hypers = [gradient.hyper.copy() for gradient in gradients]
        self.count += 1

    def take_mean(self) -> list[DenseGradient]:
        """Mean over the workers added, valid until the next `add`; hypers of the first."""
        for total in self._sums if self.count > 1 else ():
            for start, stop in chunks(total.numel(), total.itemsize):
                # Mean over workers: equal to one step on the joint batch when shares are equal.
                total[start:stop].div_(self.count)
                self._breathe()
        self.count = 0
        return [
            DenseGradient(hyper, present, total.numpy())
            for hyper, present, total in zip(self._hypers, self._present, self._sums, strict=True)
        ]


class RowsMerger:
    """Sums the workers' row gradients in the order they are added, then divides.

    breathe: called between chunks of work.  Memory: the distinct rows of one step, twice while
    adding.
    """

    def __init__(self, layout: ShardLayout, breathe: Callable[[], None] = lambda: None) -> None:
        self._specs: TableSpecs = layout.specs
        self._sparse_rows = layout.sparse_rows
        self._merged: list[RowsGradient] = []
        self._breathe = breathe
        self.count = 0
        for spec in layout.specs.sparse:  # has it compiled before the first push waits for it
            none = np.empty(0, np.int64), np.empty((0, spec.dim), np.dtype(spec.dtype))
            add_rows(none, none, none, 1, spec.name)

    def add(self, gradients: Sequence[RowsGradient]) -> None:
        """Add one worker's gradients (copied). See add_rows for what it costs."""
        if self.count:
            merged = enumerate(zip(self._merged, gradients, strict=True))
            self._merged = [self._add(table, left, right) for table, (left, right) in merged]
        else:
            self._merged = [self._copy(gradient) for gradient in gradients]
        self.count += 1

    def take_mean(self) -> list[RowsGradient]:
        """Mean over the workers added (a row that only some pushed counts as zero elsewhere)."""
        merged, count = self._merged, self.count
        self._merged, self.count = [], 0
        for gradient in merged if count > 1 else ():
            for part in self._parts(gradient):
                torch.from_numpy(gradient.values[part]).div_(count)
        return merged

    def _parts(self, gradient: RowsGradient) -> Iterator[slice]:
        for start, stop in chunks(gradient.rows.size, _row_bytes(gradient)):
            yield slice(start, stop)
            self._breathe()

    def _copy(self, gradient: RowsGradient) -> RowsGradient:
        values = np.empty_like(gradient.values)
        for part in self._parts(gradient):
            values[part] = gradient.values[part]
        return replace(
            gradient, hyper=gradient.hyper.copy(), rows=gradient.rows.copy(), values=values
        )

    def _add(self, table: int, left: RowsGradient, right: RowsGradient) -> RowsGradient:
        name, bound = self._specs.sparse[table].name, max(self._sparse_rows[table], 1)
        most = left.rows.size + right.rows.size
        rows = np.empty(most, np.int64)
        values = np.empty((most, left.values.shape[1]), left.values.dtype)
        size = 0
        for ours, theirs in _ranges(left.rows, right.rows, _row_bytes(left)):
            pair = (left.rows[ours], left.values[ours]), (right.rows[theirs], right.values[theirs])
            size += add_rows(*pair, (rows[size:], values[size:]), bound, name)
            self._breathe()
        num_pushed = left.num_pushed + right.num_pushed
        return RowsGradient(left.hyper, rows[:size], values[:size], num_pushed)


def _row_bytes(gradient: RowsGradient) -> int:
    return gradient.values.shape[1] * gradient.values.itemsize


def _ranges(left: np.ndarray, right: np.ndarray, row_bytes: int) -> Iterator[tuple[slice, slice]]:
    """Ranges of rows, one after another, that hold a chunk of either side at most.

    Rows that do not increase, which no worker pushes, come in one range.
    """
    each = row_chunk(2 * row_bytes)
    bounds = np.empty(0, np.int64)
    if _increases(left) and _increases(right):
        bounds = np.sort(np.concatenate([left[each::each], right[each::each]]))
    cuts = (np.searchsorted(rows, bounds).tolist() for rows in (left, right))
    ends = ([0, *inner, rows.size] for inner, rows in zip(cuts, (left, right), strict=True))
    for (a, c), (b, d) in pairwise(zip(*ends, strict=True)):
        yield slice(a, b), slice(c, d)
