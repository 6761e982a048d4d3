"""One-sided delivery: a lane per worker and kind in the server's memory, with a full/empty flag.

Delivery: Put the payload, Flush, then replace the flag, Flush. The server sees FULL by an atomic
read, Syncs, only then loads; it frees the lane by replacing the flag. An empty lane means that what
it held was dealt with, so a worker is never more than one message ahead: back pressure by
construction. A message larger than its lane goes in pieces. Flags and versions are replaced and
read, never added to, and never stored plainly.
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mpifleet.partition import ALIGN_BYTES, pieces
from mpifleet.patience import Patience
from mpifleet.ps.message import HEADER_BYTES, NO_VERSION, Header, Kind, Sections, join
from mpifleet.ps.spec import TableSpecs
from mpifleet.step_clock import StepClock
from mpifleet.window import Window


class Lane(enum.IntEnum):
    """A worker's lanes at a server; the last one is written by the server."""

    DENSE = 0
    ROWS = 1
    REQUEST = 2
    REPLY = 3


def lanes_of(specs: TableSpecs) -> list[Lane]:
    """The lanes in which a job pushes. Nobody takes turns in another, so nobody speaks there."""
    tables = {Lane.DENSE: specs.dense, Lane.ROWS: specs.sparse}
    return [lane for lane in tables if tables[lane]]


EMPTY = 0
_WORD = 8


@dataclass(frozen=True)
class MailboxLayout:
    """Where flags, versions and lanes lie in a server's mailbox memory; the same on every server.

    capacities: payload bytes of each Lane.
    num_bytes = 64 + num_workers * (64 + sum of (64 + capacity)).
    """

    num_workers: int
    capacities: tuple[int, int, int, int]

    @property
    def num_bytes(self) -> int:
        """Bytes of one server's mailbox."""
        return ALIGN_BYTES * (1 + self.num_workers) + self.num_workers * self._stride

    @property
    def _stride(self) -> int:
        return sum(HEADER_BYTES + capacity for capacity in self.capacities)

    def version(self, lane: Lane) -> int:
        """Byte offset of the count of updates applied from DENSE or ROWS lanes."""
        return lane * _WORD

    @property
    def beat(self) -> int:
        """Byte offset of a count that rises while the server works on something long."""
        return 2 * _WORD

    @property
    def slowest(self) -> int:
        """Byte offset of the least clock of all active workers; see ps.clocks."""
        return 3 * _WORD

    def flags(self, worker: int) -> int:
        """Byte offset of a worker's flags, one int64 per Lane."""
        return ALIGN_BYTES * (1 + worker)

    def lane(self, worker: int, lane: Lane) -> int:
        """Byte offset of a lane's header."""
        before = sum(HEADER_BYTES + self.capacities[i] for i in range(lane))
        return ALIGN_BYTES * (1 + self.num_workers) + worker * self._stride + before


class WorkerMailbox:
    """A worker's side: its own lanes at every server.

    server_ranks: ranks of the servers in the window's communicator; names: how to call them.
    """

    def __init__(
        self,
        window: Window,
        layout: MailboxLayout,
        worker: int,
        server_ranks: Sequence[int],
        patience: Patience,
    ) -> None:
        self.layout = layout
        self.clock = StepClock()
        self._window = window
        self._worker = worker
        self._ranks = server_ranks
        self._patience = patience
        self._posted = 0
        self._word = np.zeros(1, np.int64)

    def post(
        self,
        server: int,
        lane: Lane,
        kind: Kind,
        *,
        step: int = 0,
        argument: int = 0,
        sections: Sections = (),  # type: ignore[assignment]
        total_bytes: int = 0,
        version: int = NO_VERSION,
    ) -> int:
        """Deliver one message, waiting for the lane to be empty. Returns its sequence number.

        Returning means delivered, not applied.
        """
        capacity = self.layout.capacities[lane]
        header = Header(kind, step, argument, total_bytes, 0, total_bytes, version)
        if total_bytes <= capacity:
            return self._put(server, lane, header, sections)
        whole = join(sections, total_bytes)
        for start, stop in pieces(total_bytes, capacity):
            piece = replace(header, start=start, num_bytes=stop - start)
            self._put(server, lane, piece, [(0, whole[start:stop])])
        return self._posted

    def _put(self, server: int, lane: Lane, header: Header, sections: Sections) -> int:
        self.wait_empty(server, lane)
        rank, base = self._ranks[server], self.layout.lane(self._worker, lane)
        self._window.put(rank, base, header.encode())
        for offset, array in sections:
            if array.nbytes:
                self._window.put(rank, base + HEADER_BYTES + offset, array)
        self._window.flush(rank)
        self._posted += 1
        flag = np.array([self._posted], np.int64)
        self._window.store(rank, self.layout.flags(self._worker) + lane * _WORD, flag)
        self._window.flush(rank)
        return self._posted

    def wait_empty(self, server: int, lane: Lane) -> None:
        """Return once what this lane held was dealt with. Raises StallError."""
        offset = self.layout.flags(self._worker) + lane * _WORD
        self._wait(
            server,
            lambda: self._read(server, offset) == EMPTY,
            lambda: f"server {server} taking what worker {self._worker} put in lane {lane.name}",
        )

    def wait_version(self, server: int, lane: Lane, version: int) -> None:
        """Return once the server has applied `version` updates from DENSE or ROWS lanes."""
        self._wait(
            server,
            lambda: self.version(server, lane) >= version,
            lambda: (
                f"server {server} finishing {lane.name} update {version} "
                f"(it is at {self.version(server, lane)})"
            ),
        )

    def version(self, server: int, lane: Lane) -> int:
        """Updates applied so far from DENSE or ROWS lanes."""
        return self._read(server, self.layout.version(lane))

    def wait_slowest(self, server: int, clock: int) -> int:
        """The clock of the slowest active worker, once it is at least `clock`; see ps.clocks."""
        self._wait(
            server,
            lambda: self.slowest(server) >= clock,
            lambda: (
                f"the slowest worker making step {clock} (strategy.a_sync_configs['staleness']), "
                f"server {server} has it at {self.slowest(server)}"
            ),
        )
        return self.slowest(server)

    def slowest(self, server: int) -> int:
        """The least clock of all active workers, as this server has it."""
        return self._read(server, self.layout.slowest)

    def wait_reply(self, server: int, sequence: int) -> Header:
        """Return the header of the server's answer to the request with this sequence number."""
        offset = self.layout.flags(self._worker) + Lane.REPLY * _WORD
        self._wait(
            server,
            lambda: self._read(server, offset) == sequence,
            lambda: f"the answer of server {server} to request {sequence}",
        )
        words = np.empty(HEADER_BYTES, np.uint8)
        self._window.get(self._ranks[server], self.layout.lane(self._worker, Lane.REPLY), words)
        self._window.flush(self._ranks[server])
        return Header.decode(words)

    def _wait(self, server: int, is_ready: Callable[[], bool], describe: Callable[[], str]) -> None:
        before = self.clock.enter("wait")
        self._patience.wait(is_ready, describe, lambda: self._read(server, self.layout.beat))
        self.clock.enter(before)

    def read_reply(self, server: int, out: np.ndarray) -> None:
        """Read the answer's payload into C-contiguous `out`."""
        base = self.layout.lane(self._worker, Lane.REPLY) + HEADER_BYTES
        self._window.get(self._ranks[server], base, out)
        self._window.flush(self._ranks[server])

    def _read(self, server: int, offset: int) -> int:
        self._window.read(self._ranks[server], offset, self._word)
        self._window.flush(self._ranks[server])
        return int(self._word[0])


class ServerMailbox:
    """A server's side: the lanes of all workers in its own memory.

    rank: this server in the window's communicator.
    """

    def __init__(self, window: Window, layout: MailboxLayout, rank: int) -> None:
        self.layout = layout
        self._window = window
        self._rank = rank
        self._flags = np.zeros((layout.num_workers, ALIGN_BYTES // _WORD), np.int64)
        self._beats = 0
        self.versions = {Lane.DENSE: 0, Lane.ROWS: 0}
        """Updates applied, as published last."""

    def poll(self) -> np.ndarray:
        """All flags, int64 [num_workers, 8], columns by Lane; then payloads may be loaded."""
        self._window.read(self._rank, self.layout.flags(0), self._flags)
        self._window.flush(self._rank)
        self._window.sync()
        return self._flags

    def header(self, worker: int, lane: Lane) -> Header:
        """Header of a lane whose flag was FULL."""
        base = self.layout.lane(worker, lane)
        return Header.decode(self._window.local[base : base + HEADER_BYTES])

    def headers(self, lane: Lane) -> np.ndarray:
        """A view of all workers' headers, int64 [num_workers, 8], columns by Word."""
        base, following = (self.layout.lane(worker, lane) for worker in (0, 1))
        first = self._window.local[base : base + HEADER_BYTES].view(np.int64)
        shape = (self.layout.num_workers, first.size)
        return np.lib.stride_tricks.as_strided(first, shape, (following - base, _WORD))

    def payload(self, worker: int, lane: Lane, num_bytes: int) -> np.ndarray:
        """A view of a lane's payload, uint8 [num_bytes]."""
        base = self.layout.lane(worker, lane) + HEADER_BYTES
        return self._window.local[base : base + num_bytes]

    def clear(self, worker: int, lane: Lane) -> None:
        """Free a lane: what it held was dealt with, and views of it must not be used any more."""
        self._store(self.layout.flags(worker) + lane * _WORD, EMPTY)
        self._flags[worker, lane] = EMPTY

    def beat(self) -> None:
        """Show workers that wait that this server works."""
        self._beats += 1
        self._store(self.layout.beat, self._beats)

    def set_version(self, lane: Lane, version: int) -> None:
        """Publish the count of updates applied."""
        self.versions[lane] = version
        self._store(self.layout.version(lane), version)

    def set_slowest(self, clock: int) -> None:
        """Publish the least clock of all active workers."""
        self._store(self.layout.slowest, clock)

    def reply(self, worker: int, sequence: int, header: Header) -> None:
        """Publish the answer whose payload was written to the REPLY lane, and free the request."""
        base = self.layout.lane(worker, Lane.REPLY)
        self._window.local[base : base + HEADER_BYTES].view(np.int64)[:] = header.encode()
        self._store(self.layout.flags(worker) + Lane.REPLY * _WORD, sequence)
        self.clear(worker, Lane.REQUEST)

    def _store(self, offset: int, value: int) -> None:
        self._window.sync()
        self._window.store(self._rank, offset, np.array([value], np.int64))
        self._window.flush(self._rank)
