"""Adding gradients up, exactly and in a fixed order. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from mpifleet.partition import chunks, unique_keys
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

    breathe: called between tables.  Memory: the distinct rows of one step, twice while adding.
    """

    def __init__(self, layout: ShardLayout, breathe: Callable[[], None] = lambda: None) -> None:
        self._specs: TableSpecs = layout.specs
        self._sparse_rows = layout.sparse_rows
        self._merged: list[RowsGradient] = []
        self._breathe = breathe
        self.count = 0

    def add(self, gradients: Sequence[RowsGradient]) -> None:
        """Add one worker's gradients (copied). Costs a sort of the rows so far."""
        if self.count:
            merged = enumerate(zip(self._merged, gradients, strict=True))
            self._merged = [self._add(table, left, right) for table, (left, right) in merged]
        else:
            self._merged = [
                RowsGradient(g.hyper.copy(), g.rows.copy(), g.values.copy(), g.num_pushed)
                for g in gradients
            ]
        self.count += 1

    def take_mean(self) -> list[RowsGradient]:
        """Mean over the workers added (a row that only some pushed counts as zero elsewhere)."""
        merged, count = self._merged, self.count
        self._merged, self.count = [], 0
        for gradient in merged if count > 1 else ():
            torch.from_numpy(gradient.values).div_(count)
        return merged

    def _add(self, table: int, left: RowsGradient, right: RowsGradient) -> RowsGradient:
        self._breathe()
        num_pushed = left.num_pushed + right.num_pushed
        if not right.rows.size:
            return replace(left, num_pushed=num_pushed)
        rows = np.concatenate([left.rows, right.rows])
        values = torch.from_numpy(np.concatenate([left.values, right.values]))
        name, bound = self._specs.sparse[table].name, self._sparse_rows[table]
        # The sum so far comes first for every row: the order of addition is that of the workers.
        merged, sums = sum_duplicates(rows, values, max(bound, 1), name)
        return RowsGradient(left.hyper, merged, sums.numpy(), num_pushed)
