"""One-sided memory: bytes on every rank of a communicator, reachable by all.

Two kinds that never mix. An *atomic* window lives in one Lock_all epoch from construction to free:
flags, counters and mailboxes. A *locked* window has no epoch but the `shared` and `exclusive`
blocks: tables that a server updates. Memory is addressed in bytes; ranges are checked here,
because MPI does not, and an access outside the target's memory kills it or reads zeros.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np

from mpifleet.errors import TableError
from mpifleet.mpi import gather_json, indexed_rows, inter_node_advice, mpi_type, serial
from mpifleet.partition import ALIGN_BYTES, align, pieces

MAX_INT32 = 2**31 - 1
MAX_COUNT = MAX_INT32
"""Most elements in one MPI call; larger transfers go in several."""


class Window:
    """Bytes of one-sided memory on every rank of `comm`. Building and freeing are collective.

    mpi: the mpi4py.MPI module; num_bytes: this rank's share, may be 0; atomic: see above;
    on_node: memory of all ranks can be loaded directly (`comm` must be within one node);
    zero_bytes: how many bytes begin as zeros, the rest as anything; None for all. What is not
    zeroed costs no memory until it is used.
    Raises TableError naming the cure when MPI offers no component.
    """

    def __init__(
        self,
        mpi: ModuleType,
        comm: Any,
        num_bytes: int,
        *,
        atomic: bool,
        on_node: bool = False,
        zero_bytes: int | None = None,
    ) -> None:
        self._mpi = mpi
        self._comm = comm
        self._atomic = atomic
        self._in_flight: dict[int, list[Any]] = {}
        self._row_types: dict[tuple[str, int], Any] = {}
        with serial:
            self._win = self._allocate(num_bytes, on_node)
            if self._win.Get_attr(mpi.WIN_MODEL) != mpi.WIN_UNIFIED:
                raise TableError(
                    "this MPI keeps separate copies of window memory (not WIN_UNIFIED)"
                )
            memory = np.frombuffer(self._win.tomemory(), np.uint8)
            start = -memory.ctypes.data % ALIGN_BYTES
            facts = gather_json(comm, (start, num_bytes))
            self._starts = [first for first, _ in facts]
            self._sizes = [size for _, size in facts]
            self.local: np.ndarray = memory[start : start + num_bytes]
            """This rank's memory, uint8 [num_bytes], on a cache line."""
            self.local[:zero_bytes] = 0
            self._shared = [self._memory(r) for r in range(comm.size)] if on_node else None
            if atomic:
                self._win.Lock_all()
                self._win.Sync()
            comm.Barrier()

    def _allocate(self, num_bytes: int, on_node: bool) -> Any:
        make = self._mpi.Win.Allocate_shared if on_node else self._mpi.Win.Allocate
        try:
            # Shared memory starts anywhere, so one line more lets every share begin on a line;
            # it also spares those components that refuse an empty share.
            return make(align(num_bytes) + ALIGN_BYTES, 1, comm=self._comm)
        except self._mpi.Exception as error:
            raise TableError(inter_node_advice(self._mpi)) from error

    def _memory(self, rank: int) -> np.ndarray:
        buffer, _ = self._win.Shared_query(rank)
        start = self._starts[rank]
        return np.frombuffer(buffer, np.uint8)[start : start + self._sizes[rank]]

    def memory_of(self, rank: int) -> np.ndarray:
        """The memory of another rank of the node, uint8; only for on_node windows."""
        assert self._shared is not None
        return self._shared[rank]

    # -- transfers --------------------------------------------------------------------------------

    def put(self, rank: int, offset: int, values: np.ndarray) -> None:
        """Start writing C-contiguous `values` at byte `offset`; complete after `flush`."""
        flat = self._bytes(rank, offset, values)
        with serial:
            for part, target in self._parts(rank, offset, flat, self._mpi.BYTE):
                self._win.Put(part, rank, target)
        self._in_flight.setdefault(rank, []).append(flat)

    def get(self, rank: int, offset: int, out: np.ndarray) -> None:
        """Start reading into C-contiguous `out` from byte `offset`; complete after `flush`."""
        flat = self._bytes(rank, offset, out)
        with serial:
            for part, target in self._parts(rank, offset, flat, self._mpi.BYTE):
                self._win.Get(part, rank, target)
        self._in_flight.setdefault(rank, []).append(flat)

    def get_rows(self, rank: int, offset: int, rows: np.ndarray, out: np.ndarray) -> None:
        """Start reading out[i] = row rows[i] of the table that begins at byte `offset`.

        rows: int64 [n], each row once; out: C-contiguous [n, dim].  Complete after `flush`.
        One call per MAX_COUNT elements; the datatype costs about 0.02 us a row to build.
        """
        _require_contiguous(out)
        if out.shape[:1] != rows.shape:
            raise TableError(f"{rows.size} rows do not fit an array of shape {out.shape}")
        if not rows.size:
            return
        row_bytes = out.shape[1] * out.itemsize
        self._check(rank, offset + int(rows.min()) * row_bytes, 0)
        self._check(rank, offset + int(rows.max()) * row_bytes, row_bytes)
        if int(rows.max()) > MAX_INT32:
            raise TableError(
                f"row {rows.max()} is beyond {MAX_INT32}, MPI's last: use more servers"
            )
        element = mpi_type(self._mpi, out.dtype)
        with serial:
            row_type = self._row_type(out.dtype, out.shape[1])
            for start, stop in pieces(rows.size, max(1, MAX_COUNT // out.shape[1])):
                target = indexed_rows(self._mpi, row_type, rows[start:stop]).Commit()
                self._win.Get(
                    [out[start:stop], element], rank, (self._starts[rank] + offset, 1, target)
                )
                target.Free()
        self._in_flight.setdefault(rank, []).append(out)

    def read(self, rank: int, offset: int, out: np.ndarray) -> None:
        """Start an element-wise atomic read into C-contiguous `out`; complete after `flush`."""
        _require_contiguous(out)
        self._check(rank, offset, out.nbytes)
        element = mpi_type(self._mpi, out.dtype)
        with serial:
            for part, target in self._parts(rank, offset, out.reshape(-1), element):
                unused = [part[0], 0, element]
                self._win.Get_accumulate(unused, part, rank, target, self._mpi.NO_OP)
        self._in_flight.setdefault(rank, []).append(out)

    def store(self, rank: int, offset: int, values: np.ndarray) -> None:
        """Start an element-wise atomic write of `values`; complete after `flush`."""
        self._accumulate(rank, offset, values, self._mpi.REPLACE)

    def add(self, rank: int, offset: int, values: np.ndarray) -> None:
        """Start an element-wise atomic addition of `values`; complete after `flush`."""
        self._accumulate(rank, offset, values, self._mpi.SUM)

    def _parts(
        self, rank: int, offset: int, flat: np.ndarray, element: Any
    ) -> Iterator[tuple[list[Any], tuple[int, int, Any]]]:
        """A transfer of `flat` in calls of at most MAX_COUNT elements: (memory here, place there).

        element: the MPI datatype of one element of `flat`.
        """
        first = self._starts[rank] + offset
        for start, stop in pieces(flat.size, MAX_COUNT):
            place = (first + start * flat.itemsize, stop - start, element)
            yield [flat[start:stop], element], place

    def _accumulate(self, rank: int, offset: int, values: np.ndarray, op: Any) -> None:
        _require_contiguous(values)
        self._check(rank, offset, values.nbytes)
        element = mpi_type(self._mpi, values.dtype)
        with serial:
            for part, target in self._parts(rank, offset, values.reshape(-1), element):
                self._win.Accumulate(part, rank, target, op)
        self._in_flight.setdefault(rank, []).append(values)

    # -- completion -------------------------------------------------------------------------------

    def flush(self, rank: int) -> None:
        """Complete everything started towards `rank`, here and there."""
        self._require_open()
        with serial:
            self._win.Flush(rank)
        self._in_flight.pop(rank, None)

    def sync(self) -> None:
        """Order this rank's loads and stores against one-sided accesses to its memory."""
        self._require_open()
        with serial:
            self._win.Sync()

    @contextmanager
    def shared(self, rank: int) -> Iterator[None]:
        """Readers' lock on one rank's memory; reads started inside are complete after it."""
        yield from self._locked(rank, self._mpi.LOCK_SHARED)

    @contextmanager
    def exclusive(self, rank: int) -> Iterator[None]:
        """Writer's lock on one rank's memory. Never wait for another rank inside."""
        yield from self._locked(rank, self._mpi.LOCK_EXCLUSIVE)

    def _locked(self, rank: int, kind: int) -> Iterator[None]:
        assert not self._atomic, "an atomic window is never locked"
        self._require_open()
        with serial:
            self._win.Lock(rank, kind)
            try:
                yield
            finally:
                self._win.Unlock(rank)
                self._in_flight.pop(rank, None)

    def free(self) -> None:
        """Give the memory back. Collective; a second call does nothing."""
        if self._win is None:
            return
        with serial:
            if self._atomic:
                self._win.Unlock_all()
            # Views of window memory must be gone before the window is.
            self.local = np.empty(0, np.uint8)
            self._shared = None
            self._in_flight.clear()
            for row_type in self._row_types.values():
                row_type.Free()
            win, self._win = self._win, None
            win.Free()

    # -- checks -----------------------------------------------------------------------------------

    def _bytes(self, rank: int, offset: int, values: np.ndarray) -> np.ndarray:
        _require_contiguous(values)
        self._check(rank, offset, values.nbytes)
        return values.reshape(-1).view(np.uint8)

    def _check(self, rank: int, offset: int, num_bytes: int) -> None:
        self._require_open()
        if offset < 0 or offset + num_bytes > self._sizes[rank]:
            raise TableError(
                f"bytes [{offset}, {offset + num_bytes}) are outside the "
                f"{self._sizes[rank]} bytes of rank {rank}"
            )

    def _require_open(self) -> None:
        if self._win is None:
            raise TableError("the window was freed")

    def _row_type(self, dtype: np.dtype, dim: int) -> Any:
        key = (np.dtype(dtype).char, dim)
        if key not in self._row_types:
            self._row_types[key] = mpi_type(self._mpi, dtype).Create_contiguous(dim).Commit()
        return self._row_types[key]


def _require_contiguous(values: np.ndarray) -> None:
    # MPI moves the bytes as they lie: those of a Fortran-ordered array would change places.
    if not values.flags.c_contiguous:
        raise TableError(f"array of shape {values.shape} must be C-contiguous for a transfer")
