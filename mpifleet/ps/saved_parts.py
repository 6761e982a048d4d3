"""A server's shard as parts of a checkpoint file."""

from collections.abc import Iterator

import numpy as np
import torch

from mpifleet.checkpoint import DenseShape, Part, Places, SparseShape
from mpifleet.checkpoint.digests import BLOCK_BYTES
from mpifleet.partition import pieces
from mpifleet.ps.row_copy import gather_rows
from mpifleet.ps.shard import Shard

ROWS = "rows"
_KEYS_AT_ONCE = 1 << 20


def dense_shapes(shard: Shard) -> list[DenseShape]:
    """All dense parameters of the job, with this server's count of their updates."""
    return [
        DenseShape(
            param.name,
            param.shape,
            spec.dtype,
            tuple(shard.dense_state[table]),
            step,
            {"rule": spec.rule.name},
        )
        for table, spec in enumerate(shard.layout.specs.dense)
        for param, step in zip(spec.params, shard.dense_steps[table].tolist(), strict=True)
    ]


def sparse_shapes(shard: Shard) -> list[SparseShape]:
    """All sparse tables of the job; a stretch of the file is what a server holds."""
    return [
        SparseShape(
            spec.name,
            spec.num_rows,
            spec.dim,
            spec.dtype,
            tuple(shard.sparse_state[table]),
            {
                "rule": spec.rule.name,
                "initializer": spec.initializer,
                "scale": spec.scale,
                "seed": spec.seed,
                "step": int(shard.sparse_steps[table]),
            },
            shard.layout.num_servers,
        )
        for table, spec in enumerate(shard.layout.specs.sparse)
    ]


def dense_parts(shard: Shard, places: Places) -> Iterator[Part]:
    """This server's elements of all dense parameters where they belong; views, not copies.

    Here and below arrays without a place are left out: those without bytes, and those of chunks.
    """
    shapes = iter(dense_shapes(shard))
    for table, spec in enumerate(shard.layout.specs.dense):
        part = shard.layout.dense[table]
        arrays: dict[str | None, np.ndarray] = {None: shard.dense(table)}
        arrays |= {slot: values.numpy() for slot, values in shard.dense_state[table].items()}
        for param in spec.params:
            shape = next(shapes)
            here, there = part.share_of(param)
            for slot, array in arrays.items() if there.stop > there.start else ():
                if shape.path(slot) in places:
                    yield places[shape.path(slot)] + there.start * array.itemsize, array[here]


def sparse_parts(shard: Shard, places: Places, table: int, shape: SparseShape) -> Iterator[Part]:
    """This server's rows of a sparse table where they belong; views, not copies."""
    server, num_rows = shard.layout.server, shard.layout.sparse_rows[table]
    if not num_rows:
        return
    first = shape.first_row(server)
    state = {slot: values.numpy() for slot, values in shard.sparse_state[table].items()}
    for name, array in {ROWS: shard.rows(table), **state}.items():
        if shape.path(name) in places:
            yield places[shape.path(name)] + first * array.itemsize * shape.dim, array
    for start, stop in pieces(num_rows if shape.path("keys") in places else 0, _KEYS_AT_ONCE):
        keys = np.arange(start, stop, dtype=np.int64) * shape.num_shards + server
        yield places[shape.path("keys")] + 8 * (first + start), keys


def changed_parts(
    shard: Shard, places: Places, table: int, shape: SparseShape, rows: np.ndarray
) -> Iterator[Part]:
    """These of this server's rows where they belong in a delta; copies, a block at a time."""
    server = shard.layout.server
    first = shape.first_row(server)
    arrays = {ROWS: torch.from_numpy(shard.rows(table)), **shard.sparse_state[table]}
    row_bytes = shape.dim * np.dtype(shape.dtype).itemsize
    for start, stop in pieces(rows.size, max(1, BLOCK_BYTES // max(8, row_bytes))):
        block = rows[start:stop]
        if shape.path("keys") in places:
            keys = block * shape.num_shards + server
            yield places[shape.path("keys")] + 8 * (first + start), keys
        for name, values in arrays.items() if shape.path(ROWS) in places else ():
            gathered = gather_rows(values, block, shard.breathe).numpy()
            yield places[shape.path(name)] + (first + start) * row_bytes, gathered
