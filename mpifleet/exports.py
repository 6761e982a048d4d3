"""A running job's parameters and rows in other formats, out and in; called by `mpifleet.saves`.

Worker 0 pulls rows from the servers in pieces and writes them: no server takes part beyond that.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpifleet.checkpoint import Checkpoint, open_checkpoint
from mpifleet.errors import DataError, FleetError
from mpifleet.exchange import Exchange
from mpifleet.local_state import local_tensors
from mpifleet.log import get_logger
from mpifleet.model_names import names_of_model
from mpifleet.mpi import bcast_json
from mpifleet.partition import unique_keys
from mpifleet.persistables import Persistables
from mpifleet.portable.importing import Changes, write_changed
from mpifleet.portable.sources import FirstValues, ModelSource, TableSource
from mpifleet.portable.tensor_stream import TensorStream
from mpifleet.private_directory import private_directory
from mpifleet.ps.agreement import raise_first_failure
from mpifleet.ps.spec import SparseSpec
from mpifleet.session import Session

Told = Callable[[int], object]
Write = Callable[[ModelSource, Told], object]
"""Writes a model and tells the numbers of bytes as it goes."""
Change = Callable[[Checkpoint], tuple[Changes, Any]]
"""What to change in that checkpoint, and a JSON-able report."""
_SAY_EVERY_S = 10.0


def export(session: Session, target: Path, write: Write) -> None:
    """Have worker 0 write what the servers hold, all that was delivered by then included.

    Other workers return once their own pushes are applied. Says every ten seconds and
    at the end how much is written. Raises what `write` does, on worker 0.
    """
    session.flush()
    if not session.persistables().is_first:
        return
    session.connected().apply_delivered()
    source = job_source(session)
    progress = _Progress(target, source.num_bytes)
    write(source, progress.add)
    progress.end()


class _Progress:
    """Says in the log how much is written, now and then and at the end."""

    def __init__(self, target: Path, total: int) -> None:
        self._target, self._total, self._done = target, total, 0
        self._begin_s = self._said_s = time.monotonic()

    def add(self, num_bytes: int) -> None:
        """So many more are written."""
        self._done += num_bytes
        if time.monotonic() - self._said_s > _SAY_EVERY_S:
            self._said_s = time.monotonic()
            self._say(f" of at most {self._total / 2**20:,.1f}")

    def end(self) -> None:
        """All is written."""
        self._say("")

    def _say(self, of_total: str) -> None:
        mib, took_s = self._done / 2**20, time.monotonic() - self._begin_s
        rate = mib / max(took_s, 1e-9)
        get_logger().info(
            "%s: %s%s MiB written in %.1f s (%s MiB/s)",
            self._target,
            f"{mib:,.1f}",
            of_total,
            took_s,
            f"{rate:,.0f}",
        )


def job_source(session: Session) -> ModelSource:
    """Parameters as the servers have them now, tables as they will be pulled."""
    exchange, optimizer, model = session.connected(), session.optimizer, session.model
    assert optimizer is not None
    optimizer.refresh()
    tensors = {}
    for spec, flat in zip(optimizer.specs.dense, optimizer.values, strict=True):
        for param in spec.params:
            values = torch.from_numpy(flat[param.start : param.stop])
            tensors[param.name] = values.reshape(param.shape)
    if model is not None:
        tensors |= local_tensors(model, optimizer)
    names = names_of_model(model)
    tables = tuple(
        _table(exchange, table, spec, names.get("tables", {}).get(spec.name, {}))
        for table, spec in enumerate(optimizer.specs.sparse)
    )
    dense = tuple(TensorStream.of(name, tensor) for name, tensor in tensors.items())
    return ModelSource(dense, tables, names.get("aliases", {}))


def _table(
    exchange: Exchange, table: int, spec: SparseSpec, names: dict[str, list[str]]
) -> TableSource:
    def rows(keys: np.ndarray) -> np.ndarray:
        unique = unique_keys(keys, spec.num_rows, exchange.num_servers, spec.name)
        return exchange.pull_rows(table, unique)[unique.inverse]

    return TableSource(
        spec.name,
        spec.num_rows,
        spec.dim,
        spec.dtype,
        rows,
        tuple(names.get("modules", ())),
        tuple(map(int, names.get("padding", ()))),
        FirstValues(spec.initializer, spec.scale, spec.seed),
    )


def bring_in(session: Session, file: Path, change: Change) -> Any:
    """Replace part of what the job holds; returns change's report. Collective over workers.

    file: where `change` finds it.  The way there is a private checkpoint in its directory, which
    all ranks see: the job as it is, then the same with the changes, which all servers load.  Disk:
    twice the job's state, for a while.  Raises CheckpointError on every worker.
    """
    persistables = session.persistables()
    session.flush()
    session.util.barrier()  # every worker's pushes are applied before worker 0 saves
    with ExitStack() as stack:
        private, report, failure = "", None, ""
        if persistables.is_first:
            try:
                if not file.is_file():  # said before the whole job's state is written
                    raise DataError(f"{file} cannot be read: there is no such file")
                where = stack.enter_context(private_directory(file.parent, ".import-"))
                private, report = str(where), _change(persistables, where, change)
            except FleetError as error:
                failure = str(error)
            except OSError as error:
                failure = f"cannot write a private checkpoint into {file.parent}: {error}"
        raise_first_failure(persistables.comm, failure, session.meet("worker"))
        if persistables.comm is not None:
            with session.meet("worker"):
                private, report = bcast_json(persistables.comm, (private, report))
        persistables.load(Path(private))
    return report


def _change(persistables: Persistables, private: Path, change: Change) -> Any:
    persistables.save(private)
    with open_checkpoint(private) as base:
        changes, report = change(base)
        write_changed(base, private, changes)
    get_logger().info(
        "%d parameters and buffers and %d tables replaced: their optimizer state starts anew",
        len(changes.dense) + len(changes.buffers),
        len(changes.tables),
    )
    return report
