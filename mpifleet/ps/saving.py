"""All servers' tables as one checkpoint, and back at any number of servers.

The first server writes; the others send it what it asks for, block by block, so its memory grows by
one block and one dense table, and the directory need only be shared for loading. The file is the
same whatever the number of servers: rows are in order of their keys.
"""

import os
import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from mpifleet.checkpoint import (
    Checkpoint,
    DenseEntry,
    SparseEntry,
    open_checkpoint,
    write_checkpoint,
)
from mpifleet.errors import CheckpointError
from mpifleet.log import get_logger
from mpifleet.mpi import bcast_json, gather_json
from mpifleet.partition import pieces
from mpifleet.ps.client import unpack_buffers
from mpifleet.ps.shard import Shard
from mpifleet.ps.spec import ShardLayout, SparseSpec
from mpifleet.window import MAX_COUNT

VALUE = "rows"
LOAD_BLOCK_BYTES = 32 << 20
_DENSE, _SPARSE, _END = 0, 1, 2
_TOKEN_PATIENCE_S = 10.0


class Storage:
    """Saves and loads the shards of all servers. `save` and `load` are collective over `comm`.

    mpi, comm: None in a single process; layouts: of all servers; shard: this server's.
    """

    def __init__(
        self, mpi: ModuleType | None, comm: Any, layouts: Sequence[ShardLayout], shard: Shard
    ) -> None:
        self._mpi = mpi
        self._comm = comm
        self._layouts = layouts
        self._shard = shard
        self._specs = layouts[0].specs
        self._server = shard.layout.server

    # -- requests ---------------------------------------------------------------------------------

    def answer_save(self, request: dict[str, Any], payload: bytes) -> bytes:
        """Serve a SAVE request: empty when done, else what went wrong."""
        buffers = unpack_buffers(request["buffers"], payload)
        try:
            self.save(Path(request["directory"]), request["meta"], buffers)
        except CheckpointError as error:
            return str(error).encode()
        return b""

    def answer_load(self, request: dict[str, Any], _: bytes) -> bytes:
        """Serve a LOAD request: empty when done, else what went wrong."""
        try:
            self.load(Path(request["directory"]))
        except CheckpointError as error:
            return str(error).encode()
        return b""

    # -- save -------------------------------------------------------------------------------------

    def save(self, directory: Path, meta: dict[str, Any], buffers: dict[str, np.ndarray]) -> None:
        """Write one file. Collective. Raises CheckpointError on every server."""
        failure = self._check_same_directory(directory)
        if not failure:
            if self._server == 0:
                failure = self._write(directory, meta, buffers)
            else:
                self._send_blocks()
        self._agree(failure)

    def _write(self, directory: Path, meta: dict[str, Any], buffers: dict[str, np.ndarray]) -> str:
        try:
            dense = [entry for t in range(len(self._specs.dense)) for entry in self._dense_entries(t)]
            sparse = [self._sparse_entry(t) for t in range(len(self._specs.sparse))]
            write_checkpoint(directory, dense=dense, sparse=sparse, buffers=buffers, meta=meta)
        except CheckpointError as error:
            return str(error)
        finally:
            self._ask(_END, 0, 0, 0)
        return ""

    def _dense_entries(self, table: int) -> list[DenseEntry]:
        spec = self._specs.dense[table]
        flat = np.empty(spec.size, np.dtype(spec.dtype))
        state = {slot: np.empty_like(flat) for slot in self._shard.dense_state[table]}
        self._ask(_DENSE, table, 0, 0)
        for server, layout in enumerate(self._layouts):
            part = layout.dense[table]
            own = self._dense_arrays(table)
            for target, source in zip((flat, *state.values()), own, strict=True):
                self._fetch(server, source, target[part.start : part.stop])
        steps = self._shard.dense_steps[table].tolist()
        return [
            DenseEntry(
                name=param.name,
                value=flat[param.start : param.stop].reshape(param.shape),
                state={
                    slot: values[param.start : param.stop].reshape(param.shape)
                    for slot, values in state.items()
                },
                step=step,
                attrs={"rule": spec.rule.name},
            )
            for param, step in zip(spec.params, steps, strict=True)
        ]

    def _sparse_entry(self, table: int) -> SparseEntry:
        spec = self._specs.sparse[table]
        return SparseEntry(
            name=spec.name,
            num_rows=spec.num_rows,
            dim=spec.dim,
            dtype=spec.dtype,
            state_names=list(self._shard.sparse_state[table]),
            attrs={
                "rule": spec.rule.name,
                "initializer": spec.initializer,
                "scale": spec.scale,
                "seed": spec.seed,
                "step": int(self._shard.sparse_steps[table]),
            },
            block=lambda first, last: self._gather_block(table, first, last),
        )

    def _gather_block(self, table: int, first: int, last: int) -> dict[str, np.ndarray]:
        """Values and state of the keys [first, last), in order. Called on the first server."""
        spec, num_servers = self._specs.sparse[table], len(self._layouts)
        self._ask(_SPARSE, table, first, last)
        names = [VALUE, *self._shard.sparse_state[table]]
        block = {n: np.empty((last - first, spec.dim), np.dtype(spec.dtype)) for n in names}
        for server in range(num_servers):
            rows = _rows_of(first, last, server, num_servers)
            where = slice((server - first) % num_servers, None, num_servers)
            sources = self._sparse_arrays(table, rows) if server == 0 else [None] * len(names)
            for name, source in zip(names, sources, strict=True):
                part = np.empty((rows.stop - rows.start, spec.dim), np.dtype(spec.dtype))
                self._fetch(server, source, part)
                block[name][where] = part
        return block

    def _dense_arrays(self, table: int) -> list[np.ndarray]:
        state = self._shard.dense_state[table].values()
        return [self._shard.dense(table), *(values.numpy() for values in state)]

    def _sparse_arrays(self, table: int, rows: slice) -> list[np.ndarray]:
        state = self._shard.sparse_state[table].values()
        return [self._shard.rows(table)[rows], *(values.numpy()[rows] for values in state)]

    def _ask(self, what: int, table: int, first: int, last: int) -> None:
        if self._comm is not None:
            bcast_json(self._comm, (what, table, first, last))

    def _send_blocks(self) -> None:
        """Answer the first server's questions until it has no more."""
        while True:
            what, table, first, last = bcast_json(self._comm, None)
            if what == _END:
                return
            if what == _DENSE:
                arrays = self._dense_arrays(table)
            else:
                rows = _rows_of(first, last, self._server, len(self._layouts))
                arrays = self._sparse_arrays(table, rows)
            for array in arrays:
                self._transfer(self._comm.Send, array, 0)

    def _fetch(self, server: int, own: np.ndarray | None, target: np.ndarray) -> None:
        if server == 0:
            assert own is not None
            target[:] = own
        else:
            self._transfer(self._comm.Recv, target, server)

    def _transfer(self, call: Any, array: np.ndarray, rank: int) -> None:
        assert self._mpi is not None
        flat = array.reshape(-1).view(np.uint8)
        for start, stop in pieces(flat.size, MAX_COUNT):
            call([flat[start:stop], self._mpi.BYTE], rank)

    def _check_same_directory(self, directory: Path) -> str:
        """What is wrong with the directory, "" when all servers see the same one. Collective."""
        failure, token = "", f".same-{secrets.token_hex(8)}"
        if self._server == 0:
            try:
                directory.mkdir(parents=True, exist_ok=True)
                (directory / token).touch(mode=0o600)
            except OSError as error:
                failure, token = f"cannot write to {directory}: {error}", ""
        if self._comm is not None:
            token = bcast_json(self._comm, token)
        if token and not _appears(directory / token):
            failure = f"{directory} is not the same directory on the node of server {self._server}"
        failure = self._first(failure)
        if self._server == 0 and token:
            (directory / token).unlink(missing_ok=True)
        return failure

    def _first(self, failure: str) -> str:
        """The first server's failure, on every server. Collective."""
        if self._comm is None:
            return failure
        return next((text for text in gather_json(self._comm, failure) if text), "")

    def _agree(self, failure: str) -> None:
        failure = self._first(failure)
        if failure:
            raise CheckpointError(failure)

    # -- load -------------------------------------------------------------------------------------

    def load(self, directory: Path) -> None:
        """Replace this job's tables by a checkpoint's, saved at any number of servers. Collective.

        Every server reads the whole file. Raises CheckpointError on every server, before anything
        is changed where the file does not fit.
        """
        with ExitStack() as stack:
            checkpoint, failure = None, ""
            try:
                checkpoint = stack.enter_context(open_checkpoint(directory))
                failure = self._misfit(checkpoint)
            except CheckpointError as error:
                failure = str(error)
            self._agree(failure)
            assert checkpoint is not None
            try:
                self._load_dense(checkpoint)
                for table, spec in enumerate(self._specs.sparse):
                    self._load_sparse(checkpoint, table, spec)
            except CheckpointError as error:
                failure = str(error)
            self._agree(failure)

    def _misfit(self, checkpoint: Checkpoint) -> str:
        """The first way in which the file does not fit these tables."""
        params = {p.name: p for spec in self._specs.dense for p in spec.params}
        for kind, ours, theirs in (
            ("parameter", list(params), list(checkpoint.dense_names)),
            ("table", [s.name for s in self._specs.sparse], list(checkpoint.sparse_names)),
        ):
            for name in [*ours, *theirs]:
                if name not in theirs or name not in ours:
                    where = "the model" if name not in ours else "the checkpoint"
                    return f"{kind} {name!r} is not in {where} ({checkpoint.path})"
        for name, param in params.items():
            shape = tuple(checkpoint.dense_shape(name))
            if shape != param.shape:
                return f"parameter {name!r} is {list(shape)} in the file, {list(param.shape)} here"
        for spec in self._specs.sparse:
            found = checkpoint.sparse_shape(spec.name)
            if tuple(found) != (spec.num_rows, spec.dim):
                return f"table {spec.name!r} is {found} in the file, {(spec.num_rows, spec.dim)} here"
        return ""

    def _load_dense(self, checkpoint: Checkpoint) -> None:
        for table, spec in enumerate(self._specs.dense):
            slots = self._shard.dense_state[table]
            flats = {n: np.zeros(spec.size, np.dtype(spec.dtype)) for n in (VALUE, *slots)}
            steps = self._shard.dense_steps[table]
            for index, param in enumerate(spec.params):
                entry = checkpoint.dense(param.name)
                flats[VALUE][param.start : param.stop] = entry.value.reshape(-1)
                if self._same_rule(param.name, entry.attrs, spec.rule.name):
                    steps[index] = entry.step
                    for slot in slots:
                        flats[slot][param.start : param.stop] = entry.state[slot].reshape(-1)
            part = self._shard.layout.dense[table]
            self._shard.set_dense(table, flats[VALUE][part.start : part.stop])
            for slot, values in slots.items():
                values.numpy()[:] = flats[slot][part.start : part.stop]

    def _load_sparse(self, checkpoint: Checkpoint, table: int, spec: SparseSpec) -> None:
        num_servers, server = len(self._layouts), self._server
        attrs = checkpoint.sparse_attrs(spec.name)
        slots = self._shard.sparse_state[table]
        with_state = self._same_rule(spec.name, attrs, spec.rule.name)
        if with_state:
            self._shard.sparse_steps[table] = int(attrs["step"])
        row_bytes = spec.dim * np.dtype(spec.dtype).itemsize * (1 + len(slots))
        for first, last in pieces(spec.num_rows, max(1, LOAD_BLOCK_BYTES // row_bytes)):
            block = checkpoint.sparse_block(spec.name, first, last)
            rows = _rows_of(first, last, server, num_servers)
            own = slice((server - first) % num_servers, None, num_servers)
            self._shard.set_rows(table, rows.start, np.ascontiguousarray(block[VALUE][own]))
            for slot, values in slots.items() if with_state else ():
                values.numpy()[rows] = block[slot][own]

    def _same_rule(self, name: str, attrs: dict[str, Any], rule: str) -> bool:
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


def _rows_of(first: int, last: int, server: int, num_servers: int) -> slice:
    """Rows on `server` of the keys [first, last)."""
    return slice(
        max(0, -(-(first - server) // num_servers)), max(0, -(-(last - server) // num_servers))
    )


def _appears(path: Path) -> bool:
    """Whether a file becomes visible; network file systems may take a while."""
    end_s = time.monotonic() + _TOKEN_PATIENCE_S
    while not path.exists():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.05)
        os.listdir(path.parent) if path.parent.exists() else None  # refreshes cached attributes
    return True
