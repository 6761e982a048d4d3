"""Baselines of a table in raw MPI, numpy and torch: what any parameter server is measured against.

No code of the package: a road here shows what the machine and the MPI library can do.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch

LINE_BYTES = 64


def rows_of(keys: np.ndarray, dim: int) -> np.ndarray:
    """What row `key` of every table here holds at first: float32 [n, dim], exact integers.

    Elements repeat after 2**24 of them, so that every one is a float32 without rounding.
    """
    return ((keys[:, None] * dim + np.arange(dim)) % 2**24).astype(np.float32)


class PrivateTable:
    """A table of `num_rows` rows in this process's own memory, for the roads without MPI.

    rows: float32 [num_rows, dim].
    """

    def __init__(self, num_rows: int, dim: int) -> None:
        self.rows = rows_of(np.arange(num_rows), dim)

    def take(self, keys: np.ndarray) -> np.ndarray:
        """Rows of `keys` by numpy."""
        return self.rows.take(keys, axis=0)

    def index_select(self, keys: np.ndarray) -> np.ndarray:
        """Rows of `keys` by torch."""
        table = torch.from_numpy(self.rows)
        return torch.index_select(table, 0, torch.from_numpy(keys)).numpy()

    def index_add(self, keys: np.ndarray, grads: np.ndarray, rate: float) -> None:
        """sgd by torch: what a push is measured against."""
        table = torch.from_numpy(self.rows)
        table.index_add_(0, torch.from_numpy(keys), torch.from_numpy(grads), alpha=-rate)


class RawTables:
    """One table of `num_rows` rows on rank `server`, in a shared and in a one-sided window.

    mpi: the mpi4py.MPI module.  Building and freeing are collective over `comm`, whose ranks must
    share one node.  The reading rank also holds a private copy.
    """

    def __init__(self, mpi: ModuleType, comm: Any, num_rows: int, dim: int, server: int) -> None:
        self._mpi, self._server, self._dim = mpi, server, dim
        here = 4 * num_rows * dim + LINE_BYTES if comm.rank == server else LINE_BYTES
        self._shared = mpi.Win.Allocate_shared(here, 1, comm=comm)
        self._remote = mpi.Win.Allocate(here, 1, comm=comm)
        self._row = mpi.FLOAT.Create_contiguous(dim).Commit()
        own = np.frombuffer(self._remote.tomemory(), np.uint8)
        start = np.array([_to_line(own)])
        comm.Bcast(start, server)
        self._start = int(start[0])
        self._loaded = self._table(self._shared.Shared_query(server)[0], num_rows)
        self.private = PrivateTable(0 if comm.rank == server else num_rows, dim)
        if comm.rank == server:
            self._fill(self._shared, self._loaded)
            self._fill(self._remote, self._table(own, num_rows))
        comm.Barrier()

    def _table(self, memory: Any, num_rows: int) -> np.ndarray:
        """float32 [num_rows, dim] within window memory, on a cache line.

        Every process maps a window at a page, so that all agree where the line begins.
        """
        bytes_here = np.frombuffer(memory, np.uint8)
        start = _to_line(bytes_here)
        rows = bytes_here[start : start + 4 * num_rows * self._dim].view(np.float32)
        return rows.reshape(num_rows, self._dim)

    def _fill(self, win: Any, table: np.ndarray) -> None:
        win.Lock(self._server, self._mpi.LOCK_EXCLUSIVE)
        table[:] = rows_of(np.arange(len(table)), self._dim)
        win.Unlock(self._server)

    def pulls(self) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
        """The roads of a pull by name, all of which return the same rows."""
        return {
            "numpy take": self.private.take,
            "torch index_select": self.private.index_select,
            "loop of Get": self.loop_of_gets,
            "raw load": self.load,
            "raw indexed Get": self.indexed_get,
        }

    def loop_of_gets(self, keys: np.ndarray) -> np.ndarray:
        """One Get per row in one shared epoch: the road nobody should take."""
        rows = np.empty((keys.size, self._dim), np.float32)
        self._remote.Lock(self._server, self._mpi.LOCK_SHARED)
        for row, key in zip(rows, keys.tolist(), strict=True):
            self._remote.Get(row, self._server, self._start + 4 * self._dim * key)
        self._remote.Unlock(self._server)
        return rows

    def load(self, keys: np.ndarray) -> np.ndarray:
        """torch, out of the server's shared memory under the shared lock."""
        table = torch.from_numpy(self._loaded)
        self._shared.Lock(self._server, self._mpi.LOCK_SHARED)
        rows = torch.index_select(table, 0, torch.from_numpy(keys))
        self._shared.Unlock(self._server)
        return rows.numpy()

    def indexed_get(self, keys: np.ndarray) -> np.ndarray:
        """One Get with an indexed type, whose building is part of the road."""
        rows = np.empty((keys.size, self._dim), np.float32)
        # mpi4py reads a list four times as fast as it reads a numpy array element by element.
        picked = self._row.Create_indexed_block(1, keys.tolist()).Commit()
        self._remote.Lock(self._server, self._mpi.LOCK_SHARED)
        self._remote.Get(rows, self._server, [self._start, 1, picked])
        self._remote.Unlock(self._server)
        picked.Free()
        return rows

    def free(self) -> None:
        """Give the windows back. Collective."""
        self._loaded = np.empty((0, self._dim), np.float32)  # a view outliving its window crashes
        self._row.Free()
        self._shared.Free()
        self._remote.Free()


def _to_line(memory: np.ndarray) -> int:
    """Bytes from the beginning of `memory` to its first cache line."""
    return int(-memory.ctypes.data % LINE_BYTES)
