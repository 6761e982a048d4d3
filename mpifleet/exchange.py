"""What happens to one step's gradients between backward() and the next forward()."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mpifleet.partition import UniqueKeys
from mpifleet.ps.load_report import EVERYTHING, LoadOptions
from mpifleet.ps.rows_pull import PulledRows
from mpifleet.ps.saving import SaveOptions
from mpifleet.ps.seat import Seat
from mpifleet.states import SavedState, StateProvider
from mpifleet.step_clock import StepClock


@dataclass(frozen=True)
class Gradients:
    """Everything one step() hands over; arrays are not kept after the call.

    dense_hypers, sparse_hypers: float64 [tables, HYPER_SIZE]; present: uint8 [num_params] and
    dense: [size], one per dense table; unique and rows [u, dim], one per sparse table.
    """

    dense_hypers: np.ndarray
    present: list[np.ndarray]
    dense: list[np.ndarray]
    sparse_hypers: np.ndarray
    unique: list[UniqueKeys]
    rows: list[np.ndarray]


class Exchange(Protocol):
    """A worker's way to the tables. Only methods that say so are collective."""

    num_servers: int
    is_finished: bool
    seat: Seat
    """Whose clock runs and who has read what: another one while a training thread is at work."""
    waits_for_others: bool
    """Whether workers' steps wait for one another: who rests must then say so by `pause`."""

    @property
    def clock(self) -> StepClock:
        """The seat's."""
        ...

    def pull_rows(self, table: int, unique: UniqueKeys) -> np.ndarray:
        """Rows of unique.keys, [u, dim], for the caller to keep."""
        ...

    def begin_rows(self, table: int, unique: UniqueKeys) -> PulledRows:
        """Start such a pull and finish it later: what others push meanwhile may be missing."""
        ...

    def pull_dense(self, flats: list[np.ndarray]) -> None:
        """Current values of every dense table, each into flats[table] [size]."""
        ...

    def step(
        self,
        gradients: Gradients,
        flats: list[np.ndarray],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Hand over one step's gradients, then read the dense parameters into `flats`.

        meanwhile: work for the time until the dense parameters are ready.
        """
        ...

    def flush(self) -> None:
        """Return once everything this worker handed over is applied."""
        ...

    def finish(self) -> None:
        """Say that this worker hands over nothing more. Everything before it is applied."""
        ...

    def pause(self) -> None:
        """Not to be waited for by other workers' steps, from now until `resume`."""
        ...

    def resume(self) -> None:
        """Take part again. All workers that paused call it between two barriers."""
        ...

    def save(
        self,
        directory: Path,
        meta: dict[str, Any],
        buffers: dict[str, np.ndarray],
        options: SaveOptions,
        states: Sequence[SavedState] = (),
    ) -> None:
        """Write all tables, and what is given beside them, as one file into `directory`."""
        ...

    def states(self) -> Sequence[StateProvider]:
        """What it remembers from one step to the next that is not in the tables.

        Each exchange says so itself, if only that there is nothing: it is saved and resumed.
        """
        ...

    def apply_delivered(self) -> None:
        """Return once what any worker delivered before is applied. One worker calls.

        Waits for a save behind training, too. Raises CheckpointError where that failed.
        """
        ...

    def settle_saves(self) -> None:
        """Return once nothing that `save` began is being written. Raises CheckpointError."""
        ...

    def check(self, path: Path) -> None:
        """Check a checkpoint file's digests. Raises CheckpointError."""
        ...

    def load(self, path: Path, options: LoadOptions = EVERYTHING) -> None:
        """Replace the tables by those of a file that was checked. Raises CheckpointError."""
        ...
