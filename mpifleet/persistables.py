"""Saving and loading everything that a job has learned, on its workers."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mpifleet._version import __version__
from mpifleet.checkpoint import LATEST
from mpifleet.errors import CheckpointError
from mpifleet.exchange import Exchange
from mpifleet.local_state import local_tensors, read_arrays, set_tensors, to_arrays
from mpifleet.optimizer import DistributedOptimizer
from mpifleet.ps.agreement import newest_for_all, raise_first_failure
from mpifleet.ps.saving import SaveOptions, appears
from mpifleet.roles import Roles
from mpifleet.states import SavedState
from mpifleet.strategy import DistributedStrategy

DEFAULTS = SaveOptions()


@dataclass(frozen=True)
class Persistables:
    """Tables and parameters on the servers, buffers on this worker.

    roles: None in a single process.  meet: around a collective of "worker" ranks.
    """

    roles: Roles | None
    strategy: DistributedStrategy
    model: nn.Module | None
    optimizer: DistributedOptimizer
    exchange: Exchange
    meet: Callable[[str], AbstractContextManager[None]]

    def save(self, directory: Path, options: SaveOptions = DEFAULTS) -> None:
        """Write a checkpoint, on worker 0; other workers only see their own pushes applied."""
        self.exchange.flush()
        if self.is_first:
            self.write(directory, options)

    @property
    def is_first(self) -> bool:
        """Whether this is worker 0."""
        return self.roles is None or self.roles.index == 0

    def write(
        self, directory: Path, options: SaveOptions, states: Sequence[SavedState] = ()
    ) -> None:
        """Write a checkpoint with these states in it. On worker 0; raises CheckpointError."""
        meta = {"package": __version__, "strategy": self.strategy.to_dict()}
        buffers = to_arrays(self._tensors())
        self.exchange.save(directory.absolute(), meta, buffers, options, states)
        if options.wait and not appears(directory.absolute() / LATEST):
            raise CheckpointError(f"{directory} is not the same directory on the node of worker 0")

    def load(self, directory: Path, prepare: Callable[[Path], None] = lambda _: None) -> None:
        """Replace tables, parameters and buffers by a checkpoint's. Collective over workers.

        prepare: called with the file on every worker once it is checked, before anything changes.
        Raises CheckpointError on every worker when one of them cannot: none waits for another.
        """
        comm = self.roles.group if self.roles is not None else None
        self.exchange.flush()  # nothing pushed before may be applied to what is loaded
        self.exchange.settle_saves()
        tensors = self._tensors()
        path = newest_for_all(comm, directory.absolute(), self._meeting)

        def agreed(call: Callable[[], Any]) -> Any:
            """What `call` gives; where one worker's fails, all raise its error. Collective."""
            result, failure = None, ""
            try:
                result = call()
            except CheckpointError as error:
                failure = str(error)
            raise_first_failure(comm, failure, self._meeting())
            return result

        agreed(lambda: self.exchange.check(path) if self.is_first else None)
        saved = agreed(lambda: read_arrays(path, tensors))
        agreed(lambda: prepare(path))
        agreed(lambda: self.exchange.load(path) if self.is_first else None)
        self.optimizer.look_anew()
        set_tensors(tensors, saved)

    def _meeting(self) -> AbstractContextManager[None]:
        return self.meet("worker")

    def _tensors(self) -> dict[str, Tensor]:
        if self.model is None:
            return {}
        return local_tensors(self.model, self.optimizer, everything=False)
