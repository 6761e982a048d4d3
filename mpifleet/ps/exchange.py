"""The parameter server as an exchange: remote over MPI, or within a single process."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpifleet.errors import TableError
from mpifleet.exchange import Gradients
from mpifleet.partition import UniqueKeys
from mpifleet.ps.client import Client, pack_buffers
from mpifleet.ps.clocks import StalenessBound
from mpifleet.ps.finite import FiniteGuard, first_nonfinite
from mpifleet.ps.mailbox import Lane
from mpifleet.ps.message import DenseGradient, Kind, RowsGradient
from mpifleet.ps.rows_pull import PulledRows
from mpifleet.ps.seat import Seat
from mpifleet.ps.shard import Shard
from mpifleet.ps.spec import ShardLayout, TableSpecs
from mpifleet.ps.storage import Storage
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
        for lane in self._merged:
            client.wait_version(lane, self._step)
        if specs.dense:
            client.wait_applied((Lane.DENSE,))
            self.clock.enter("pull")
            client.pull_dense(flats)

    def flush(self) -> None:
        """See Exchange."""
        self._check_open()
        self._client.wait_applied((Lane.DENSE, Lane.ROWS))

    def finish(self) -> None:
        """See Exchange. A second call does nothing."""
        if not self.is_finished:
            self.is_finished = True
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

    def save(self, directory: Path, meta: dict[str, Any], buffers: dict[str, np.ndarray]) -> None:
        """See Exchange. One worker calls; raises CheckpointError."""
        self.flush()
        facts, payload = pack_buffers(buffers)
        request = {"directory": str(directory), "meta": meta, "buffers": facts}
        self._client.ask_all(Kind.SAVE, request, payload)

    def load(self, directory: Path) -> None:
        """See Exchange. One worker calls; raises CheckpointError."""
        self.flush()
        self._client.ask_all(Kind.LOAD, {"directory": str(directory)})

    def _check_open(self) -> None:
        if self.is_finished:
            raise TableError("this worker has stopped: tables cannot be used after stop_worker()")


class LocalExchange:
    """All tables in this process: the same arithmetic on the same layout, without MPI.

    Memory: tables, optimizer state.
    """

    num_servers = 1
    is_finished = False
    waits_for_others = False

    def __init__(
        self,
        specs: TableSpecs,
        dense_hypers: np.ndarray,
        sparse_hypers: np.ndarray,
        dense: Sequence[np.ndarray],
        skip_nonfinite: bool,
        load_from: Path | None,
    ) -> None:
        self.seat = Seat.new(self.num_servers)
        layout = ShardLayout(specs, 0, 1)
        memory = np.zeros(layout.num_bytes, np.uint8)
        self._shard = Shard(layout, memory, dense_hypers, sparse_hypers)
        self._storage = Storage(None, None, [layout], self._shard)
        self._guard = FiniteGuard(skip_nonfinite)
        self._step = 0
        for table, flat in enumerate(dense):
            self._shard.set_dense(table, flat)
        if load_from is None:
            self._shard.initialize_rows()
        else:
            self._storage.load(load_from)

    @property
    def clock(self) -> StepClock:
        """See Exchange."""
        return self.seat.clock

    def pull_rows(self, table: int, unique: UniqueKeys) -> np.ndarray:
        """See Exchange."""
        spec = self._shard.layout.specs.sparse[table]
        out = np.empty((unique.rows.size, spec.dim), np.dtype(spec.dtype))
        self._shard.gather(table, unique.rows, out)
        return out

    def begin_rows(self, table: int, unique: UniqueKeys) -> PulledRows:
        """See Exchange. Nothing is on its way here: the rows are read when they are taken."""
        return _LocalRows(self, table, unique)

    def pull_dense(self, flats: list[np.ndarray]) -> None:
        """See Exchange."""
        for table, flat in enumerate(flats):
            flat[:] = self._shard.dense(table)

    def step(
        self,
        gradients: Gradients,
        flats: list[np.ndarray],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """See Exchange."""
        self._step += 1
        dense = [
            DenseGradient(*parts)
            for parts in zip(
                gradients.dense_hypers, gradients.present, gradients.dense, strict=True
            )
        ]
        rows = [
            RowsGradient(hyper, unique.rows, values, unique.rows.size)
            for hyper, unique, values in zip(
                gradients.sparse_hypers, gradients.unique, gradients.rows, strict=True
            )
        ]
        specs = self._shard.layout.specs
        if self._guard.accept((*specs.dense, *specs.sparse), (*dense, *rows), 0, self._step):
            self._shard.apply_dense(dense)
            self._shard.apply_rows(rows)
        meanwhile()
        self.clock.enter("pull")
        self.pull_dense(flats)

    def flush(self) -> None:
        """See Exchange."""

    def finish(self) -> None:
        """See Exchange."""

    def pause(self) -> None:
        """See Exchange."""

    def resume(self) -> None:
        """See Exchange."""

    def save(self, directory: Path, meta: dict[str, Any], buffers: dict[str, np.ndarray]) -> None:
        """See Exchange."""
        self._storage.save(directory, meta, buffers)

    def load(self, directory: Path) -> None:
        """See Exchange."""
        self._storage.load(directory)


class _LocalRows:
    """See PulledRows."""

    def __init__(self, exchange: LocalExchange, table: int, unique: UniqueKeys) -> None:
        self._asked = (exchange, table, unique)

    def read_near(self) -> None:
        """Nothing: take() reads."""

    def take(self) -> np.ndarray:
        """The rows as they are now."""
        exchange, table, unique = self._asked
        return exchange.pull_rows(table, unique)
