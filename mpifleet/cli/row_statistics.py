"""Statistics of a table's rows and their state, block by block; and one row by its key."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mpifleet.checkpoint import Checkpoint, blocks
from mpifleet.errors import KeyRangeError

FIRST_KEYS = 5
"""How many of the keys found are named."""


class RowStatistics:
    """Of [n, dim] values that come block by block, in the order of their keys.

    Rows with NaN or Inf are counted; minimum, maximum, mean and norms are of the other rows.
    """

    def __init__(self) -> None:
        self._count = self._zero = self._nonfinite = self._elements = 0
        self._first_keys: list[int] = []
        self._min, self._max = math.inf, -math.inf
        self._sum = self._norm_sum = 0.0
        self._norm_max, self._norm_max_key = -1.0, -1

    def add(self, first_key: int, values: np.ndarray) -> None:
        """values: [n, dim], the rows of the keys from first_key on."""
        is_finite = np.isfinite(values).all(axis=1)
        bad = np.flatnonzero(~is_finite)
        self._count += len(values)
        self._zero += int(np.count_nonzero(~values.any(axis=1)))
        self._nonfinite += bad.size
        self._first_keys += (bad[: FIRST_KEYS - len(self._first_keys)] + first_key).tolist()
        good = values if not bad.size else values[is_finite]
        if not good.size:
            return
        self._elements += good.size
        self._min, self._max = min(self._min, float(good.min())), max(self._max, float(good.max()))
        self._sum += float(good.sum(dtype=np.float64))
        norms = _norms(good)
        self._norm_sum += float(norms.sum())
        at = int(norms.argmax())
        if norms[at] > self._norm_max:
            self._norm_max = float(norms[at])
            self._norm_max_key = first_key + int(np.flatnonzero(is_finite)[at])

    def result(self) -> dict[str, Any]:
        """By name; None where there is no row to take it from."""
        some, finite = self._elements > 0, self._count - self._nonfinite
        return {
            "count": self._count,
            "zero_rows": self._zero,
            "nonfinite_rows": self._nonfinite,
            "nonfinite_first_keys": self._first_keys,
            "min": self._min if some else None,
            "max": self._max if some else None,
            "mean": self._sum / self._elements if some else None,
            "norm_mean": self._norm_sum / finite if some else None,
            "norm_max": self._norm_max if some else None,
            "norm_max_key": self._norm_max_key if some else None,
        }


def _norms(rows: np.ndarray) -> np.ndarray:
    """2-norm of each row, float64 [n]; exact also where squares leave the range of float64."""
    exact = rows.astype(np.float64)
    largest = np.abs(exact).max(axis=1)
    scale = np.where(largest > 0, largest, 1.0)
    exact /= scale[:, None]
    return scale * np.sqrt(np.einsum("ij,ij->i", exact, exact))


def table_statistics(
    checkpoint: Checkpoint, name: str, told: Callable[[int], object]
) -> dict[str, Any]:
    """Statistics of the rows and of each state slot of a table; memory: a few blocks.

    told: called with the bytes of each block read.  Raises CheckpointError.
    """
    table = checkpoint.sparse(name)
    found = {slot: RowStatistics() for slot in ("rows", *table.state_names)}
    for first, last in blocks.key_blocks(table):
        block = checkpoint.sparse_block(name, first, last)
        for slot, statistics in found.items():
            statistics.add(first, block[slot])
        told(sum(values.nbytes for values in block.values()))
    return {
        "path": str(checkpoint.path),
        "table": name,
        "rows": table.num_rows,
        "dim": table.dim,
        "dtype": table.dtype,
        "statistics": {slot: statistics.result() for slot, statistics in found.items()},
    }


def row_of_key(checkpoint: Checkpoint, name: str, key: int) -> dict[str, Any]:
    """The row of one key and its state, arrays [dim] by slot.

    Raises CheckpointError for an unknown table, KeyRangeError for a key outside it.
    """
    table = checkpoint.sparse(name)
    if not 0 <= key < table.num_rows:
        valid = f"its keys are 0 to {table.num_rows - 1}" if table.num_rows else "it has no keys"
        raise KeyRangeError(f"key {key} is outside table {name!r} of {checkpoint.path}; {valid}")
    block = checkpoint.sparse_block(name, key, key + 1)
    return {
        "path": str(checkpoint.path),
        "table": name,
        "key": key,
        "values": {slot: values[0] for slot, values in block.items()},
    }
