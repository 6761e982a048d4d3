"""The parameter server as an exchange, over MPI."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from mpifleet.errors import TableError
from mpifleet.exchange import Gradients
from mpifleet.partition import UniqueKeys
from mpifleet.ps.client import Client, pack_buffers
from mpifleet.ps.clocks import StalenessBound
from mpifleet.ps.finite import first_nonfinite
from mpifleet.ps.load_report import EVERYTHING, LoadOptions
from mpifleet.ps.mailbox import Lane
from mpifleet.ps.message import Kind
from mpifleet.ps.rows_pull import PulledRows
from mpifleet.ps.saving import SaveOptions
from mpifleet.ps.seat import Seat
from mpifleet.states import SavedState, StateProvider, pack_states
from mpifleet.step_clock import StepClock


class RemoteExchange:
    """A worker's exchange with the servers, in sync, hybrid or async mode.

    sync: a step returns when its mean over the active workers is applied; dense_sync: the dense
    part's mean.  staleness: by how many steps a worker may be ahead of the slowest, -1 for any.

    Dense first, pulled last: the dense gradients are pushed before the rows, the servers apply them
    first, and the dense parameters are read after that. One step of dense staleness costs several
    hundredths of AUC, sparse staleness costs none.
    """

    def __init__(
        self, client: Client, sync: bool, *, dense_sync: bool = False, staleness: int = -1
    ) -> None:
        self.num_servers = client.num_servers
        self._client = client
        # The lanes of which the servers apply one mean per step.
        merged = [lane for lane in client.lanes if sync or (dense_sync and lane is Lane.DENSE)]
        self._merged = merged
        self._bound = StalenessBound(client, staleness) if staleness >= 0 else None
        self.waits_for_others = bool(merged) or self._bound is not None
        self._step = 0
        self.is_finished = False
        self._is_paused = False
        self._saves_behind = False

    @property
    def seat(self) -> Seat:
        """See Exchange."""
        return self._client.seat

    @seat.setter
    def seat(self, seat: Seat) -> None:
        self._client.seat = seat

    @property
    def clock(self) -> StepClock:
        """See Exchange."""
        return self._client.seat.clock

    def pull_rows(self, table: int, unique: UniqueKeys) -> np.ndarray:
        """See Exchange."""
        self._check_open()
        return self._client.pull_rows(table, unique)

    def begin_rows(self, table: int, unique: UniqueKeys) -> PulledRows:
        """See Exchange."""
        self._check_open()
        return self._client.begin_rows(table, unique)

    def pull_dense(self, flats: list[np.ndarray]) -> None:
        """See Exchange."""
        self._check_open()
        self._client.pull_dense(flats)

    def step(
        self,
        gradients: Gradients,
        flats: list[np.ndarray],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """See Exchange. Returns when the next step may begin."""
        self._check_open()
        if self._is_paused:
            raise TableError(
                "a collective call of the workers failed on this worker, which is not waited for "
                "since: it cannot make another step"
            )
        self._step += 1
        client, specs = self._client, self._client.specs
        # A push is refused whole: no server sees more than its own part of it.
        bad = first_nonfinite([*gradients.dense, *gradients.rows])
        if specs.dense:
            client.push_dense(
                self._step, gradients.dense_hypers, gradients.present, gradients.dense, bad
            )
        if specs.sparse:
            client.push_rows(
                self._step, gradients.sparse_hypers, gradients.unique, gradients.rows, bad
            )
        if self._bound is not None:
            # First of all: what is read from here on is as fresh as the bound promises.
            self._bound.wait_for_turn()
        before = self.clock.enter("pull")
        meanwhile()
        self.clock.enter(before)
        if Lane.DENSE in self._merged:
            client.wait_version(Lane.DENSE, self._step)
        if specs.dense:
            client.wait_applied((Lane.DENSE,))
            before = self.clock.enter("pull")
            client.pull_dense(flats)
            self.clock.enter(before)
        if Lane.ROWS in self._merged:  # last: the dense parameters were read meanwhile
            client.wait_version(Lane.ROWS, self._step)

    def flush(self) -> None:
        """See Exchange."""
        self._check_open()
        self._client.wait_applied((Lane.DENSE, Lane.ROWS))

    def finish(self) -> None:
        """See Exchange. A second call does nothing."""
        if not self.is_finished:
            self.is_finished = True
            try:
                self.settle_saves()
            finally:
                self._client.announce(Kind.STOP)

    def pause(self) -> None:
        """See Exchange."""
        if self.waits_for_others and not self.is_finished:
            self._is_paused = True
            self._client.announce(Kind.PAUSE)

    def resume(self) -> None:
        """See Exchange."""
        if self.waits_for_others and not self.is_finished:
            # The others may have made more steps meanwhile: count on from where the servers are.
            if self._merged:
                self._step = max(self._client.version(lane) for lane in self._merged)
            self._client.announce(Kind.RESUME)
            self._is_paused = False
            if self._bound is not None:
                self._bound.resume()

    def save(
        self,
        directory: Path,
        meta: dict[str, Any],
        buffers: dict[str, np.ndarray],
        options: SaveOptions,
        states: Sequence[SavedState] = (),
    ) -> None:
        """See Exchange. One worker calls; raises CheckpointError."""
        self.flush()
        facts, payload = pack_buffers(buffers)
        packed = pack_states(states)
        request = {
            "directory": str(directory),
            "meta": meta,
            "buffers": facts,
            "states_bytes": len(packed),
            "options": asdict(options),
        }
        self._saves_behind |= not options.wait
        self._client.ask_all(Kind.SAVE, request, payload + packed)

    def states(self) -> Sequence[StateProvider]:
        """Nothing: steps are counted anew by each job, and all that steps change is in tables."""
        return ()

    def apply_delivered(self) -> None:
        """See Exchange. Servers apply what was delivered before they look at any save."""
        self.flush()
        self._saves_behind = False
        self._client.ask_all(Kind.SAVE, {"directory": None})

    def settle_saves(self) -> None:
        """See Exchange. Asks where this worker began one; raises CheckpointError."""
        if self._saves_behind:
            self._saves_behind = False
            self._client.ask_all(Kind.SAVE, {"directory": None})

    def check(self, path: Path) -> None:
        """See Exchange. One worker calls."""
        self._client.ask_all(Kind.LOAD, {"path": str(path), "check_only": True})

    def load(self, path: Path, options: LoadOptions = EVERYTHING) -> None:
        """See Exchange. One worker calls; raises CheckpointError."""
        self.flush()
        request = {"path": str(path), "check_only": False, **asdict(options)}
        self._client.ask_all(Kind.LOAD, request)

    def _check_open(self) -> None:
        if self.is_finished:
            raise TableError("this worker has stopped: tables cannot be used after stop_worker()")
