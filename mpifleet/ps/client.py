"""A worker's side of the parameter server: push to lanes, pull by load, by read or served."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpifleet.array_bytes import arrays_of, bytes_of, fact_of
from mpifleet.errors import CheckpointError
from mpifleet.partition import UniqueKeys
from mpifleet.ps.homes import Home
from mpifleet.ps.mailbox import Lane, WorkerMailbox, lanes_of
from mpifleet.ps.message import NO_VERSION, Kind, dense_arrays, lay_out, rows_arrays
from mpifleet.ps.read_versions import ReadVersions
from mpifleet.ps.rows_pull import RowsPull
from mpifleet.ps.seat import Seat
from mpifleet.ps.spec import ShardLayout, TableSpecs


class Client:
    """Pushes and pulls of one worker. Nothing here is collective.

    layouts: one per server.
    """

    def __init__(self, layouts: Sequence[ShardLayout], home: Home, mailbox: WorkerMailbox) -> None:
        self.specs: TableSpecs = layouts[0].specs
        self.num_servers = len(layouts)
        self._layouts = layouts
        self._home = home
        self._mailbox = mailbox
        self.lanes = lanes_of(self.specs)
        self.seat = Seat(mailbox.clock, ReadVersions(self.num_servers))
        self._under_way: RowsPull | None = None

    @property
    def seat(self) -> Seat:
        """Whose clock runs, and whose reads a push is computed from."""
        return self._seat

    @seat.setter
    def seat(self, seat: Seat) -> None:
        self._seat = seat
        self._mailbox.clock = seat.clock

    # -- push -------------------------------------------------------------------------------------

    def push_dense(
        self,
        step: int,
        hypers: np.ndarray,
        present: list[np.ndarray],
        flats: list[np.ndarray],
        nonfinite: int = 0,
    ) -> None:
        """Deliver one step's dense gradients to all servers.

        hypers: float64 [num_dense, HYPER_SIZE]; present: uint8 [num_params] and flats: [size],
        one per dense table.  nonfinite: 1 + the first table, dense ones before sparse ones, with a
        gradient that is not finite: all servers refuse the push, whoever gets that gradient.
        Waits while the last push was not applied.
        """
        for server, layout in enumerate(self._layouts):
            arrays = dense_arrays(layout, hypers, present, flats)
            version = int(self._seat.read.dense[server])
            self._post_step(server, Lane.DENSE, step, nonfinite, arrays, version)

    def push_rows(
        self,
        step: int,
        hypers: np.ndarray,
        unique: list[UniqueKeys],
        values: list[np.ndarray],
        nonfinite: int = 0,
    ) -> None:
        """Deliver one step's row gradients to all servers, also where there are none.

        hypers: float64 [num_sparse, HYPER_SIZE]; unique and values [u, dim], one per sparse table.
        nonfinite: see push_dense. Waits while the last push was not applied.
        """
        versions = self._seat.read.rows_of_push().tolist()
        for server in range(self.num_servers):
            shares = [keys.share(server) for keys in unique]
            arrays = rows_arrays(
                hypers,
                [keys.rows[share] for keys, share in zip(unique, shares, strict=True)],
                [part[share] for part, share in zip(values, shares, strict=True)],
                [keys.keys.size for keys in unique],
            )
            self._post_step(server, Lane.ROWS, step, nonfinite, arrays, versions[server])

    def _post_step(
        self,
        server: int,
        lane: Lane,
        step: int,
        nonfinite: int,
        arrays: list[np.ndarray],
        version: int,
    ) -> None:
        sections, total_bytes = lay_out(arrays)
        self._mailbox.post(
            server,
            lane,
            Kind.STEP,
            step=step,
            argument=nonfinite,
            sections=sections,
            total_bytes=total_bytes,
            version=version,
        )

    def announce(self, kind: Kind) -> None:
        """Tell all servers STOP, PAUSE or RESUME; returns when they know, all before applied."""
        for server in range(self.num_servers):
            for lane in self.lanes:
                self._mailbox.post(server, lane, kind)
        self.wait_applied(self.lanes)

    def version(self, lane: Lane) -> int:
        """Updates that the first server has applied from DENSE or ROWS lanes."""
        return self._mailbox.version(0, lane)

    def wait_slowest(self, clock: int) -> int:
        """The clock of the slowest active worker, once it is at least `clock` on every server."""
        return min(self._mailbox.wait_slowest(server, clock) for server in range(self.num_servers))

    def wait_applied(self, lanes: Sequence[Lane]) -> None:
        """Return once what this worker delivered in `lanes` was dealt with everywhere."""
        for lane in lanes:
            for server in range(self.num_servers):
                self._mailbox.wait_empty(server, lane)

    def wait_version(self, lane: Lane, version: int) -> None:
        """Return once every server has applied `version` updates of this kind."""
        for server in range(self.num_servers):
            self._mailbox.wait_version(server, lane, version)

    # -- pull -------------------------------------------------------------------------------------

    def begin_rows(self, table: int, unique: UniqueKeys) -> RowsPull:
        """Ask the far servers for the rows of unique.keys; take() them later.

        One look-up is under way at a time: its far answers are waited for before the next one asks.
        """
        self._settle()
        spec = self.specs.sparse[table]
        self._under_way = RowsPull(self._home, self._mailbox, table, spec, unique, self._seat.read)
        return self._under_way

    def pull_rows(self, table: int, unique: UniqueKeys) -> np.ndarray:
        """The rows of unique.keys, [u, dim], as the servers have them now."""
        return self.begin_rows(table, unique).take()

    def _settle(self) -> None:
        """Have the answers of the last question before the next one is asked."""
        if self._under_way is not None:
            self._under_way.finish_far()
            self._under_way = None

    def pull_dense(self, flats: list[np.ndarray]) -> None:
        """Read all dense tables as the servers have them now; flats: [size], one per table."""
        for server in range(self.num_servers):
            if self._home.reaches(server):
                self._home.read_dense(server, flats)
                self._seat.read.dense[server] = self._home.versions[server, Lane.DENSE]
            else:
                self._seat.read.dense[server] = self._ask_dense(server, flats)

    def _ask_dense(self, server: int, flats: list[np.ndarray]) -> int:
        """Ask a far server for its dense slices; the version that the first answer is of."""
        self._settle()
        versions = []
        capacity = self._mailbox.layout.capacities[Lane.REPLY]
        for table, part in enumerate(self._layouts[server].dense):
            flat = flats[table][part.start : part.stop]
            chunk = capacity // flat.itemsize
            for start in range(0, flat.size, chunk):
                out = flat[start : start + chunk]
                question = np.array([start, start + out.size], np.int64)
                ticket = self._mailbox.post(
                    server,
                    Lane.REQUEST,
                    Kind.PULL_DENSE,
                    argument=table,
                    sections=[(0, question)],
                    total_bytes=question.nbytes,
                )
                versions.append(self._mailbox.wait_reply(server, ticket).version)
                self._mailbox.read_reply(server, out)
        return versions[0] if versions else NO_VERSION

    # -- save and load ----------------------------------------------------------------------------

    def ask_all(self, kind: Kind, request: dict[str, Any], payload: bytes = b"") -> None:
        """Send SAVE or LOAD to all servers and wait until all are done.

        request: JSON-able; payload: bytes that follow it, for the first server only.
        Raises CheckpointError with the text of the first server that failed.
        """
        self._settle()
        tickets = []
        for server in range(self.num_servers):
            text = json.dumps({**request, "has_payload": server == 0}).encode()
            parts = len(text).to_bytes(8, "little") + text + (payload if server == 0 else b"")
            whole = np.frombuffer(parts, np.uint8)
            tickets.append(
                self._mailbox.post(
                    server, Lane.REQUEST, kind, sections=[(0, whole)], total_bytes=whole.size
                )
            )
        failures = []
        for server, ticket in enumerate(tickets):
            header = self._mailbox.wait_reply(server, ticket)
            answer = np.empty(header.num_bytes, np.uint8)
            self._mailbox.read_reply(server, answer)
            if answer.size:
                failures.append(answer.tobytes().decode(errors="replace"))
        if failures:
            raise CheckpointError(failures[0])


def split_request(message: bytes) -> tuple[dict[str, Any], bytes]:
    """(request, payload) as `Client.ask_all` sent them."""
    size = int.from_bytes(message[:8], "little")
    return json.loads(message[8 : 8 + size]), message[8 + size :]


def pack_buffers(buffers: dict[str, np.ndarray]) -> tuple[list[list[Any]], bytes]:
    """Arrays as (JSON-able facts, bytes) that travel behind a SAVE request."""
    facts = [[name, fact_of(array)] for name, array in buffers.items()]
    return facts, bytes_of(buffers.values())


def unpack_buffers(facts: list[list[Any]], payload: bytes) -> dict[str, np.ndarray]:
    """The inverse of `pack_buffers`; views of the payload, which may go on after them."""
    arrays = arrays_of((fact for _, fact in facts), payload)
    return dict(zip((name for name, _ in facts), arrays, strict=True))
