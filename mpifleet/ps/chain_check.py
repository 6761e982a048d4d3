"""Digests of a checkpoint and of all that it follows, checked before a job loads it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from mpifleet.checkpoint import members
from mpifleet.errors import CheckpointError
from mpifleet.log import get_logger
from mpifleet.mpi import bcast_json
from mpifleet.ps.agreement import raise_first_failure


def check_chain(
    comm: Any,
    asked: Path,
    found: Path,
    check: Callable[[Path], None],
    meeting: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Path:
    """The checkpoint to load: the one found, or of a directory the newest intact one before it.

    Collective over `comm`, None in a single process.  asked: a directory, whose newest was found,
    or that file.  check: checks one file, collective too, and fails on all ranks alike.  meeting:
    entered while ranks wait for each other.  A file that was asked for by name is refused where it
    or one that it follows is damaged; so is a base.  Raises CheckpointError on every rank.
    """
    paths, failure = [found], ""
    if comm is None or comm.rank == 0:
        try:
            paths = members(found)
        except CheckpointError as error:
            failure = str(error)
    raise_first_failure(comm, failure, meeting())
    if comm is not None:
        with meeting():
            paths = [Path(path) for path in bcast_json(comm, [str(path) for path in paths])]
    intact: Path | None = None
    for path in paths:
        try:
            check(path)
        except CheckpointError as error:
            if intact is None or asked == found:
                raise
            if comm is None or comm.rank == 0:
                get_logger().warning(
                    "%s; what was saved from there on is lost: loading %s", error, intact
                )
            return intact
        intact = path
    return found
