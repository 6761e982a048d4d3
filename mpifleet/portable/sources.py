"""What is written into other formats: the parameters and tables of a checkpoint or a job."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpifleet.checkpoint import MODEL_FACT, Checkpoint, SparseShape
from mpifleet.checkpoint.blocks import boxes
from mpifleet.errors import CheckpointError
from mpifleet.partition import pieces, shard_range
from mpifleet.portable.tensor_stream import DTYPES, PIECE_BYTES, TensorStream, dtype_of
from mpifleet.ps.initializers import initial_rows


@dataclass(frozen=True)
class FirstValues:
    """How a table's rows began: see `mpifleet.ps.initializers.initial_rows`."""

    initializer: str
    scale: float
    seed: int

    def rows(self, keys: np.ndarray, dim: int, dtype: str) -> np.ndarray:
        """First values of those rows, [n, dim]."""
        return initial_rows(
            self.initializer, keys, dim, seed=self.seed, scale=self.scale, dtype=dtype
        )


@dataclass(frozen=True)
class TableSource:
    """A sparse table: keys 0 to num_rows - 1, rows of `dim` elements.

    dtype: "float32" or "float64".  rows: gives [n, dim] of sorted distinct keys int64 [n].
    modules: names of the model's modules that are this table, where they are known.  padding: keys
    that a look-up answers with zeros.  first: None where the checkpoint does not say.
    """

    name: str
    num_rows: int
    dim: int
    dtype: str
    rows: Callable[[np.ndarray], np.ndarray]
    modules: tuple[str, ...] = ()
    padding: tuple[int, ...] = ()
    first: FirstValues | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return self.num_rows * self.dim * np.dtype(self.dtype).itemsize

    @property
    def keys_at_once(self) -> int:
        """Rows of a piece."""
        return max(1, PIECE_BYTES // max(1, self.dim * np.dtype(self.dtype).itemsize))

    def blocks(self, keys: np.ndarray | None = None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(keys, rows) in pieces: of all keys in order, or of these, sorted and distinct."""
        for first, last in pieces(self.num_rows, self.keys_at_once):
            if keys is None:
                picked = np.arange(first, last)
            else:
                picked = keys[slice(*np.searchsorted(keys, (first, last)))]
            if picked.size:
                yield picked, self.rows(picked)

    def stream(
        self, name: str, keys: np.ndarray | None = None, zero_padding: bool = False
    ) -> TensorStream:
        """The rows of all keys, or of these, as a tensor [n, dim]."""
        count = self.num_rows if keys is None else keys.size
        padding = np.array(self.padding if zero_padding else (), np.int64)

        def parts() -> Iterator[Tensor]:
            for picked, rows in self.blocks(keys):
                rows[np.isin(picked, padding)] = 0
                yield torch.from_numpy(rows)

        return TensorStream(name, DTYPES[self.dtype], (count, self.dim), parts)


@dataclass(frozen=True)
class ModelSource:
    """dense: parameters and buffers by their names in the model; tables.

    aliases: further names of dense tensors, each with the first one (tied parameters).
    """

    dense: tuple[TensorStream, ...]
    tables: tuple[TableSource, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)

    def table(self, name: str | None) -> TableSource:
        """The table of that name; None for the only one. Raises CheckpointError."""
        found = [table for table in self.tables if name in (None, table.name)]
        if len(found) != 1:
            names = ", ".join(repr(table.name) for table in self.tables) or "none"
            which = "name one table" if name is None else f"there is no table {name!r}"
            raise CheckpointError(f"{which}: the checkpoint has {names}")
        return found[0]


def checkpoint_source(checkpoint: Checkpoint) -> ModelSource:
    """What an open checkpoint holds, to be read from it piece by piece while it is open."""
    facts = checkpoint.meta.get(MODEL_FACT, {})
    names, dtypes = facts.get("tables", {}), facts.get("dtypes", {})
    tables = (_table(checkpoint, name, names.get(name, {})) for name in checkpoint.sparse_names)
    params = [_param(checkpoint, name) for name in checkpoint.dense_names]
    buffers = [_buffer(checkpoint, name, dtypes.get(name)) for name in checkpoint.buffer_names]
    return ModelSource((*params, *buffers), tuple(tables), facts.get("aliases", {}))


def _param(checkpoint: Checkpoint, name: str) -> TensorStream:
    found = checkpoint.dense_shape(name)

    def parts() -> Iterator[Tensor]:
        for box in boxes(found.shape, found.dtype):
            yield torch.from_numpy(checkpoint.dense_block(name, None, box))

    return TensorStream(name, dtype_of(found.dtype, name), found.shape, parts)


def _buffer(checkpoint: Checkpoint, name: str, dtype: str | None) -> TensorStream:
    """dtype: what it is in the model, where the file holds it in a wider one."""
    shape, stored = checkpoint.buffer_shape(name)
    wanted = dtype_of(dtype or stored, name)

    def parts() -> Iterator[Tensor]:
        for box in boxes(shape, stored):
            yield torch.from_numpy(checkpoint.buffer_block(name, box)).to(wanted)

    return TensorStream(name, wanted, shape, parts)


def _table(checkpoint: Checkpoint, name: str, facts: Mapping[str, Any]) -> TableSource:
    table = checkpoint.sparse(name)
    attrs, first = table.attrs, None
    if {"initializer", "scale", "seed"} <= attrs.keys():
        first = FirstValues(attrs["initializer"], float(attrs["scale"]), int(attrs["seed"]))

    def rows(keys: np.ndarray) -> np.ndarray:
        block = rows_between(checkpoint, table, int(keys[0]), int(keys[-1]) + 1)
        return block if len(block) == keys.size else block[keys - keys[0]]

    return TableSource(
        name,
        table.num_rows,
        table.dim,
        np.dtype(table.dtype).name,
        rows,
        tuple(facts.get("modules", ())),
        tuple(facts.get("padding", ())),
        first,
    )


def rows_between(checkpoint: Checkpoint, table: SparseShape, first: int, last: int) -> np.ndarray:
    """Rows of first <= key < last, [n, dim], without their state."""
    out = np.empty((last - first, table.dim), table.dtype)
    count = table.num_shards
    for shard in range(count):
        where = shard_range(first, last, count, shard)
        part = np.empty((max(0, where.stop - where.start), table.dim), table.dtype)
        checkpoint.read_rows(table, shard, where.start, {"rows": part})
        out[(shard - first) % count :: count] = part
    return out
