"""Adding gradients up, exactly and in a fixed order. Pure."""

from collections.abc import Sequence

import numpy as np
import torch

from mpifleet.partition import unique_keys
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

    Memory: one slice of every dense table.
    """

    def __init__(self, layout: ShardLayout) -> None:
        self._sums = [
            np.zeros(part.stop - part.start, np.dtype(spec.dtype))
            for spec, part in zip(layout.specs.dense, layout.dense, strict=True)
        ]
        self._present = [np.zeros(len(spec.params), np.uint8) for spec in layout.specs.dense]
        self._hypers: list[np.ndarray] = []
        self.count = 0

    def add(self, gradients: Sequence[DenseGradient]) -> None:
        """Add one worker's gradients; what absent parameters carry is zero."""
        for gradient, total, present in zip(gradients, self._sums, self._present, strict=True):
            if self.count:
                torch.from_numpy(total).add_(torch.from_numpy(gradient.values))
                np.maximum(present, gradient.present, out=present)
            else:
                total[:] = gradient.values
                present[:] = gradient.present
        if not self.count:
            self._hypers = [gradient.hyper.copy() for gradient in gradients]
        self.count += 1

    def take_mean(self) -> list[DenseGradient]:
        """Mean over the workers added, valid until the next `add`; hypers of the first."""
        for total in self._sums if self.count > 1 else ():
            # Mean over workers: equal to one step on the joint batch when shares are equal.
            torch.from_numpy(total).div_(self.count)
        self.count = 0
        return [
            DenseGradient(*parts)
            for parts in zip(self._hypers, self._present, self._sums, strict=True)
        ]


class RowsMerger:
    """Sums the workers' row gradients in the order they are added, then divides.

    Memory: the messages added since the last `take_mean`.
    """

    def __init__(self, layout: ShardLayout) -> None:
        self._specs: TableSpecs = layout.specs
        self._sparse_rows = layout.sparse_rows
        self._parts: list[list[RowsGradient]] = []

    @property
    def count(self) -> int:
        """Workers added since the last `take_mean`."""
        return len(self._parts)

    def add(self, gradients: Sequence[RowsGradient]) -> None:
        """Add one worker's gradients (copied)."""
        self._parts.append(
            [
                RowsGradient(g.hyper.copy(), g.rows.copy(), g.values.copy(), g.num_pushed)
                for g in gradients
            ]
        )

    def take_mean(self) -> list[RowsGradient]:
        """Mean over the workers added (a row that only some pushed counts as zero elsewhere)."""
        parts, self._parts = self._parts, []
        return [
            self._merge(table, [part[table] for part in parts]) for table in range(len(parts[0]))
        ]

    def _merge(self, table: int, parts: list[RowsGradient]) -> RowsGradient:
        if len(parts) == 1:
            return parts[0]
        rows = np.concatenate([part.rows for part in parts])
        values = torch.from_numpy(np.concatenate([part.values for part in parts]))
        name, bound = self._specs.sparse[table].name, self._sparse_rows[table]
        merged, sums = sum_duplicates(rows, values, max(bound, 1), name)
        num_pushed = sum(part.num_pushed for part in parts)
        return RowsGradient(parts[0].hyper, merged, sums.div_(len(parts)).numpy(), num_pushed)
