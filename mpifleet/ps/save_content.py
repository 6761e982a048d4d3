"""What one save takes of the servers' tables."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mpifleet.checkpoint import DenseShape, Part, Places, SparseShape
from mpifleet.ps.saved_parts import dense_parts, dense_shapes, sparse_parts, sparse_shapes
from mpifleet.ps.shard import Shard


@dataclass(frozen=True)
class Content:
    """What a file holds: dense parameters, and sparse tables by their number in the job."""

    dense: tuple[DenseShape, ...]
    sparse: Mapping[int, SparseShape]

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
            yield from sparse_parts(shard, places, table, shape)
