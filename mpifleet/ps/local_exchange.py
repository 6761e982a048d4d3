"""The parameter server within a single process, as an exchange."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpifleet.exchange import Gradients
from mpifleet.partition import UniqueKeys
from mpifleet.ps.finite import FiniteGuard, first_nonfinite
from mpifleet.ps.load_report import EVERYTHING, LoadOptions
from mpifleet.ps.message import DenseGradient, RowsGradient
from mpifleet.ps.rows_pull import PulledRows
from mpifleet.ps.saving import SaveOptions
from mpifleet.ps.seat import Seat
from mpifleet.ps.shard import Shard
from mpifleet.ps.spec import ShardLayout, TableSpecs
from mpifleet.ps.storage import Storage
from mpifleet.states import SavedState, StateProvider
from mpifleet.step_clock import StepClock


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
        load_strict: bool = True,
    ) -> None:
        self.seat = Seat.new(self.num_servers)
        layout = ShardLayout(specs, 0, 1)
        memory = np.zeros(layout.num_bytes, np.uint8)
        self._shard = Shard(layout, memory, dense_hypers, sparse_hypers)
        self._storage = Storage(None, None, self._shard)
        self._guard = FiniteGuard(skip_nonfinite)
        self._step = 0
        for table, flat in enumerate(dense):
            self._shard.set_dense(table, flat)
        self._storage.start_from(load_from, load_strict)

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
        bad = first_nonfinite([*gradients.dense, *gradients.rows])
        if self._guard.accept(bad, (*specs.dense, *specs.sparse), 0, self._step):
            self._shard.apply_dense(dense)
            self._shard.apply_rows(rows)
        meanwhile()
        self.clock.enter("pull")
        self.pull_dense(flats)

    def flush(self) -> None:
        """See Exchange."""

    def finish(self) -> None:
        """See Exchange."""
        self.settle_saves()

    def pause(self) -> None:
        """See Exchange."""

    def resume(self) -> None:
        """See Exchange."""

    def save(
        self,
        directory: Path,
        meta: dict[str, Any],
        buffers: dict[str, np.ndarray],
        options: SaveOptions,
        states: Sequence[SavedState] = (),
    ) -> None:
        """See Exchange."""
        self._storage.save(directory, meta, buffers, options, states)

    def states(self) -> Sequence[StateProvider]:
        """Nothing: all that steps change is in the tables."""
        return ()

    def apply_delivered(self) -> None:
        """See Exchange."""
        self.settle_saves()

    def settle_saves(self) -> None:
        """See Exchange."""
        self._storage.settle()

    def check(self, path: Path) -> None:
        """See Exchange."""
        self._storage.check(path)

    def load(self, path: Path, options: LoadOptions = EVERYTHING) -> None:
        """See Exchange."""
        self._storage.load(path, True, options)


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
