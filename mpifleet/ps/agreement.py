"""Before anything is allocated: are all ranks about to run the same job, and does it fit?"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from mpifleet.checkpoint import check, is_checkable, newest, writing
from mpifleet.errors import CheckpointError, ConfigError
from mpifleet.mpi import bcast_json, gather_json
from mpifleet.roles import Roles

SHARED_MEMORY = "/dev/shm"


def compare(roles: Roles, facts: Mapping[str, str]) -> None:
    """Raise ConfigError on every rank, naming the first fact that differs. Collective.

    facts: text by what it is called; the same names in the same order are expected everywhere.
    """
    all_facts = gather_json(roles.world, dict(facts))
    for rank, theirs in enumerate(all_facts):
        ours = all_facts[0]
        for name in [*ours, *(name for name in theirs if name not in ours)]:
            left, right = ours.get(name, "absent"), theirs.get(name, "absent")
            if left != right:
                raise ConfigError(
                    f"ranks disagree on {name}: rank 0 ({roles.name_of(0)}) has {left}, "
                    f"rank {rank} ({roles.name_of(rank)}) has {right}"
                )


def check_shared_memory(roles: Roles, num_bytes: int, directory: str = SHARED_MEMORY) -> None:
    """Raise ConfigError on every rank when a node's windows do not fit. Collective.

    num_bytes: what this rank is about to allocate.
    """
    total = sum(gather_json(roles.node, num_bytes))
    free = _free_bytes(directory)
    short = total if free is not None and total > free else 0
    verdicts = gather_json(roles.world, (short, free))
    for rank, (needed, available) in enumerate(verdicts):
        if needed:
            raise ConfigError(
                f"the windows of the node of rank {rank} ({roles.name_of(rank)}) need "
                f"{needed:,} bytes of shared memory, {directory} has "
                f"{available:,} bytes free: use more nodes or servers, smaller tables, a "
                "smaller strategy.mailbox_mib, or a larger shared memory"
            )


def first_failure(comm: Any, failure: str) -> str:
    """The first rank's text that is not empty, on every rank. Collective.

    comm: None in a single process.
    """
    texts = [failure] if comm is None else gather_json(comm, failure)
    return next((text for text in texts if text), "")


def raise_first_failure(
    comm: Any, failure: str, meeting: AbstractContextManager[None] | None = None
) -> None:
    """Raise CheckpointError with the first rank's failure, if any, on every rank. Collective.

    comm: None in a single process.  meeting: entered while ranks wait for each other, left before
    the error is raised, so that they may meet again after it.
    """
    with meeting or nullcontext():
        failure = first_failure(comm, failure)
    if failure:
        raise CheckpointError(failure)


class Trouble:
    """What went wrong on this rank, or on any once they agreed, while all do one thing together.

    comm: None in a single process.  directory: named in the text of errors of the disk or HDF5.
    """

    def __init__(self, comm: Any, directory: Path, text: str = "") -> None:
        self._comm, self._directory = comm, directory
        self.text = text

    @contextmanager
    def noted(self) -> Iterator[None]:
        """What goes wrong inside ends it, and is noted where nothing went wrong before."""
        try:
            with writing(self._directory):
                yield
        except (CheckpointError, MemoryError) as error:
            self.text = self.text or str(error) or repr(error)

    def is_none(self) -> bool:
        """Whether all is well everywhere; else every rank notes the first trouble. Collective."""
        self.text = first_failure(self._comm, self.text)
        return not self.text


def newest_for_all(
    comm: Any, where: Path, meeting: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Path:
    """The newest checkpoint of a directory, or that file; the first rank says which. Collective.

    comm: None in a single process.  meeting: entered while ranks wait for each other.  Raises
    CheckpointError on every rank.
    """
    failure, path = "", where
    if comm is None or comm.rank == 0:
        try:
            path = newest(where)
        except CheckpointError as error:
            failure = str(error)
    if comm is not None:
        with meeting():
            failure, path = bcast_json(comm, (failure, str(path)))
    if failure:
        raise CheckpointError(failure)
    return Path(path)


def check_together(comm: Any, path: Path) -> None:
    """Check a checkpoint's digests, each rank its share of the blocks. Collective.

    Raises CheckpointError on every rank.
    """
    failure = ""
    try:
        if is_checkable(path):
            check(path, *((comm.rank, comm.size) if comm is not None else (0, 1)))
    except CheckpointError as error:
        failure = str(error)
    raise_first_failure(comm, failure)


def _free_bytes(directory: str) -> int | None:
    try:
        facts = os.statvfs(directory)
    except OSError:
        return None
    return facts.f_bavail * facts.f_frsize
