"""A checkpoint as the tables of a job, whatever the number of servers that saved it."""

from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from mpifleet.checkpoint import Checkpoint, SparseShape, open_checkpoint
from mpifleet.errors import CheckpointError
from mpifleet.log import get_logger
from mpifleet.partition import pieces, shard_range, shard_rows
from mpifleet.ps.agreement import check_together, newest_for_all, raise_first_failure
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

    def load(self, directory: Path, checked: bool) -> None:
        """Replace this job's tables by a checkpoint's, saved at any number of servers. Collective.

        checked: its digests were looked at already; else the servers do, each its share of the
        blocks.  At the number of servers that saved it each reads its own rows, else all of them.
        Raises CheckpointError on every server, before anything is changed where it does not fit.
        """
        with ExitStack() as stack:
            checkpoint, failure = None, ""
            path = newest_for_all(self._comm, directory)
            if not checked:
                self.check(path)
            try:
                checkpoint = stack.enter_context(open_checkpoint(path, checked=True))
                failure = self._misfit(checkpoint)
            except CheckpointError as error:
                failure = str(error)
            raise_first_failure(self._comm, failure)
            assert checkpoint is not None
            try:
                self._load_dense(checkpoint)
                for table, spec in enumerate(self._specs.sparse):
                    self._load_sparse(checkpoint, table, spec)
            except CheckpointError as error:
                failure = str(error)
            raise_first_failure(self._comm, failure)

    def _misfit(self, checkpoint: Checkpoint) -> str:
        """The first way in which the file does not fit these tables."""
        params = [p.name for spec in self._specs.dense for p in spec.params]
        for kind, ours, theirs in (
            ("parameter", params, list(checkpoint.dense_names)),
            ("table", [s.name for s in self._specs.sparse], list(checkpoint.sparse_names)),
        ):
            for name in [*ours, *theirs]:
                if name not in theirs or name not in ours:
                    where = "the model" if name not in ours else "the checkpoint"
                    return f"{kind} {name!r} is not in {where} ({checkpoint.path})"
        for spec in self._specs.dense:
            for param in spec.params:
                found = checkpoint.dense_shape(param.name)
                saved = (found.shape, np.dtype(found.dtype).name)
                wanted = (param.shape, spec.dtype)
                if saved != wanted:
                    return f"parameter {param.name!r} is {saved} in the file, {wanted} here"
        for table in self._specs.sparse:
            entry = checkpoint.sparse(table.name)
            there = (entry.num_rows, entry.dim, entry.dtype)
            here = (table.num_rows, table.dim, table.dtype)
            if there != here:
                return f"table {table.name!r} is {there} in the file, {here} here"
        return ""

    def _load_dense(self, checkpoint: Checkpoint) -> None:
        for table, spec in enumerate(self._specs.dense):
            self._shard.forget_dense(table)
            part, slots = self._shard.layout.dense[table], self._shard.dense_state[table]
            values = np.empty(part.stop - part.start, np.dtype(spec.dtype))
            for index, param in enumerate(spec.params):
                entry = checkpoint.dense(param.name)
                low, high = max(param.start, part.start), min(param.stop, part.stop)
                here = slice(low - part.start, max(low, high) - part.start)
                there = slice(low - param.start, max(low, high) - param.start)
                values[here] = entry.value.reshape(-1)[there]
                if self._same_rule(param.name, entry.attrs, spec.rule.name):
                    self._shard.dense_steps[table][index] = entry.step
                    _check_slots(checkpoint, param.name, entry.state, slots)
                    for slot, state in slots.items():
                        state.numpy()[here] = entry.state[slot].reshape(-1)[there]
            self._shard.set_dense(table, values)

    def _load_sparse(self, checkpoint: Checkpoint, table: int, spec: SparseSpec) -> None:
        saved = checkpoint.sparse(spec.name)
        slots = self._shard.sparse_state[table]
        with_state = self._same_rule(spec.name, saved.attrs, spec.rule.name)
        self._shard.forget_sparse(table)
        if with_state:
            self._shard.sparse_steps[table] = int(saved.attrs["step"])
        row_bytes = spec.dim * np.dtype(spec.dtype).itemsize * (1 + len(slots))
        if with_state:
            _check_slots(checkpoint, spec.name, saved.state_names, slots)
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

    def _same_rule(self, name: str, attrs: Mapping[str, Any], rule: str) -> bool:
        if attrs.get("rule") == rule:
            return True
        if self._server == 0 and "rule" in attrs:  # else imported, which was said then
            get_logger().warning(
                "%s was saved under rule %s and is used under %s: its optimizer state starts anew",
                name,
                attrs.get("rule"),
                rule,
            )
        return False


def _check_slots(
    checkpoint: Checkpoint, name: str, saved: Collection[str], wanted: Iterable[str]
) -> None:
    for slot in wanted:
        if slot not in saved:
            raise CheckpointError(f"state {slot!r} of {name!r} is not in {checkpoint.path}")
