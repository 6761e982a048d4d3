"""Everything that training needs to go on as if it had never stopped: saved, and brought back."""

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpifleet.checkpoint import is_begun, newest, open_checkpoint
from mpifleet.checkpoint.layout import json_text
from mpifleet.errors import CheckpointError
from mpifleet.job_states import Execution, JobStates, ParamGroups, Progress, Registered
from mpifleet.log import get_logger
from mpifleet.mpi import bcast_json
from mpifleet.persistables import Persistables
from mpifleet.ps.agreement import first_failure
from mpifleet.ps.saving import SaveOptions
from mpifleet.state_gathering import gather_states
from mpifleet.states import State, StateProvider


@dataclass
class _Found:
    """What a worker takes from a checkpoint, and what it does not, in words."""

    taken: list[tuple[StateProvider, State]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    progress: Any = None
    training_threads: int = 0


@dataclass
class _Tried:
    """Objects of the script that took a state, which they may refuse, before anything else changed.

    before: their own states, where they could tell them.
    """

    before: list[tuple[StateProvider, State]] = field(default_factory=list)

    def try_out(self, taken: list[tuple[StateProvider, State]]) -> None:
        """Raises CheckpointError where one does not take it."""
        for provider, state in taken:
            if isinstance(provider, Registered):
                with suppress(CheckpointError):
                    self.before.append((provider, provider.state()))
                provider.restore(state)

    def take_back(self) -> None:
        """Have all as they were; one that does not take its own state either stays as it is."""
        for provider, state in self.before:
            with suppress(CheckpointError):
                provider.restore(state)


@dataclass(frozen=True)
class Resumption:
    """Saves and resumes on a worker; every call is collective over the workers."""

    persistables: Persistables
    states: JobStates

    def save(self, directory: Path, progress: Any, options: SaveOptions) -> None:
        """Write a checkpoint from which training goes on; raises CheckpointError on every worker.

        All workers' pushes are applied and none makes a step until the tables are copied.
        """
        base = self.persistables
        base.exchange.flush()
        own, failure = [], ""
        try:
            json_text("progress", progress)
            for provider in self._providers(progress):
                own.append((provider.name, provider.per_worker, provider.state()))
        except CheckpointError as error:
            failure = str(error)
        with base.meet("worker"):
            failure = first_failure(base.comm, failure)
            try:
                gathered = [] if failure else gather_states(base.comm, own)
            except CheckpointError as error:  # the same on every worker
                failure = str(error)
        if failure:
            raise CheckpointError(failure)
        base.by_first(lambda: base.write(directory, options, gathered))
        if base.is_first:
            how = "written" if options.wait else "begun"
            get_logger().info("checkpoint %s in %s%s", how, directory, _at(progress))
        # Who goes on and who resumes from here does so from the same values.
        base.optimizer.look_anew()

    def resume(self, directory: Path) -> Any:
        """Take everything from the newest checkpoint; what this worker gave as progress.

        None where the directory has no checkpoint yet.  Raises CheckpointError on every worker; as
        long as the file does not fit, nothing has changed.
        """
        path = self._newest(directory.absolute())
        if path is None:
            if self.persistables.is_first:
                get_logger().info("no checkpoint in %s yet: training begins", directory)
            return None
        found, tried = _Found(), _Tried()

        def look(path: Path) -> None:
            self._look_into(path, found)

        def try_out(_: Path) -> None:
            tried.try_out(found.taken)

        def restore() -> None:
            for provider, state in found.taken:
                provider.restore(state)

        try:
            self.persistables.load(path, prepare=(look, try_out))
        except CheckpointError:
            tried.take_back()
            raise
        self.persistables.agreed(restore)
        self.states.expect_threads(found.training_threads)
        if self.persistables.is_first:
            get_logger().info("resumed from %s%s", path, _at(found.progress))
            if found.notes:
                get_logger().warning("resumed, but not bit for bit: %s", "; ".join(found.notes))
        return found.progress

    def _providers(self, progress: Any = None) -> list[StateProvider]:
        base = self.persistables
        return self.states.providers(base.model, base.optimizer, base.strategy.mode, progress)

    def _newest(self, directory: Path) -> Path | None:
        failure, found = "", None
        if self.persistables.is_first:
            try:
                self.persistables.exchange.settle_saves()  # one behind training counts
                found = str(newest(directory)) if is_begun(directory) else None
            except (CheckpointError, OSError) as error:
                failure = str(error)
        if self.persistables.comm is not None:
            with self.persistables.meet("worker"):
                failure, found = bcast_json(self.persistables.comm, (failure, found))
        if failure:
            raise CheckpointError(failure)
        return None if found is None else Path(found)

    def _look_into(self, path: Path, found: _Found) -> None:
        """Read and check what this worker is to take. Raises CheckpointError."""
        roles = self.persistables.roles
        here, count = (roles.index, roles.num_workers) if roles is not None else (0, 1)
        providers = {provider.name: provider for provider in self._providers()}
        own = {provider.name for provider in self.persistables.exchange.states()}
        with open_checkpoint(path, checked=True) as checkpoint:
            saved = checkpoint.states
            as_many = saved.workers == count
            mode = saved.state("execution", 0).facts.get("mode")
            left_out = []
            for name, provider in providers.items():
                if name in own and name not in saved.names:
                    if mode == self.persistables.strategy.mode:
                        raise CheckpointError(f"state {name!r} is not in {path}")
                    continue  # another mode has no such state: it starts anew
                if provider.per_worker and not as_many:
                    left_out.append(name)
                    continue
                state = saved.state(name, here if as_many else 0)
                provider.check(state)
                found.taken.append((provider, state))
                self._note(provider, state, found)
            unknown = [name for name in saved.names if name not in providers]
        if not as_many:
            found.notes.append(
                f"{saved.workers} worker(s) saved it, {count} resume: {', '.join(left_out)} not "
                "restored; all else, progress too, is worker 0's"
            )
        if unknown:
            found.notes.append(f"not restored, nobody here has it: {', '.join(unknown)}")

    @staticmethod
    def _note(provider: StateProvider, state: State, found: _Found) -> None:
        if isinstance(provider, (Execution, ParamGroups)):
            found.notes += provider.differences(state)
        if isinstance(provider, Execution):
            found.training_threads = int(state.facts.get("training_threads") or 0)
        elif isinstance(provider, Progress):
            found.progress = state.facts["progress"]


def _at(progress: Any) -> str:
    """Where training stood, in a few words: "" where the script did not say."""
    return "" if progress is None else f", at {json_text('progress', progress)[:200]}"
