"""Chunks written through HDF5's MPI driver by all ranks at once, where h5py has it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5p, h5s

from mpifleet.checkpoint.digests import BLOCK_BYTES, Block, block_at
from mpifleet.partition import pieces

MPIO = "mpio"
"""What HDF5 calls its MPI driver."""
MAPS = "/proc/self/maps"
SLACK = 16
"""Part of the arrays' bytes, one in so many, that is reserved on top for what HDF5 adds."""
_abandoned: list[Any] = []


def why_not_collective() -> str:
    """Why h5py cannot write with the other ranks here; "" where it can. MPI must run already."""
    if not h5py.get_config().mpi:
        return "h5py was built without MPI"
    libraries = mpi_libraries(Path(MAPS).read_text(encoding="utf-8", errors="replace"))
    if len(libraries) > 1:
        return f"h5py and mpi4py use different MPI libraries ({', '.join(libraries)})"
    return ""


def mpi_libraries(maps: str) -> list[str]:
    """The MPI libraries among the mappings of a process, as the kernel lists them, sorted."""
    paths = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if "/" in line}
    names = ("libmpi.so", "libmpich.so", "libmpi_abi.so")
    return sorted(path for path in paths if Path(path).name.startswith(names))


def reserve(descriptor: int, num_bytes: int) -> None:
    """Have room on the disk for arrays of so many bytes, before anybody relies on it.

    A disk that fills up in a collective write leaves ranks waiting for one another.  HDF5 gives
    back what it does not need when it closes the file.  Raises OSError.
    """
    end = os.fstat(descriptor).st_size
    os.posix_fallocate(descriptor, end, max(1, num_bytes + num_bytes // SLACK))


class CollectiveFile:
    """A laid-out file, open on all ranks of `comm`. Every method is collective.

    Raises OSError or RuntimeError, not always on every rank: they must agree after each call.
    """

    def __init__(self, path: Path, comm: Any) -> None:
        self._file = h5py.File(path, "r+", driver=MPIO, comm=comm)
        self._how = h5p.create(h5p.DATASET_XFER)
        self._how.set_dxpl_mpio(h5py.h5fd.MPIO_COLLECTIVE)
        self._path = ""
        self._dataset: Any = None

    def write(self, path: str, corner: Sequence[int], values: np.ndarray | None) -> None:
        """Write whole chunks from `corner` on; None on a rank that has none now.

        values: C-contiguous, with as many axes as the array.
        """
        if path != self._path:
            self._path, self._dataset = path, self._file[path]
        identity = self._dataset.id
        there = identity.get_space()
        if values is None:
            # An empty selection, not no call: HDF5 waits for all ranks.
            there.select_none()
            here, values = there, np.empty(0, identity.dtype)
        else:
            there.select_hyperslab(tuple(corner), values.shape)
            here = h5s.create_simple(values.shape)
        identity.write(here, there, values, dxpl=self._how)

    def close(self) -> None:
        """Write what HDF5 has still to write."""
        self._dataset = None
        self._file.close()

    def abandon(self) -> None:
        """Leave it open, where other ranks could not open it: to close it would wait for them."""
        _abandoned.append(self)


def digest_share(path: Path, share: int, num_shares: int) -> Iterator[Block]:
    """Every num_shares-th block of a file, digested, after what this node wrote is on disk.

    Raises OSError.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fdatasync(descriptor)
        size = os.fstat(descriptor).st_size
        for start, stop in list(pieces(size, BLOCK_BYTES))[share::num_shares]:
            yield block_at(descriptor, start, stop)
    finally:
        os.close(descriptor)
