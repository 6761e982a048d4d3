"""Saving and loading everything that a job has learned, on its workers."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mpifleet._version import __version__
from mpifleet.checkpoint import LATEST, MODEL_FACT
from mpifleet.errors import CheckpointError
from mpifleet.exchange import Exchange
from mpifleet.local_state import local_tensors, read_arrays, set_tensors, to_arrays
from mpifleet.model_names import names_of_model
from mpifleet.optimizer import DistributedOptimizer
from mpifleet.ps.agreement import newest_for_all, raise_first_failure
from mpifleet.ps.saving import SaveOptions, appears
from mpifleet.roles import Roles
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
        if self.roles is None or self.roles.index == 0:
            meta = {"package": __version__, "strategy": self.strategy.to_dict()}
            meta[MODEL_FACT] = names_of_model(self.model)
            buffers = to_arrays(self._tensors())
            self.exchange.save(directory.absolute(), meta, buffers, options)
            if options.wait and not appears(directory.absolute() / LATEST):
                raise CheckpointError(
                    f"{directory} is not the same directory on the node of worker 0"
                )

    def load(self, directory: Path) -> None:
        """Replace tables, parameters and buffers by a checkpoint's. Collective over workers.

        Raises CheckpointError on every worker when one of them cannot: none waits for another.
        """
        comm = self.roles.group if self.roles is not None else None
        self.exchange.flush()  # nothing pushed before may be applied to what is loaded
        self.exchange.settle_saves()
        tensors = self._tensors()
        path = newest_for_all(comm, directory.absolute(), self._meeting)
        is_first = self.roles is None or self.roles.index == 0

        def agreed(call: Callable[[], Any]) -> Any:
            """What `call` gives; where one worker's fails, all raise its error. Collective."""
            result, failure = None, ""
            try:
                result = call()
            except CheckpointError as error:
                failure = str(error)
            raise_first_failure(comm, failure, self._meeting())
            return result

        agreed(lambda: self.exchange.check(path) if is_first else None)
        saved = agreed(lambda: read_arrays(path, tensors))
        agreed(lambda: self.exchange.load(path) if is_first else None)
        for embedding in self.optimizer.embeddings:
            embedding.expect_nothing()
        self.optimizer.refresh()
        set_tensors(tensors, saved)

    def _meeting(self) -> AbstractContextManager[None]:
        return self.meet("worker")

    def _tensors(self) -> dict[str, Tensor]:
        if self.model is None:
            return {}
        return local_tensors(self.model, self.optimizer, everything=False)
