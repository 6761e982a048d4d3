"""What one save takes of the servers' tables."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mpifleet.checkpoint import DenseShape, Part, Places, SparseShape
from mpifleet.mpi import gather_json
from mpifleet.ps.saved_parts import (
    changed_parts,
    dense_parts,
    dense_shapes,
    sparse_parts,
    sparse_shapes,
)
from mpifleet.ps.shard import Shard


@dataclass(frozen=True)
class Content:
    """What a file holds: dense parameters, and sparse tables by their number in the job.

    changed: in a delta this server's rows of each table that it holds, int64, ascending.
    """

    dense: tuple[DenseShape, ...]
    sparse: Mapping[int, SparseShape]
    changed: Mapping[int, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of_delta(cls, comm: Any, shard: Shard) -> "Content":
        """Dense parameters, and the rows that are marked as changed. Collective over servers.

        comm: None in a single process.
        """
        assert shard.changed is not None
        whole = cls.of(shard)
        changed = {n: shard.changed.rows(n, shard.breathe) for n in whole.sparse}
        mine = [rows.size for rows in changed.values()]
        counts = [mine] if comm is None else gather_json(comm, mine)
        sparse = {
            table: replace(shape, stretches=stretches)
            for (table, shape), stretches in zip(
                whole.sparse.items(), zip(*counts, strict=True), strict=True
            )
        }
        return cls(whole.dense, sparse, changed)

    @classmethod
    def of(cls, shard: Shard, table: str | None = None) -> "Content":
        """Everything, or one table."""
        tables = dict(enumerate(sparse_shapes(shard)))
        if table is None:
            return cls(tuple(dense_shapes(shard)), tables)
        return cls((), {n: shape for n, shape in tables.items() if shape.name == table})

    def parts(self, shard: Shard, places: Places) -> Iterator[Part]:
        """What this server holds of it, each array where it belongs in the file."""
        if self.dense:
            yield from dense_parts(shard, places)
        for table, shape in self.sparse.items():
            if table in self.changed:
                yield from changed_parts(shard, places, table, shape, self.changed[table])
            else:
                yield from sparse_parts(shard, places, table, shape)
