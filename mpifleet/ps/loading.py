"""A checkpoint as the tables of a job, whatever the number of servers that saved it."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from mpifleet.checkpoint import Checkpoint, SparseShape, open_checkpoint
from mpifleet.errors import CheckpointError
from mpifleet.log import get_logger
from mpifleet.partition import pieces, shard_range, shard_rows
from mpifleet.ps.agreement import check_together, newest_for_all, raise_first_failure
from mpifleet.ps.chain_check import check_chain
from mpifleet.ps.fit import fit
from mpifleet.ps.load_report import LoadOptions, LoadReport
from mpifleet.ps.saved_parts import ROWS
from mpifleet.ps.shard import Shard
from mpifleet.ps.spec import SparseSpec

LOAD_BLOCK_BYTES = 32 << 20


class Loader:
    """Reads this server's part of a checkpoint. `load` is collective over `comm`.

    comm: None in a single process; shard: this server's.
    """

    def __init__(self, comm: Any, shard: Shard) -> None:
        self._comm = comm
        self._shard = shard
        self._specs = shard.layout.specs
        self._server = shard.layout.server

    def check(self, path: Path) -> None:
        """Check the digests of a checkpoint. Collective. Raises CheckpointError on every server."""
        check_together(self._comm, path)

    def load(self, directory: Path, checked: bool, options: LoadOptions) -> LoadReport:
        """Replace this job's tables by a checkpoint's, saved at any number of servers. Collective.

        checked: its digests were looked at already; else the servers do, each its share of the
        blocks.  At the number of servers that saved it each reads its own rows, else all of them.
        Returns the same report on every server.  Raises CheckpointError on every server, before
        anything is changed where it does not fit and options.strict asks that it does.
        """
        with ExitStack() as stack:
            checkpoint, report, failure = None, None, ""
            path = newest_for_all(self._comm, directory)
            if not checked:
                path = check_chain(self._comm, directory, path, self.check)
            try:
                checkpoint = stack.enter_context(open_checkpoint(path, checked=True))
                report = fit(self._specs, checkpoint, options.strict, options.table)
                # One table is asked for by its name: nothing of it may be left out.
                strict = options.strict or options.table is not None
                failure = report.failure() if strict else ""
            except CheckpointError as error:
                failure = str(error)
            raise_first_failure(self._comm, failure)
            assert checkpoint is not None
            assert report is not None
            try:
                self._take(checkpoint, report)
            except CheckpointError as error:
                failure = str(error)
            raise_first_failure(self._comm, failure)
        if options.strict and self._server == 0:
            _warn_of_state(report)
        return report

    def _take(self, checkpoint: Checkpoint, report: LoadReport) -> None:
        taken = {(e.kind, e.name): e.outcome == "taken" for e in report.entries if e.is_taken}
        with_state = {name: s for (kind, name), s in taken.items() if kind == "parameter"}
        for table in range(len(self._specs.dense) if with_state else 0):
            self._load_dense(checkpoint, table, with_state)
        for table, spec in enumerate(self._specs.sparse):
            if ("table", spec.name) in taken:
                self._load_sparse(checkpoint, table, spec, taken["table", spec.name])

    def _load_dense(
        self, checkpoint: Checkpoint, table: int, with_state: Mapping[str, bool]
    ) -> None:
        """with_state: of the parameters to take, by name; the others stay as they are."""
        part, slots = self._shard.layout.dense[table], self._shard.dense_state[table]
        values = self._shard.dense(table).copy()
        for index, param in enumerate(self._specs.dense[table].params):
            if param.name not in with_state:
                continue
            self._shard.forget_dense(table, index)
            entry = checkpoint.dense(param.name)
            here, there = part.share_of(param)
            values[here] = entry.value.reshape(-1)[there]
            if with_state[param.name]:
                self._shard.dense_steps[table][index] = entry.step
                for slot, state in slots.items():
                    state.numpy()[here] = entry.state[slot].reshape(-1)[there]
        self._shard.set_dense(table, values)

    def _load_sparse(
        self, checkpoint: Checkpoint, table: int, spec: SparseSpec, with_state: bool
    ) -> None:
        saved = checkpoint.sparse(spec.name)
        slots = self._shard.sparse_state[table]
        if with_state:
            self._shard.sparse_steps[table] = int(saved.attrs["step"])
        else:
            self._shard.forget_sparse(table)
        row_bytes = spec.dim * np.dtype(spec.dtype).itemsize * (1 + len(slots))
        state = {s: values.numpy() for s, values in slots.items()} if with_state else {}
        per_block = max(1, LOAD_BLOCK_BYTES // row_bytes)
        if saved.num_shards == self._shard.layout.num_servers:
            self._read_own(checkpoint, table, saved, state, per_block)
        else:
            self._pick_own(checkpoint, table, saved, state, per_block)

    def _read_own(
        self,
        checkpoint: Checkpoint,
        table: int,
        saved: SparseShape,
        state: Mapping[str, np.ndarray],
        per_block: int,
    ) -> None:
        """This server's rows lie in one piece: the state is read into its place."""
        mine = shard_rows(saved.num_rows, saved.num_shards, self._server)
        buffer = np.empty((min(per_block, mine), saved.dim), saved.dtype)
        for first, last in pieces(mine, per_block):
            self._shard.breathe()
            out = {slot: values[first:last] for slot, values in state.items()}
            out[ROWS] = buffer[: last - first]
            checkpoint.read_rows(saved, self._server, first, out)
            self._shard.set_rows(table, first, out[ROWS])

    def _pick_own(
        self,
        checkpoint: Checkpoint,
        table: int,
        saved: SparseShape,
        state: Mapping[str, np.ndarray],
        per_block: int,
    ) -> None:
        """This server's rows lie among others' in every block."""
        num_servers, server = self._shard.layout.num_servers, self._server
        for first, last in pieces(saved.num_rows, per_block):
            self._shard.breathe()
            block = checkpoint.sparse_block(saved.name, first, last)
            own = slice((server - first) % num_servers, None, num_servers)
            rows = shard_range(first, last, num_servers, server)
            self._shard.set_rows(table, rows.start, np.ascontiguousarray(block[ROWS][own]))
            for slot, values in state.items():
                values[rows] = block[slot][own]


def _warn_of_state(report: LoadReport) -> None:
    for entry in report.entries:
        if entry.outcome == "state anew" and not entry.was_told:
            get_logger().warning("%s", entry.reason)
