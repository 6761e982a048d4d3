"""A server and its workers in one process, over real windows: what the server does, by itself.

Where a worker would wait for the server, the server has its turn; so no other process takes part,
and whatever lies between two looks at MPI is the server's own work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from mpifleet.patience import Patience
from mpifleet.ps.breath import Breath
from mpifleet.ps.client import Client
from mpifleet.ps.mailbox import Lane, ServerMailbox, WorkerMailbox
from mpifleet.ps.mailbox_plan import plan
from mpifleet.ps.server import ParameterServer
from mpifleet.ps.shard import Shard
from mpifleet.ps.spec import TableSpecs, layouts
from mpifleet.window import Window

MAILBOX_BYTES = 192 << 20
CLOCKS = (time.thread_time, time.perf_counter)


class GapClock:
    """The longest times between two looks at MPI.

    longest_s: of processor time, which other processes cannot stretch, and of wall time.
    """

    def __init__(self) -> None:
        self.longest_s = [0.0, 0.0]
        self.looks = 0
        self._last_s = [0.0, 0.0]

    def start(self) -> None:
        """A look at MPI before which nothing counts."""
        self._last_s = [clock() for clock in CLOCKS]

    def look(self) -> None:
        """One look at MPI."""
        now_s = [clock() for clock in CLOCKS]
        gaps_s = [now - last for now, last in zip(now_s, self._last_s, strict=True)]
        self.longest_s = [max(pair) for pair in zip(self.longest_s, gaps_s, strict=True)]
        self.looks += 1
        self._last_s = now_s


@dataclass(frozen=True)
class TurnPatience(Patience):
    """Waits by letting the server have its turns."""

    turn: Callable[[], object] = lambda: None

    def wait(
        self,
        is_ready: Callable[[], bool],
        describe: Callable[[], str],
        pulse: Callable[[], int] = lambda: 0,
    ) -> None:
        """Turns until `is_ready`."""
        del describe, pulse
        while not is_ready():
            self.turn()


class FarHome:
    """The home of a worker that reaches no server's memory."""

    def reaches(self, server: int) -> bool:
        """No."""
        del server
        return False


class OneProcess:
    """A server with `num_workers` workers of which each does one thing after the other.

    hyper: float64 [HYPER_SIZE], for all tables, whose first values are zeros.
    """

    def __init__(
        self, mpi: ModuleType, specs: TableSpecs, hyper: np.ndarray, num_workers: int, sync: bool
    ) -> None:
        self.layout = layouts(specs, 1)[0]
        self.hypers = [np.tile(hyper, (len(part), 1)) for part in (specs.dense, specs.sparse)]
        self.gaps = GapClock()
        self._comm = mpi.COMM_WORLD
        self._probe = lambda: self._comm.Iprobe(mpi.ANY_SOURCE, mpi.ANY_TAG)
        row_bytes = max(
            (spec.dim * np.dtype(spec.dtype).itemsize for spec in specs.sparse), default=0
        )
        boxes = plan(num_workers, MAILBOX_BYTES, self.layout.dense_message_bytes, row_bytes, True)
        head = boxes.lane(0, Lane.DENSE)
        self._boxes = Window(mpi, self._comm, boxes.num_bytes, atomic=True, zero_bytes=head)
        self._tables = Window(
            mpi, self._comm, self.layout.num_bytes, atomic=False, on_node=True, zero_bytes=0
        )
        # As a job's first values do; the optimizer's state stays untouched until the first push.
        self._tables.local[:] = 0
        self._mailbox = ServerMailbox(self._boxes, boxes, 0)
        self._server = ParameterServer(
            self._shard(),
            self._mailbox,
            sync=sync,
            skip_nonfinite=False,
            handlers={},
            progress=self._look,
        )
        patience = TurnPatience(turn=self._turn)
        self.clients = [
            Client([self.layout], FarHome(), WorkerMailbox(self._boxes, boxes, i, [0], patience))  # type: ignore[arg-type]
            for i in range(num_workers)
        ]

    def _shard(self) -> Shard:
        return Shard(
            self.layout,
            self._tables.local,
            *self.hypers,
            exclusive=self._exclusive,
            breathe=Breath(self._mailbox.beat, self._look),
            published=True,
        )

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        with self._tables.exclusive(0):
            yield

    def _look(self) -> None:
        self._probe()
        self.gaps.look()

    def _turn(self) -> None:
        self.gaps.start()
        self._server._turn()
        self.gaps.look()

    def free(self) -> None:
        """Give the memory back."""
        self._tables.free()
        self._boxes.free()
