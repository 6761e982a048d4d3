"""All servers' tables as one checkpoint.

The first server writes; the others send it what it asks for, block by block, so its memory grows by
one block and one dense table. The directory must be the same on all nodes. The file is the same
whatever the number of servers: rows are in order of their keys.
"""

import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from mpifleet.checkpoint import DenseEntry, SparseEntry, write_checkpoint
from mpifleet.errors import CheckpointError
from mpifleet.mpi import bcast_json, serial
from mpifleet.partition import pieces, shard_range
from mpifleet.ps.agreement import first_failure, raise_first_failure
from mpifleet.ps.shard import Shard
from mpifleet.ps.spec import ShardLayout
from mpifleet.window import MAX_COUNT

VALUE = "rows"
_DENSE, _SPARSE, _END = 0, 1, 2
_TOKEN_PATIENCE_S = 10.0


class Saver:
    """Writes the shards of all servers. `save` is collective over `comm`.

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

    def save(self, directory: Path, meta: dict[str, Any], buffers: dict[str, np.ndarray]) -> None:
        """Write one file. Collective. Raises CheckpointError on every server."""
        failure = self._check_same_directory(directory)
        if not failure:
            if self._server == 0:
                failure = self._write(directory, meta, buffers)
            else:
                self._send_blocks()
        raise_first_failure(self._comm, failure)

    def _write(self, directory: Path, meta: dict[str, Any], buffers: dict[str, np.ndarray]) -> str:
        try:
            dense = [
                entry for t in range(len(self._specs.dense)) for entry in self._dense_entries(t)
            ]
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
            state_names=tuple(self._shard.sparse_state[table]),
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
        self._shard.breathe()
        self._ask(_SPARSE, table, first, last)
        names = [VALUE, *self._shard.sparse_state[table]]
        block = {n: np.empty((last - first, spec.dim), np.dtype(spec.dtype)) for n in names}
        for server in range(num_servers):
            rows = shard_range(first, last, num_servers, server)
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
            self._shard.breathe()
            if what == _END:
                return
            if what == _DENSE:
                arrays = self._dense_arrays(table)
            else:
                rows = shard_range(first, last, len(self._layouts), self._server)
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
            with serial:
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
        if token and not appears(directory / token):
            failure = f"{directory} is not the same directory on the node of server {self._server}"
        failure = first_failure(self._comm, failure)
        if self._server == 0 and token:
            (directory / token).unlink(missing_ok=True)
        return failure


def appears(path: Path) -> bool:
    """Whether a file becomes visible; network file systems may take a while."""
    end_s = time.monotonic() + _TOKEN_PATIENCE_S
    while not path.exists():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.05)
        if path.parent.is_dir():
            next(path.parent.iterdir(), None)  # refreshes what a network file system remembers
    return True
