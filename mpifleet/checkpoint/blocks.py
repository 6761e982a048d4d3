"""Cuts arrays and tables of a checkpoint into blocks, so that none has to fit into memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mpifleet.checkpoint.layout import SparseShape
from mpifleet.checkpoint.reader import Box
from mpifleet.partition import pieces

BLOCK_BYTES = 16 << 20
"""Upper bound of a block, but for a single row or element that is larger."""


def key_blocks(table: SparseShape) -> Iterator[tuple[int, int]]:
    """Ranges of keys [first, last) that cover the table; a block is their rows with all state."""
    row_bytes = table.num_bytes // max(1, table.num_rows)
    return pieces(table.num_rows, max(1, BLOCK_BYTES // max(1, row_bytes)))


def boxes(shape: tuple[int, ...], dtype: str) -> Iterator[Box]:
    """Parts that cover an array of this shape in its order, each without a gap in the file."""
    most, axis, inner = max(1, BLOCK_BYTES // np.dtype(dtype).itemsize), len(shape), 1
    while axis and inner * shape[axis - 1] <= most:
        axis -= 1
        inner *= shape[axis]
    if not axis:
        yield (slice(None),) * len(shape)
        return
    # The axes from `axis` on are taken whole, the one before is cut, those before it are fixed.
    for index in np.ndindex(shape[: axis - 1]):
        fixed = tuple(slice(i, i + 1) for i in index)
        for start, stop in pieces(shape[axis - 1], max(1, most // inner)):
            yield (*fixed, slice(start, stop))
