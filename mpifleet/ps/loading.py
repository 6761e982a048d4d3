"""A checkpoint as the tables of a job, whatever the number of servers that saved it."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from mpifleet.checkpoint import Checkpoint, SparseShape, open_checkpoint
from mpifleet.errors import CheckpointError
from mpifleet.log import get_logger
from mpifleet.partition import pieces, shard_range, shard_rows
from mpifleet.ps.agreement import checked_by_all, raise_first_failure
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

    def load(self, directory: Path) -> None:
        """Replace this job's tables by a checkpoint's, saved at any number of servers. Collective.

        The servers check the file's digests together, each its share of the blocks.  At the number
        of servers that saved it each reads its own rows, else all of them.  Raises CheckpointError
        on every server, before anything is changed where the file does not fit.
        """
        with ExitStack() as stack:
            checkpoint, failure = None, ""
            path = checked_by_all(self._comm, directory)
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
                value = checkpoint.dense(param.name).value
                saved, wanted = (value.shape, value.dtype.name), (param.shape, spec.dtype)
                if saved != wanted:
                    return f"parameter {param.name!r} is {saved} in the file, {wanted} here"
        for table in self._specs.sparse:
            entry = checkpoint.sparse(table.name)
            found = (entry.num_rows, entry.dim, entry.dtype)
            needed = (table.num_rows, table.dim, table.dtype)
            if found != needed:
                return f"table {table.name!r} is {found} in the file, {needed} here"
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
                    for slot, state in slots.items():
                        saved = self._slot(checkpoint, param.name, entry.state, slot)
                        state.numpy()[here] = saved.reshape(-1)[there]
            self._shard.set_dense(table, values)

    def _load_sparse(self, checkpoint: Checkpoint, table: int, spec: SparseSpec) -> None:
        saved = checkpoint.sparse(spec.name)
        slots = self._shard.sparse_state[table]
        with_state = self._same_rule(spec.name, saved.attrs, spec.rule.name)
        self._shard.forget_sparse(table)
        if with_state:
            self._shard.sparse_steps[table] = int(saved.attrs["step"])
        row_bytes = spec.dim * np.dtype(spec.dtype).itemsize * (1 + len(slots))
        for first, block in self._own_rows(checkpoint, saved, row_bytes):
            self._shard.breathe()
            rows = slice(first, first + len(block[ROWS]))
            self._shard.set_rows(table, first, block[ROWS])
            for slot, values in slots.items() if with_state else ():
                values.numpy()[rows] = self._slot(checkpoint, spec.name, block, slot)

    def _own_rows(
        self, checkpoint: Checkpoint, saved: SparseShape, row_bytes: int
    ) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        """This server's rows block by block: where each begins, rows and state by name."""
        num_servers, server = self._shard.layout.num_servers, self._server
        per_block = max(1, LOAD_BLOCK_BYTES // row_bytes)
        if saved.num_shards == num_servers:
            mine = shard_rows(saved.num_rows, num_servers, server)
            for first, last in pieces(mine, per_block):
                yield first, checkpoint.shard_block(saved.name, server, first, last)
            return
        for first, last in pieces(saved.num_rows, per_block):
            block = checkpoint.sparse_block(saved.name, first, last)
            own = slice((server - first) % num_servers, None, num_servers)
            start = shard_range(first, last, num_servers, server).start
            yield start, {n: np.ascontiguousarray(values[own]) for n, values in block.items()}

    @staticmethod
    def _slot(
        checkpoint: Checkpoint, name: str, arrays: dict[str, np.ndarray], slot: str
    ) -> np.ndarray:
        if slot not in arrays:
            raise CheckpointError(f"state {slot!r} of {name!r} is not in {checkpoint.path}")
        return arrays[slot]

    def _same_rule(self, name: str, attrs: Mapping[str, Any], rule: str) -> bool:
        if attrs.get("rule") == rule:
            return True
        if self._server == 0:
            get_logger().warning(
                "%s was saved under rule %s and is used under %s: its optimizer state starts anew",
                name,
                attrs.get("rule"),
                rule,
            )
        return False
