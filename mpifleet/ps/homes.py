"""Where a job's tables live, and how a worker reaches them: one home for all, on every rank.

Node home: each server's tables are in shared memory of its node. Workers of that node pull by
load, workers of other nodes are served through the mailbox (see ps.client).
World home: one window over all ranks; a worker pulls with one indexed one-sided read per server.

Both are locked windows: a server changes its tables under an exclusive lock, readers take a shared
one. MPI promises no fairness among them, so a server that wants its lock says so at a gate, and
readers look at the gate before they lock: the writer waits for at most one pull of every reader.
The versions of the tables stand beside the gate, so that a reader learns them in the same look.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

import numpy as np
import torch

from mpifleet.errors import ConfigError
from mpifleet.mpi import serial
from mpifleet.patience import SHORT_SLEEP_S
from mpifleet.ps.spec import ShardLayout
from mpifleet.roles import Role, Roles
from mpifleet.window import Window

_OPEN, _CLOSED = np.zeros(1, np.int64), np.ones(1, np.int64)
_GATE_SPINS = 20
_GATE_WORDS = 3
_WORD = 8


class Home:
    """Table memory of all servers as this rank sees it. Building and freeing are collective.

    memory: this rank's own tables, uint8, empty on workers.
    versions: int64 [num_servers, 2], columns DENSE and ROWS: updates that were in a server's tables
    when this rank last read there, or more by what came in during the read.
    """

    name: str
    place: str
    """Where the tables lie, in words for the log."""

    def __init__(
        self, mpi: ModuleType, roles: Roles, layouts: Sequence[ShardLayout], on_node: bool
    ) -> None:
        comm = roles.node if on_node else roles.world
        is_server = roles.role is Role.SERVER
        num_bytes = layouts[roles.index].num_bytes if is_server else 0
        self._layouts = layouts
        # First values are written to every element: nothing need be zero before.
        self._window = Window(mpi, comm, num_bytes, atomic=False, on_node=on_node, zero_bytes=0)
        self._gate = Window(mpi, comm, _GATE_WORDS * _WORD, atomic=True, on_node=on_node)
        self._rank = comm.rank
        self._ranks = [roles.node_rank(r) if on_node else r for r in roles.server_ranks]
        self._gate_words = np.zeros(_GATE_WORDS, np.int64)
        self.versions = np.zeros((len(layouts), _GATE_WORDS - 1), np.int64)
        self.memory = self._window.local

    def reaches(self, server: int) -> bool:
        """Whether this rank can read a server's tables itself."""
        return self._ranks[server] is not None

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """The writer's lock of a server on its own tables."""
        with serial:
            self._set_gate(_CLOSED)
            try:
                with self._window.exclusive(self._rank):
                    yield
            finally:
                self._set_gate(_OPEN)

    def _set_gate(self, value: np.ndarray) -> None:
        self._gate.store(self._rank, 0, value)
        self._gate.flush(self._rank)

    def stamp(self, lane: int, version: int) -> None:
        """Tell readers how many updates of DENSE or ROWS are in this server's own tables."""
        self._gate.store(self._rank, (1 + lane) * _WORD, np.array([version], np.int64))
        self._gate.flush(self._rank)

    @contextmanager
    def _reading(self, server: int) -> Iterator[int]:
        rank = self._ranks[server]
        assert rank is not None
        self._wait_open(rank)
        self.versions[server] = self._gate_words[1:]
        with self._window.shared(rank):
            yield rank

    def _wait_open(self, rank: int) -> None:
        polls = 0
        while True:
            self._gate.read(rank, 0, self._gate_words)
            self._gate.flush(rank)
            if not self._gate_words[0]:
                return
            polls += 1
            if polls > _GATE_SPINS:
                time.sleep(SHORT_SLEEP_S)
            else:
                os.sched_yield()

    def read_rows(self, server: int, table: int, rows: np.ndarray, out: np.ndarray) -> None:
        """out[i] = row rows[i] of a sparse table; rows int64 [n] distinct, out [n, dim]."""
        raise NotImplementedError

    def read_dense(self, server: int, outs: Sequence[np.ndarray]) -> None:
        """The server's slice of every dense table, each into its place of outs[table] [size]."""
        raise NotImplementedError

    def free(self) -> None:
        """Give the memory back. Collective. Views of `memory` must be gone."""
        self.memory = np.empty(0, np.uint8)
        self._window.free()
        self._gate.free()


class NodeHome(Home):
    """Tables in shared memory of the server's node."""

    name = "node"
    place = "shared memory of their server's node"

    def __init__(self, mpi: ModuleType, roles: Roles, layouts: Sequence[ShardLayout]) -> None:
        super().__init__(mpi, roles, layouts, on_node=True)
        self._dense: dict[int, list[np.ndarray]] = {}
        self._rows: dict[int, list[torch.Tensor]] = {}
        for server, rank in enumerate(self._ranks):
            if rank is not None:
                layout, memory = layouts[server], self._window.memory_of(rank)
                specs = layout.specs
                self._dense[server] = [
                    layout.dense_view(memory, t) for t in range(len(specs.dense))
                ]
                self._rows[server] = [
                    torch.from_numpy(layout.sparse_view(memory, t))
                    for t in range(len(specs.sparse))
                ]

    def read_rows(self, server: int, table: int, rows: np.ndarray, out: np.ndarray) -> None:
        """See Home. O(bytes moved)."""
        index, target = torch.from_numpy(rows), torch.from_numpy(out)
        with self._reading(server):
            torch.index_select(self._rows[server][table], 0, index, out=target)

    def read_dense(self, server: int, outs: Sequence[np.ndarray]) -> None:
        """See Home. O(bytes moved)."""
        with self._reading(server):
            for view, part, out in zip(
                self._dense[server], self._layouts[server].dense, outs, strict=True
            ):
                out[part.start : part.stop] = view

    def free(self) -> None:
        """See Home."""
        self._dense.clear()
        self._rows.clear()
        super().free()


class WorldHome(Home):
    """Tables in a window over all ranks."""

    name = "world"
    place = "one MPI window over all ranks"

    def __init__(self, mpi: ModuleType, roles: Roles, layouts: Sequence[ShardLayout]) -> None:
        super().__init__(mpi, roles, layouts, on_node=False)

    def read_rows(self, server: int, table: int, rows: np.ndarray, out: np.ndarray) -> None:
        """See Home. Building the datatype costs about 0.02 us a row, as much as the bytes."""
        offset = self._layouts[server].sparse_offsets[table]
        with self._reading(server) as rank:
            self._window.get_rows(rank, offset, rows, out)

    def read_dense(self, server: int, outs: Sequence[np.ndarray]) -> None:
        """See Home. O(bytes moved)."""
        with self._reading(server) as rank:
            for part, out in zip(self._layouts[server].dense, outs, strict=True):
                self._window.get(rank, part.offset, out[part.start : part.stop])


HOMES: dict[str, type[NodeHome] | type[WorldHome]] = {"node": NodeHome, "world": WorldHome}


def make_home(
    name: str, mpi: ModuleType, roles: Roles, layouts: Sequence[ShardLayout]
) -> NodeHome | WorldHome:
    """The home called `name`. Collective. Raises ConfigError for an unknown name."""
    if name not in HOMES:
        raise ConfigError(f"table home {name!r} is unknown; use one of {sorted(HOMES)}")
    return HOMES[name](mpi, roles, layouts)
