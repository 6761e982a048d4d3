"""Fleet's public calls that save and load; `mpifleet.fleet` has them all."""

import os
from pathlib import Path

from mpifleet.checkpoint import Keep
from mpifleet.current import current
from mpifleet.embedding import SparseEmbedding
from mpifleet.errors import ConfigError
from mpifleet.ps.load_report import LoadOptions, LoadReport
from mpifleet.ps.saving import SaveOptions

MODES = ("full", "base", "delta")


def save_persistables(
    dirname: str | os.PathLike[str],
    *,
    mode: str | int = "full",
    wait: bool = True,
    refuse_busy: bool = False,
    keep_last: int = 1,
    keep_every: int = 0,
) -> None:
    """Write all parameters, tables and optimizer state as one new HDF5 file into `dirname`.

    Worker 0 alone may call it, or all workers: worker 0's call writes, what the servers have
    received by then included; the others return once their own pushes are applied (barrier_worker()
    afterwards tells them that the file is there).  wait=False: return once the tables are copied;
    what fails later is raised by the next save or stop_worker().  refuse_busy: raise while an
    earlier one is being written.  The keep_last newest stay, and those whose number keep_every
    divides.  mode="base": a full one that deltas can follow; mode="delta": dense parameters, and of
    the tables only the rows that changed since the last base or delta, which it needs to be loaded
    (docs/checkpoints.md).  Raises CheckpointError; the earlier files then stay.
    """
    keep = Keep(keep_last, keep_every)
    options = SaveOptions(wait, refuse_busy, keep, mode=_mode(mode))
    current().persistables().save(Path(dirname), options)


def _mode(mode: str | int) -> str:
    """Fleet's number 0 is "full". Raises ConfigError for what is none."""
    if mode in MODES:
        return str(mode)
    if mode == 0 and not isinstance(mode, bool):
        return "full"
    more = ""
    if mode in (1, 2):
        more = "; Fleet's tables do not agree on which of 1 and 2 is the base"
    raise ConfigError(f"mode={mode!r}; use {', '.join(map(repr, MODES))}{more}")


def load_persistables(dirname: str | os.PathLike[str], *, strict: bool = True) -> LoadReport:
    """Replace parameters, tables and optimizer state by those of a checkpoint.

    Collective over workers. The number of servers may differ from the saving job's.  Returns what
    was taken and what was not and why, the same on every worker; strict=False also logs it.
    Raises CheckpointError, before anything is changed, when the file does not fit the model;
    strict=False takes what fits: the rest of the model stays as it is.
    """
    return current().persistables().load(Path(dirname), LoadOptions(strict))


def save_one_table(
    table: str | SparseEmbedding,
    dirname: str | os.PathLike[str],
    *,
    wait: bool = True,
    refuse_busy: bool = False,
    keep_last: int = 1,
    keep_every: int = 0,
) -> None:
    """Write one sparse table with its optimizer state as a checkpoint that holds nothing else.

    table: the embedding, or the name it was made with.  dirname: a directory for checkpoints of
    this table alone.  Who calls, the options and what is raised are as with save_persistables;
    ConfigError where the model has no such table.
    """
    keep = Keep(keep_last, keep_every)
    options = SaveOptions(wait, refuse_busy, keep, table=_table_name(table))
    current().persistables().save(Path(dirname), options)


def load_one_table(table: str | SparseEmbedding, dirname: str | os.PathLike[str]) -> LoadReport:
    """Replace one sparse table and its optimizer state by a checkpoint's; the rest stays.

    dirname: where save_one_table or save_persistables wrote.  Collective over workers.  Returns
    what load_persistables returns, of this table.  Raises CheckpointError where the file does not
    have the table or has it with another shape or dtype, ConfigError where the model has not.
    """
    options = LoadOptions(table=_table_name(table))
    return current().persistables().load(Path(dirname), options)


def _table_name(table: str | SparseEmbedding) -> str:
    """Raises ConfigError for what is neither."""
    if isinstance(table, SparseEmbedding):
        return table.name
    if not isinstance(table, str):
        raise ConfigError(
            f"table={table!r:.100}; use a SparseEmbedding or the name it was made with"
        )
    return table
