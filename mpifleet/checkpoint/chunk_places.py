"""Places in the file for chunks that others compress and write: HDF5 is told of sizes alone.

HDF5 cannot be told where a chunk lies, only what it is.  So it is given one of the right size that
holds nothing, and its write, which says where the chunk belongs, is caught on the way to the disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import h5py
import numpy as np

from mpifleet.checkpoint.directory import Newcomer
from mpifleet.checkpoint.sink import Sink


class Sized(NamedTuple):
    """A compressed chunk: its array, its place along each axis, its bytes, its filter mask."""

    path: str
    corner: Sequence[int]
    num_bytes: int
    mask: int


class ChunkPlaces:
    """Gives chunks of a laid-out file their places, until it is closed.

    Raises OSError for what the disk said.
    """

    def __init__(self, newcomer: Newcomer) -> None:
        self._sink = _CatchingSink(newcomer.descriptor)
        self._datasets: dict[str, h5py.Dataset] = {}
        try:
            self._file = h5py.File(self._sink, "r+")
        finally:
            self._sink.check()

    def close(self) -> None:
        """Write what HDF5 has still to write; may be called again."""
        try:
            self._file.close()
        finally:
            self._sink.check()

    def place(self, chunks: Iterable[Sized]) -> list[int]:
        """The byte offset of each chunk in the file. O(chunks), without their bytes."""
        offsets = [self._place(*chunk) for chunk in chunks]
        self._sink.check()
        return offsets

    def _place(self, path: str, corner: Sequence[int], num_bytes: int, mask: int) -> int:
        dataset = self._datasets.get(path)
        if dataset is None:
            dataset = self._datasets[path] = self._file[path]
        dataset.id.write_direct_chunk(tuple(corner), self._sink.stand_in(num_bytes), mask)
        return self._sink.taken()


class _CatchingSink(Sink):
    """A Sink that does not write the stand-in, and notes where it would have gone."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        self._stand_in = np.zeros(1, np.uint8)
        self._offset = -1

    def stand_in(self, num_bytes: int) -> np.ndarray:
        """So many bytes that hold nothing; untouched memory, which takes no room."""
        if self._stand_in.size < num_bytes:
            self._stand_in = np.zeros(num_bytes, np.uint8)
        return self._stand_in[:num_bytes]

    def taken(self) -> int:
        """Where the stand-in belongs that was written last. Raises RuntimeError if none was."""
        offset, self._offset = self._offset, -1
        if offset < 0:
            raise RuntimeError("HDF5 gave a chunk no place")
        return offset

    def write(self, data: Any) -> int:
        """As Sink; the stand-in is only noted."""
        view = np.frombuffer(data, np.uint8)
        if view.size and view.ctypes.data == self._stand_in.ctypes.data:
            self._offset = self.tell()
            self.seek(view.size, 1)
            return int(view.size)
        return super().write(data)
