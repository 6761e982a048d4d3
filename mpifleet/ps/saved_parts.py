"""A server's shard as parts of a checkpoint file."""

from collections.abc import Iterator

import numpy as np

from mpifleet.checkpoint import DenseShape, Part, Places, SparseShape
from mpifleet.partition import pieces
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


def parts_of(shard: Shard, places: Places) -> Iterator[Part]:
    """What this server holds, each array where it belongs in the file; views, not copies.

    Arrays without a place are left out: those without bytes, and those made of chunks.
    """
    yield from _dense_parts(shard, places)
    for table, shape in enumerate(sparse_shapes(shard)):
        yield from _sparse_parts(shard, places, table, shape)


def _dense_parts(shard: Shard, places: Places) -> Iterator[Part]:
    shapes = iter(dense_shapes(shard))
    for table, spec in enumerate(shard.layout.specs.dense):
        part = shard.layout.dense[table]
        arrays: dict[str | None, np.ndarray] = {None: shard.dense(table)}
        arrays |= {slot: values.numpy() for slot, values in shard.dense_state[table].items()}
        for param in spec.params:
            shape = next(shapes)
            low, high = max(param.start, part.start), min(param.stop, part.stop)
            for slot, array in arrays.items() if high > low else ():
                if shape.path(slot) not in places:
                    continue
                offset = places[shape.path(slot)] + (low - param.start) * array.itemsize
                yield offset, array[low - part.start : high - part.start]


def _sparse_parts(shard: Shard, places: Places, table: int, shape: SparseShape) -> Iterator[Part]:
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
