"""Fleet's public calls that save and load; `mpifleet.fleet` has them all."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from mpifleet import inference
from mpifleet.checkpoint import Checkpoint, Keep, gzip_level
from mpifleet.current import current
from mpifleet.embedding import SparseEmbedding
from mpifleet.errors import ConfigError
from mpifleet.exports import bring_in, export
from mpifleet.paths import Named, path_of
from mpifleet.portable.importing import (
    Changes,
    Unmatched,
    check_matched,
    state_changes,
    vector_changes,
)
from mpifleet.portable.inference_writing import write_inference
from mpifleet.portable.state_dict import check_suffix, read_state, state_streams, write_state
from mpifleet.portable.vectors import VectorsReport, export_vectors, read_vectors
from mpifleet.ps.load_report import LoadOptions, LoadReport
from mpifleet.ps.saving import SaveOptions

MODES = ("full", "base", "delta")


def save_persistables(
    dirname: Named,
    *,
    mode: str | int = "full",
    wait: bool = True,
    refuse_busy: bool = False,
    keep_last: int = 1,
    keep_every: int = 0,
    compression: str | None = None,
    driver: str | None = None,
) -> None:
    """Write all parameters, tables and optimizer state as one new HDF5 file into `dirname`.

    Worker 0 alone may call it, or all workers: worker 0's call writes, what the servers have
    received by then included; the others return once their own pushes are applied (barrier_worker()
    afterwards tells them that the file is there).  wait=False: return once the tables are copied;
    what fails later is raised by the next save or stop_worker().  refuse_busy: raise while an
    earlier one is being written.  The keep_last newest stay, and those whose number keep_every
    divides.  mode="base": a full one that deltas can follow; mode="delta": dense parameters, and of
    the tables only the rows that changed since the last base or delta, which it needs to be loaded
    (docs/checkpoints.md).  compression: None, "gzip" or "gzip-1" to "gzip-9": a smaller file,
    written many times as slowly, always before this returns.  driver: "mpio" to write what is
    compressed through HDF5's MPI driver, which needs an h5py with MPI.  Raises CheckpointError; the
    earlier files then stay.
    """
    keep, level = Keep(keep_last, keep_every), gzip_level(compression)
    options = SaveOptions(wait, refuse_busy, keep, None, _mode(mode), level, driver)
    current().persistables().save(path_of("dirname", dirname), options)


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


def load_persistables(dirname: Named, *, strict: bool = True) -> LoadReport:
    """Replace parameters, tables and optimizer state by those of a checkpoint.

    Collective over workers. The number of servers may differ from the saving job's.  Returns what
    was taken and what was not and why, the same on every worker; strict=False also logs it.
    Raises CheckpointError, before anything is changed, when the file does not fit the model;
    strict=False takes what fits: the rest of the model stays as it is.
    """
    return current().persistables().load(path_of("dirname", dirname), LoadOptions(strict))


def save_one_table(
    table: str | SparseEmbedding,
    dirname: Named,
    *,
    wait: bool = True,
    refuse_busy: bool = False,
    keep_last: int = 1,
    keep_every: int = 0,
    compression: str | None = None,
    driver: str | None = None,
) -> None:
    """Write one sparse table with its optimizer state as a checkpoint that holds nothing else.

    table: the embedding, or the name it was made with.  dirname: a directory for checkpoints of
    this table alone.  Who calls, the options and what is raised are as with save_persistables;
    ConfigError where the model has no such table.
    """
    keep, level = Keep(keep_last, keep_every), gzip_level(compression)
    table = _table_name(table)
    options = SaveOptions(wait, refuse_busy, keep, table, level=level, driver=driver)
    current().persistables().save(path_of("dirname", dirname), options)


def load_one_table(table: str | SparseEmbedding, dirname: Named) -> LoadReport:
    """Replace one sparse table and its optimizer state by a checkpoint's; the rest stays.

    dirname: where save_one_table or save_persistables wrote.  Collective over workers.  Returns
    what load_persistables returns, of this table.  Raises CheckpointError where the file does not
    have the table or has it with another shape or dtype, ConfigError where the model has not.
    """
    options = LoadOptions(table=_table_name(table))
    return current().persistables().load(path_of("dirname", dirname), options)


def _table_name(table: str | SparseEmbedding) -> str:
    """Raises ConfigError for what is neither."""
    if isinstance(table, SparseEmbedding):
        return table.name
    if not isinstance(table, str):
        raise ConfigError(
            f"table={table!r:.100}; use a SparseEmbedding or the name it was made with"
        )
    return table


def save_inference_model(dirname: Named, *, keys: str | Mapping[str, Any] = "all") -> None:
    """Write parameters, buffers and rows, without optimizer state, for `mpifleet.inference.load`.

    Who may call, and what the others do, is as for save_persistables; where other workers train on
    meanwhile in async mode, rows are of several moments.  keys: "all" rows; "trained", only those
    that differ from their first values, which loses nothing; or {table name: keys}, with all rows
    of tables that are not named.  Memory on worker 0: 16 MiB and the keys.
    Raises ConfigError for keys that cannot be, CheckpointError; the earlier model then stays.
    """
    where = path_of("dirname", dirname)
    export(current(), where, lambda source, told: write_inference(where, source, keys, told))


def save_dense_params(path: Named) -> None:
    """Write parameters and buffers, but no table, as one .safetensors (or .pt, .pth) file.

    Called as save_persistables is. Raises ConfigError for another suffix, CheckpointError.
    """
    where = path_of("path", path)
    check_suffix(where)
    export(current(), where, lambda source, told: write_state(where, list(source.dense), told))


def save_state_dict(path: Named) -> None:
    """Write all parameters, buffers and rows as a plain model's state_dict.

    Rows are the weight [num_rows, dim] of the module that looks them up, as nn.Embedding has it.
    .safetensors is written in pieces of 16 MiB; .pt and .pth need all of it in worker 0's memory.
    Called as save_persistables is. Raises ConfigError for another suffix, CheckpointError.
    """
    where = path_of("path", path)
    check_suffix(where)
    export(current(), where, lambda source, told: write_state(where, state_streams(source), told))


def load_dense_params(path: Named) -> None:
    """Fill the model's parameters and buffers from a .safetensors file, before init_worker().

    On every rank, or on worker 0 alone, whose values all take over. Raises CheckpointError naming
    what is missing, superfluous, or of another shape or dtype; ConfigError once the job has begun.
    """
    session = current()
    session.check_not_started("load_dense_params(...)")
    if session.model is None:
        raise ConfigError("name the model first: fleet.distributed_optimizer(..., model=model)")
    inference.load_dense_params(path, session.model)


def load_state_dict(path: Named, *, strict: bool = True) -> Unmatched:
    """Replace parameters, buffers and rows by those of a .safetensors, .pt or .pth file.

    Collective over workers, after init_worker(). What is replaced starts without optimizer state.
    strict=False: names that only one side has are left out and returned, as torch does. The file's
    directory must be seen, and writable, by all ranks: a private checkpoint is written beside it
    for a while, of twice the job's state.
    Raises CheckpointError, naming what does not fit or is damaged, on every worker.
    """
    where = path_of("path", path).absolute()
    check_suffix(where)

    def change(base: Checkpoint) -> tuple[Changes, Unmatched]:
        changes, unmatched = state_changes(base, read_state(where))
        if strict:
            check_matched(unmatched, where, "strict=False")
        return changes, unmatched

    return Unmatched(*bring_in(current(), where, change))


def load_word2vec(
    path: Named,
    table: str,
    *,
    vocab: Named | None = None,
    binary: bool = False,
) -> VectorsReport:
    """Replace rows of a table by vectors in word2vec's text or binary format.

    vocab: a file whose line k, from 0, begins with the word of key k; without it words are keys in
    decimal. Rows whose word the file lacks stay; the table starts without optimizer state. Returns
    what was found, the same on every worker. Collective, and else as load_state_dict.
    """
    where, words = (
        path_of("path", path).absolute(),
        None if vocab is None else path_of("vocab", vocab),
    )

    current().persistables().check_table(table)

    def change(base: Checkpoint) -> tuple[Changes, dict[str, Any]]:
        shape = base.sparse(table)
        facts = (shape.num_rows, shape.dim, np.dtype(shape.dtype).name)
        found = read_vectors(where, binary, *facts, words)
        return vector_changes(table, found), asdict(found.report)

    report = bring_in(current(), where, change)
    return VectorsReport(**{**report, "first_missing": tuple(report["first_missing"])})


def save_word2vec(
    path: Named,
    table: str,
    *,
    vocab: Named | None = None,
    binary: bool = False,
) -> None:
    """Write a table's rows in word2vec's text or binary format, in pieces of 16 MiB.

    vocab: as for load_word2vec; only keys with a word are written. Called as save_persistables is.
    Raises ConfigError for rows of float64 in binary, DataError for the vocabulary, CheckpointError.
    """
    where, words = path_of("path", path), None if vocab is None else path_of("vocab", vocab)
    export(
        current(),
        where,
        lambda source, told: export_vectors(where, source.table(table), binary, words, told),
    )
