"""How the arrays of a compressed checkpoint are cut into chunks, and what a chunk is on disk.

Pure: no HDF5.  A chunk here is what HDF5's shuffle and deflate filters make and undo.
"""

from __future__ import annotations

import math
import re
import zlib
from dataclasses import dataclass

import numpy as np

from mpifleet.errors import CheckpointError

CHUNK_BYTES = 1 << 20
"""Upper bound of a chunk before compression, but for a single element that is larger: what HDF5
keeps unpacked by default, so that a reader of rows unpacks none twice."""
LEAST_BYTES = 16 << 10
"""Smaller arrays stay in one piece: the index of their chunks takes what compression could save."""
_GZIP = re.compile(r"gzip(?:-([1-9]))?")
_FASTEST = 1


def gzip_level(compression: str | None) -> int:
    """The level that `compression` asks for: 0 for None, 1 for "gzip", 1 to 9 for "gzip-1" to
    "gzip-9".

    Trained floats shrink by 15 % at level 1 and by 16 % at level 9, which takes ten times as long.
    Raises CheckpointError for anything else.
    """
    if compression is None:
        return 0
    found = _GZIP.fullmatch(compression) if isinstance(compression, str) else None
    if not found:
        raise CheckpointError(
            f'compression={compression!r}; use None, "gzip" (level {_FASTEST}, the fastest), or '
            '"gzip-1" to "gzip-9"'
        )
    return int(found[1] or _FASTEST)


@dataclass(frozen=True)
class Chunks:
    """The grid of chunks of one array.

    box: shape of a chunk: whole in the axes after `axis`, 1 in those before it.  So the elements of
    a chunk lie in one piece of the array's order, and what one at the edge lacks is at its end.
    """

    shape: tuple[int, ...]
    itemsize: int
    axis: int
    box: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements of a whole chunk."""
        return math.prod(self.box)

    @property
    def per_row(self) -> int:
        """Chunks along the axis that is cut."""
        return -(-self.shape[self.axis] // self.box[self.axis])

    @property
    def count(self) -> int:
        """Chunks of the array."""
        return math.prod(self.shape[: self.axis]) * self.per_row

    def start(self, chunk: int) -> int:
        """The first element of a chunk, in the array's order; for `count` the array's size."""
        row, place = divmod(chunk, self.per_row)
        return row * math.prod(self.shape[self.axis :]) + place * self.size

    def stop(self, chunk: int) -> int:
        """The element after its last."""
        return self.start(chunk + 1)

    def first_from(self, element: int) -> int:
        """The first chunk that begins at this element or after it; `count` where none does."""
        row, rest = divmod(element, math.prod(self.shape[self.axis :]))
        return row * self.per_row + min(-(-rest // self.size), self.per_row)

    def shape_of(self, size: int) -> tuple[int, ...]:
        """The shape of so many elements of neighbouring chunks of one row."""
        inner = self.size // self.box[self.axis]
        return (*self.box[: self.axis], size // inner, *self.box[self.axis + 1 :])

    def corner(self, chunk: int) -> tuple[int, ...]:
        """Where a chunk begins, along each axis."""
        row, place = divmod(chunk, self.per_row)
        before = np.unravel_index(row, self.shape[: self.axis]) if self.axis else ()
        inner = len(self.shape) - self.axis - 1
        return (*map(int, before), place * self.box[self.axis], *[0] * inner)


def chunks_of(shape: tuple[int, ...], dtype: np.dtype) -> Chunks | None:
    """The chunks of an array of a compressed checkpoint; None where it stays in one piece."""
    size = math.prod(shape)
    if not shape or not size or size * dtype.itemsize < LEAST_BYTES:
        return None
    most, axis, inner = max(1, CHUNK_BYTES // dtype.itemsize), len(shape) - 1, 1
    while axis and inner * shape[axis] <= most:
        inner *= shape[axis]
        axis -= 1
    length = min(shape[axis], max(1, most // inner))
    box = (*[1] * axis, length, *shape[axis + 1 :])
    return Chunks(shape, dtype.itemsize, axis, box)


def packed(data: np.ndarray, chunks: Chunks, level: int) -> tuple[bytes, int]:
    """(bytes on disk, filter mask) of a chunk.

    data: its elements, one-dimensional; what one at the edge lacks is filled with zeros.  Where
    deflate would not make it smaller, that filter is left out.
    """
    num_bytes = chunks.size * chunks.itemsize
    values = data.view(np.uint8)
    if values.size < num_bytes:
        values = np.concatenate([values, np.zeros(num_bytes - values.size, np.uint8)])
    if chunks.itemsize > 1:
        values = np.ascontiguousarray(values.reshape(-1, chunks.itemsize).T)
    small = zlib.compress(values.data, level)
    if len(small) < num_bytes:
        return small, 0
    return values.tobytes(), 1 << (chunks.itemsize > 1)  # deflate is the second filter, or the only
