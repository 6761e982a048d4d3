"""The chunks of a compressed checkpoint, each complete at the one server that writes it.

A server's share of an array ends anywhere in a chunk. Who holds the chunk's first element owns it,
and the others send what they hold of it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from mpifleet.checkpoint import Chunks, DenseShape, SparseShape, chunks_of
from mpifleet.mpi import serial
from mpifleet.partition import block
from mpifleet.ps.saved_parts import ROWS
from mpifleet.ps.shard import Shard

_TAG = 3


@dataclass(frozen=True)
class SavedArray:
    """One array of the file that is made of chunks, and who has what of it.

    bounds: server s has the elements bounds[s] to bounds[s + 1] in the array's order.
    held: (first, last) -> those elements of this server's share, counted from the share's first.
    """

    path: str
    dtype: np.dtype
    chunks: Chunks
    bounds: tuple[int, ...]
    held: Callable[[int, int], np.ndarray]

    @property
    def num_bytes(self) -> int:
        """Of all elements."""
        return self.bounds[-1] * self.dtype.itemsize

    def owned(self, server: int) -> tuple[int, int]:
        """The chunks [first, last) that this server writes."""
        low, high = self.bounds[server : server + 2]
        return self.chunks.first_from(low), self.chunks.first_from(high)

    def senders(self, server: int) -> Iterator[tuple[int, int, int]]:
        """(sender, first, last): elements that others have of the last chunk of this server's."""
        first, last = self.owned(server)
        end = self.chunks.start(last) if last > first else 0
        for sender in range(server + 1, len(self.bounds) - 1):
            low, high = self.bounds[sender], min(self.bounds[sender + 1], end)
            if low < high:
                yield sender, low, high


def saved_arrays(
    shard: Shard, dense: Sequence[DenseShape], sparse: Mapping[int, SparseShape]
) -> list[SavedArray]:
    """Those of the arrays that are made of chunks, in the same order on every server.

    dense: all parameters of the job, in order, or none.  sparse: tables by their number.
    """
    return [*(_dense(shard, dense) if dense else ()), *_sparse(shard, sparse)]


def _dense(shard: Shard, dense: Sequence[DenseShape]) -> Iterator[SavedArray]:
    shapes, num_servers = iter(dense), shard.layout.num_servers
    for table, spec in enumerate(shard.layout.specs.dense):
        own, dtype = shard.layout.dense[table], np.dtype(spec.dtype)
        cuts = [block(spec.size, num_servers, s)[0] for s in range(num_servers)] + [spec.size]
        values: dict[str | None, np.ndarray] = {None: shard.dense(table)}
        values |= {slot: state.numpy() for slot, state in shard.dense_state[table].items()}
        for param in spec.params:
            shape, chunks = next(shapes), chunks_of(param.shape, dtype)
            if chunks is None:
                continue
            start, size = param.start, param.stop - param.start
            bounds = tuple(min(max(cut - start, 0), size) for cut in cuts)
            skipped = max(0, start - own.start)
            for slot, array in values.items():
                held = _within(array[skipped:])
                yield SavedArray(shape.path(slot), dtype, chunks, bounds, held)


def _sparse(shard: Shard, sparse: Mapping[int, SparseShape]) -> Iterator[SavedArray]:
    servers = range(shard.layout.num_servers + 1)
    for table, shape in sparse.items():
        dtype, key_type = np.dtype(shape.dtype), np.dtype(np.int64)
        rows = tuple(shape.first_row(server) for server in servers)
        chunks = chunks_of((shape.num_rows, shape.dim), dtype)
        if chunks is not None:
            elements = tuple(row * shape.dim for row in rows)
            values = {ROWS: shard.rows(table)}
            values |= {slot: state.numpy() for slot, state in shard.sparse_state[table].items()}
            for slot, array in values.items():
                held = _within(array.reshape(-1))
                yield SavedArray(shape.path(slot), dtype, chunks, elements, held)
        chunks = chunks_of((shape.num_rows,), key_type)
        if chunks is not None:
            held = _keys(shape, shard.layout.server)
            yield SavedArray(shape.path("keys"), key_type, chunks, rows, held)


def _within(array: np.ndarray) -> Callable[[int, int], np.ndarray]:
    return lambda first, last: array[first:last]


def _keys(shape: SparseShape, server: int) -> Callable[[int, int], np.ndarray]:
    step = shape.num_shards
    return lambda first, last: np.arange(first, last, dtype=np.int64) * step + server


class Borders:
    """Completes chunks that lie across the shares of several servers.

    mpi, comm: the servers', None in a single process.  All servers must take the elements of all
    arrays, in the arrays' order, else those that send to them wait in `finish` for ever.
    """

    def __init__(
        self, mpi: ModuleType | None, comm: Any, server: int, arrays: list[SavedArray]
    ) -> None:
        self.arrays = arrays
        self._mpi, self._comm, self._server = mpi, comm, server
        self._sent: list[tuple[Any, np.ndarray]] = []
        for array in arrays if comm is not None else ():
            self._send(array)

    def chunks(self) -> Iterator[tuple[SavedArray, int, np.ndarray]]:
        """All chunks of this server: array, number there, elements."""
        for array in self.arrays:
            for chunk in range(*array.owned(self._server)):
                start, stop = array.chunks.start(chunk), array.chunks.stop(chunk)
                yield array, chunk, self.elements(array, start, stop)

    def elements(self, array: SavedArray, first: int, last: int) -> np.ndarray:
        """Elements [first, last) of the array, chunks of this server's: a view where it has all.

        To be called in ascending order; the last call for an array receives from others.
        """
        low, high = array.bounds[self._server : self._server + 2]
        own = array.held(first - low, min(last, high) - low)
        if last <= high:
            return own
        parts = [own]
        for sender, start, stop in array.senders(self._server):
            part = np.empty(stop - start, array.dtype)
            with serial:
                self._comm.Recv(self._bytes(part), sender, _TAG)
            parts.append(part)
        return np.concatenate(parts)

    def drain(self, chunks: Iterable[object]) -> None:
        """`finish` after the rest of `chunks`: what others sent must be received."""
        for _ in chunks:
            pass
        self.finish()

    def finish(self) -> None:
        """Return once all that this server sends has arrived."""
        with serial:
            for request, _ in self._sent:
                request.Wait()
        self._sent = []

    def _send(self, array: SavedArray) -> None:
        for owner in range(self._server):
            for sender, first, last in array.senders(owner):
                if sender == self._server:
                    low = array.bounds[self._server]
                    part = array.held(first - low, last - low)
                    with serial:
                        request = self._comm.Isend(self._bytes(part), owner, _TAG)
                    self._sent.append((request, part))

    def _bytes(self, part: np.ndarray) -> list[Any]:
        assert self._mpi is not None
        return [part.view(np.uint8), self._mpi.BYTE]
