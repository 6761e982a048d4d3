"""Two workers' row gradients added up in one pass, compiled by numba.

Both list their rows in increasing order, so merging needs no sort and no copy of both; the sums
are those of merge.sum_duplicates, to the last bit.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from mpifleet.ps.compiled import Compiler, Function


class CompiledMerge:
    """Raises ImportError on construction without numba."""

    def __init__(self) -> None:
        self._compiler = Compiler()
        self._compiled: dict[np.dtype[Any], Function] = {}

    def merge(
        self,
        left: tuple[np.ndarray, np.ndarray],
        right: tuple[np.ndarray, np.ndarray],
        out: tuple[np.ndarray, np.ndarray],
    ) -> int:
        """Write the sum of two (rows, values) into `out`; the number of rows written.

        rows: int64 [n], strictly increasing; values: [n, dim], one dtype.  out: room for both.
        """
        dtype = left[1].dtype
        if dtype not in self._compiled:
            none = tuple(array[:0] for array in (*left, *right, *out))
            self._compiled[dtype] = self._compiler.compile(_merge, none)
        return int(self._compiled[dtype](*left, *right, *out))


@functools.cache
def compiled_merge() -> CompiledMerge | None:
    """The compiled merge; None without numba."""
    try:
        return CompiledMerge()
    except ImportError:
        return None


def _merge(  # type: ignore[no-untyped-def]
    left_rows, left, right_rows, right, rows, values
):
    i, j, size, dim, zero = 0, 0, 0, left.shape[1], left.dtype.type(0)
    while i < left_rows.size or j < right_rows.size:
        # A sum begins with zero, so that a lone -0.0 becomes 0.0 as everywhere.
        if j == right_rows.size or (i < left_rows.size and left_rows[i] < right_rows[j]):
            rows[size] = left_rows[i]
            for k in range(dim):
                values[size, k] = zero + left[i, k]
            i += 1
        elif i == left_rows.size or right_rows[j] < left_rows[i]:
            rows[size] = right_rows[j]
            for k in range(dim):
                values[size, k] = zero + right[j, k]
            j += 1
        else:
            rows[size] = left_rows[i]
            for k in range(dim):
                values[size, k] = zero + left[i, k] + right[j, k]
            i += 1
            j += 1
        size += 1
    return size
