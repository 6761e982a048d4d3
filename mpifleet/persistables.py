"""Saving and loading everything that a job has learned, on its workers."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from torch import Tensor, nn

from mpifleet._version import __version__
from mpifleet.checkpoint import LATEST, MODEL_FACT, open_checkpoint
from mpifleet.errors import CheckpointError, ConfigError
from mpifleet.exchange import Exchange
from mpifleet.local_state import local_tensors, read_arrays, set_tensors, to_arrays
from mpifleet.log import get_logger
from mpifleet.model_names import names_of_model
from mpifleet.optimizer import DistributedOptimizer
from mpifleet.ps.agreement import newest_for_all, raise_first_failure
from mpifleet.ps.chain_check import check_chain
from mpifleet.ps.fit import fit
from mpifleet.ps.load_report import EVERYTHING, LoadOptions, LoadReport
from mpifleet.ps.saving import SaveOptions, appears
from mpifleet.roles import Roles
from mpifleet.states import SavedState
from mpifleet.strategy import DistributedStrategy

DEFAULTS = SaveOptions()
Result = TypeVar("Result")


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
        self.check_table(options.table)
        self.exchange.flush()
        if self.is_first:
            self.write(directory, options)

    def write(
        self, directory: Path, options: SaveOptions, states: Sequence[SavedState] = ()
    ) -> None:
        """Write a checkpoint with these states in it. On worker 0; raises CheckpointError."""
        meta = {"package": __version__, "strategy": self.strategy.to_dict()}
        meta[MODEL_FACT] = names_of_model(self.model)
        buffers = to_arrays(self._tensors()) if options.table is None else {}
        self.exchange.save(directory.absolute(), meta, buffers, options, states)
        if options.wait and not appears(directory.absolute() / LATEST):
            raise CheckpointError(f"{directory} is not the same directory on the node of worker 0")

    def load(
        self,
        directory: Path,
        options: LoadOptions = EVERYTHING,
        prepare: Sequence[Callable[[Path], None]] = (),
    ) -> LoadReport:
        """Replace tables, parameters and buffers by a checkpoint's. Collective over workers.

        Returns the same report on every worker.  prepare: called with the file on every worker once
        it is checked, each after the one before went well on all, before anything changes.  Raises
        CheckpointError on every worker when one of them cannot: none waits for another.
        """
        self.check_table(options.table)
        self.exchange.flush()  # nothing pushed before may be applied to what is loaded
        self.exchange.settle_saves()
        tensors = self._tensors() if options.table is None else {}
        path = self._checked(directory.absolute())
        report = self.agreed(lambda: self._fit(path, options))
        saved: dict[str, np.ndarray] = {}
        if options.table is None:
            saved, entries = self.agreed(lambda: read_arrays(path, tensors, options.strict))
            report = report.joined(entries)
        for call in prepare:
            self.agreed(functools.partial(call, path))
        self.by_first(lambda: self.exchange.load(path, options))
        self.optimizer.look_anew()
        set_tensors(tensors, saved)
        if self.is_first and not options.strict:
            get_logger().info("%s", report.text())
        return report

    def _checked(self, directory: Path) -> Path:
        """The file to load, whose digests are right. Collective over workers."""

        def check(path: Path) -> None:
            self.by_first(lambda: self.exchange.check(path))

        found = newest_for_all(self.comm, directory, self._meeting)
        return check_chain(self.comm, directory, found, check, self._meeting)

    def _fit(self, path: Path, options: LoadOptions) -> LoadReport:
        """What the servers find, found here: from the same names alone."""
        with open_checkpoint(path, checked=True) as checkpoint:
            return fit(self.optimizer.specs, checkpoint, options.strict, options.table)

    def agreed(self, call: Callable[[], Result]) -> Result:
        """What `call` gives; where one worker's fails, all raise its error. Collective."""
        result, failure = None, ""
        try:
            result = call()
        except CheckpointError as error:
            failure = str(error)
        raise_first_failure(self.comm, failure, self._meeting())
        return result  # type: ignore[return-value]  # None only where all raised

    def by_first(self, call: Callable[[], None]) -> None:
        """Worker 0 calls; where that fails, all raise its error. Collective."""
        self.agreed(call if self.is_first else lambda: None)

    @property
    def comm(self) -> Any:
        """The workers' communicator, None in a single process."""
        return self.roles.group if self.roles is not None else None

    @property
    def is_first(self) -> bool:
        """Whether this is worker 0."""
        return self.roles is None or self.roles.index == 0

    def check_table(self, table: str | None) -> None:
        """Raise ConfigError where the model has no table of this name."""
        names = [spec.name for spec in self.optimizer.specs.sparse]
        if table is not None and table not in names:
            raise ConfigError(
                f"table {table!r} is not in the model, which has "
                f"{', '.join(map(repr, names)) or 'none'}"
            )

    def _meeting(self) -> AbstractContextManager[None]:
        return self.meet("worker")

    def _tensors(self) -> dict[str, Tensor]:
        if self.model is None:
            return {}
        return local_tensors(self.model, self.optimizer, everything=False)
