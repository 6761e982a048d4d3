"""The rows of one look-up on their way to a worker."""

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from mpifleet.partition import UniqueKeys
from mpifleet.ps.homes import Home
from mpifleet.ps.mailbox import Lane, WorkerMailbox
from mpifleet.ps.message import NO_VERSION, Kind
from mpifleet.ps.read_versions import ReadVersions
from mpifleet.ps.spec import SparseSpec


class PulledRows(Protocol):
    """Rows that were asked for."""

    def read_near(self) -> None:
        """Read what this rank can read itself, now rather than in take()."""
        ...

    def take(self) -> np.ndarray:
        """The rows, [u, dim], once."""
        ...


class RowsPull:
    """One table's rows of one look-up: far servers are asked at once, near ones read when told.

    A worker has one question at a far server at a time: whoever asks the next one calls
    `finish_far` first.  row_bytes of a far server's answer must fit its REPLY lane.
    read: told which versions the rows are of when they are taken.
    """

    def __init__(
        self,
        home: Home,
        mailbox: WorkerMailbox,
        table: int,
        spec: SparseSpec,
        unique: UniqueKeys,
        read: ReadVersions,
    ) -> None:
        self._read = read
        self._versions = np.full(unique.num_servers, NO_VERSION, np.int64)
        self._home = home
        self._mailbox = mailbox
        self._table = table
        self._unique = unique
        self._out = np.empty((unique.keys.size, spec.dim), np.dtype(spec.dtype))
        servers = range(unique.num_servers)
        shares = {server: unique.share(server) for server in servers}
        shares = {server: share for server, share in shares.items() if share.stop > share.start}
        self._near = {s: share for s, share in shares.items() if home.reaches(s)}
        self._far = {s: share for s, share in shares.items() if not home.reaches(s)}
        self._has_near = False
        self._rounds = self._ask()
        next(self._rounds, None)

    def read_near(self) -> None:
        """See PulledRows; a second time it reads them as they are then. O(bytes moved)."""
        for server, share in self._near.items():
            rows = self._unique.rows[share]
            self._home.read_rows(server, self._table, rows, self._out[share])
            self._versions[server] = self._home.versions[server, Lane.ROWS]
        self._has_near = True

    def finish_far(self) -> None:
        """Take the far servers' answers; waits for them."""
        for _ in self._rounds:
            pass

    def take(self) -> np.ndarray:
        """See PulledRows."""
        if not self._has_near:
            self.read_near()
        self.finish_far()
        self._read.took_rows(self._table, self._versions)
        return self._out

    def _ask(self) -> Iterator[None]:
        """One question to every far server, yield, take the answers, and so on."""
        capacities = self._mailbox.layout.capacities
        row_bytes = self._out.shape[1] * self._out.itemsize
        chunk = min(capacities[Lane.REQUEST] // 8, capacities[Lane.REPLY] // row_bytes)
        asked = [(s, self._unique.rows[share], self._out[share]) for s, share in self._far.items()]
        start = 0
        while pending := [(s, rows, out) for s, rows, out in asked if rows.size > start]:
            tickets = []
            for server, rows, out in pending:
                part = slice(start, start + chunk)
                question = rows[part]
                ticket = self._mailbox.post(
                    server,
                    Lane.REQUEST,
                    Kind.PULL_ROWS,
                    argument=self._table,
                    sections=[(0, question)],
                    total_bytes=question.nbytes,
                )
                tickets.append((server, ticket, out[part]))
            yield
            for server, ticket, out in tickets:
                header = self._mailbox.wait_reply(server, ticket)
                if not start:
                    self._versions[server] = header.version
                self._mailbox.read_reply(server, out)
            start += chunk
