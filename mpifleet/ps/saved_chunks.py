"""The chunks of a compressed checkpoint, each complete at the one server that writes it.

A server's share of an array ends anywhere in a chunk. Who holds the chunk's first element owns it,
and the others send what they hold of it.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch

from mpifleet.checkpoint import Chunks, chunks_of
from mpifleet.mpi import serial
from mpifleet.partition import block
from mpifleet.ps.row_copy import gather_rows
from mpifleet.ps.save_content import Content
from mpifleet.ps.saved_parts import ROWS
from mpifleet.ps.shard import Shard

_TAG = 3
Held = Callable[[int, int], np.ndarray]
"""(first, last) -> these elements of a server's share of an array; its first is number 0."""


@dataclass(frozen=True)
class SavedArray:
    """One array of the file that is made of chunks, and who has what of it.

    bounds: server s has the elements bounds[s] to bounds[s + 1] in the array's order.
    held: this server's share.
    """

    path: str
    dtype: np.dtype
    chunks: Chunks
    bounds: tuple[int, ...]
    held: Held

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


def saved_arrays(shard: Shard, content: Content) -> list[SavedArray]:
    """Those of the arrays that are made of chunks, in the same order on every server."""
    return [*(_dense(shard, content) if content.dense else ()), *_sparse(shard, content)]


def _dense(shard: Shard, content: Content) -> Iterator[SavedArray]:
    shapes, num_servers = iter(content.dense), shard.layout.num_servers
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


def _sparse(shard: Shard, content: Content) -> Iterator[SavedArray]:
    servers = range(shard.layout.num_servers + 1)
    for table, shape in content.sparse.items():
        dtype, key_type = np.dtype(shape.dtype), np.dtype(np.int64)
        bounds = tuple(shape.first_row(server) for server in servers)
        rows = content.changed.get(table)
        chunks = chunks_of((shape.stored_rows, shape.dim), dtype)
        if chunks is not None:
            elements = tuple(row * shape.dim for row in bounds)
            values = {ROWS: torch.from_numpy(shard.rows(table)), **shard.sparse_state[table]}
            for slot, array in values.items():
                if rows is None:
                    held = _within(array.numpy().reshape(-1))
                else:
                    held = _gathered(array, rows, shard.breathe)
                yield SavedArray(shape.path(slot), dtype, chunks, elements, held)
        chunks = chunks_of((shape.stored_rows,), key_type)
        if chunks is not None:
            held = _keys(shape.num_shards, shard.layout.server, rows)
            yield SavedArray(shape.path("keys"), key_type, chunks, bounds, held)


def _within(array: np.ndarray) -> Held:
    return lambda first, last: array[first:last]


def _gathered(values: torch.Tensor, rows: np.ndarray, breathe: Callable[[], None]) -> Held:
    """The elements of these rows of values [num_rows, dim]; copies."""
    dim = values.shape[1]

    def held(first: int, last: int) -> np.ndarray:
        start = first // dim
        found = gather_rows(values, rows[start : -(-last // dim)], breathe).numpy()
        return found.reshape(-1)[first - start * dim : last - start * dim]

    return held


def _keys(num_shards: int, shard: int, rows: np.ndarray | None) -> Held:
    """The keys of these rows of a shard; of all for None."""
    if rows is not None:
        return lambda first, last: rows[first:last] * num_shards + shard
    return lambda first, last: np.arange(first, last, dtype=np.int64) * num_shards + shard


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
