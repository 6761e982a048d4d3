"""Fleet's public calls that save and load; `mpifleet.fleet` has them all."""

import os
from pathlib import Path

from mpifleet.checkpoint import Keep, gzip_level
from mpifleet.current import current
from mpifleet.ps.saving import SaveOptions


def save_persistables(
    dirname: str | os.PathLike[str],
    *,
    wait: bool = True,
    refuse_busy: bool = False,
    keep_last: int = 1,
    keep_every: int = 0,
    compression: str | None = None,
) -> None:
    """Write all parameters, tables and optimizer state as one new HDF5 file into `dirname`.

    Worker 0 alone may call it, or all workers: worker 0's call writes, what the servers have
    received by then included; the others return once their own pushes are applied (barrier_worker()
    afterwards tells them that the file is there).  wait=False: return once the tables are copied;
    what fails later is raised by the next save or stop_worker().  refuse_busy: raise while an
    earlier one is being written.  The keep_last newest stay, and those whose number keep_every
    divides.  compression: None, "gzip" or "gzip-1" to "gzip-9": the file is smaller and written
    many times as slowly, always before this returns.  Raises CheckpointError; the earlier files
    then stay.
    """
    keep = Keep(keep_last, keep_every)
    options = SaveOptions(wait, refuse_busy, keep, gzip_level(compression))
    current().persistables().save(Path(dirname), options)


def load_persistables(dirname: str | os.PathLike[str]) -> None:
    """Replace parameters, tables and optimizer state by those of a checkpoint.

    Collective over workers. The number of servers may differ from the saving job's.
    Raises CheckpointError when the file does not fit the model.
    """
    current().persistables().load(Path(dirname))
