"""Writes a checkpoint that is like another one, with some values from elsewhere.

The other checkpoint says which names there are, of which shapes and dtypes; what is not replaced is
taken from it.  Values that are replaced start without optimizer state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mpifleet.checkpoint import (
    Checkpoint,
    DenseShape,
    Keep,
    Newcomer,
    Part,
    Places,
    SparseShape,
    lay_out,
    write_parts,
    writing,
)
from mpifleet.checkpoint.blocks import boxes, key_blocks
from mpifleet.errors import CheckpointError
from mpifleet.portable.sources import ModelSource, checkpoint_source, rows_between
from mpifleet.portable.state_dict import weight_names
from mpifleet.portable.tensor_stream import dtype_name
from mpifleet.portable.vectors import ReadVectors

RowsOf = Callable[[int, int, np.ndarray | None], np.ndarray]
"""New rows of first <= key < last; the third argument has the old ones where they are asked for."""
_STATE = ("rule", "step")


@dataclass(frozen=True)
class NewRows:
    """rows: of the keys of a range.  needs_old: some stay as they are."""

    rows: RowsOf
    needs_old: bool = False


@dataclass
class Changes:
    """What to replace, by name: parameters, buffers (as the checkpoint holds them), tables."""

    dense: dict[str, np.ndarray] = field(default_factory=dict)
    buffers: dict[str, np.ndarray] = field(default_factory=dict)
    tables: dict[str, NewRows] = field(default_factory=dict)


class Unmatched(NamedTuple):
    """Names that one side has and the other lacks, as torch's load_state_dict() reports them."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def state_changes(base: Checkpoint, state: Mapping[str, Tensor]) -> tuple[Changes, Unmatched]:
    """What a state_dict replaces in a checkpoint.

    A table's rows are called as their module's weight, or by the table's name with ".weight" or
    without.  Raises CheckpointError naming a tensor of another shape, or of a dtype whose values
    the checkpoint's cannot hold exactly.
    """
    source, changes, taken = checkpoint_source(base), Changes(), set[str]()
    missing = []
    for stream in source.dense:
        names = [stream.name, *(a for a, other in source.aliases.items() if other == stream.name)]
        found = [name for name in names if name in state]
        taken.update(found)
        if not found:
            missing.append(stream.name)
            continue
        tensor = _checked(state[found[0]], found[0], stream.shape, stream.dtype, base.path)
        is_param = stream.name in base.dense_names
        (changes.dense if is_param else changes.buffers)[stream.name] = _array(tensor)
    for table in source.tables:
        names = [*weight_names(table), f"{table.name}.weight", table.name]
        found = [name for name in dict.fromkeys(names) if name in state]
        taken.update(found)
        if not found:
            missing.append(names[0])
            continue
        shape, dtype = (table.num_rows, table.dim), getattr(torch, table.dtype)
        rows = _checked(state[found[0]], found[0], shape, dtype, base.path, cast=False)
        changes.tables[table.name] = NewRows(_rows_of(rows, dtype))
    return changes, Unmatched(missing, [name for name in state if name not in taken])


def check_matched(unmatched: Unmatched, what: Path, allow: str) -> None:
    """Raise CheckpointError naming names that only one side has; allow: what would skip them."""
    for names, lacks in (
        (unmatched.missing_keys, f"not in {what}"),
        (unmatched.unexpected_keys, f"in {what}, but not in the model"),
    ):
        if names:
            shown = ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "")
            raise CheckpointError(f"{shown}: {lacks}; {allow} skips such names")


def _rows_of(rows: Tensor, dtype: torch.dtype) -> RowsOf:
    return lambda first, last, _: np.ascontiguousarray(rows[first:last].to(dtype).numpy())


def _checked(
    tensor: Tensor,
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    path: Path,
    cast: bool = True,
) -> Tensor:
    """cast: give it in the wanted dtype, which holds all its values."""
    if tuple(tensor.shape) != shape:
        raise CheckpointError(f"{name!r} is {tuple(tensor.shape)} in the file, {shape} in {path}")
    floats = tensor.dtype.is_floating_point and dtype.is_floating_point
    exact = floats and torch.promote_types(tensor.dtype, dtype) == dtype
    if tensor.dtype != dtype and not exact:
        raise CheckpointError(
            f"{name!r} is {dtype_name(tensor.dtype)} in the file, {dtype_name(dtype)} in {path}, "
            "which cannot hold all its values: convert it first"
        )
    return tensor.to(dtype) if cast else tensor


def _array(tensor: Tensor) -> np.ndarray:
    """As checkpoints hold it: 16-bit floats as float32."""
    short = tensor.dtype in (torch.bfloat16, torch.float16)
    return (tensor.float() if short else tensor).detach().contiguous().numpy()


def vector_changes(table: str, found: ReadVectors) -> Changes:
    """The rows of one table that a vectors file had."""

    def rows(first: int, last: int, old: np.ndarray | None) -> np.ndarray:
        new, is_taken = found.rows[first:last], found.is_taken[first:last]
        return new if old is None else np.where(is_taken[:, None], new, old)

    return Changes(tables={table: NewRows(rows, not bool(found.is_taken.all()))})


def write_changed(
    base: Checkpoint,
    directory: Path,
    changes: Changes,
    told: Callable[[int], object] | None = None,
    keep: Keep = Keep(),  # noqa: B008 -- frozen
) -> Path:
    """Write the checkpoint into `directory` as its newest; returns its path. Memory: one block.

    told: called with bytes as they are written.  Raises CheckpointError; earlier ones then stay.
    """
    dense = [_new_dense(base, name, changes) for name in base.dense_names]
    sparse = [_new_sparse(base, name, changes) for name in base.sparse_names]
    buffers = base.buffers() | changes.buffers
    with writing(directory):
        newcomer = Newcomer(directory)
        try:
            places = lay_out(newcomer, dense, sparse, buffers, base.meta)
            parts = _parts(base, changes, places, dense, sparse)
            blocks = write_parts(newcomer.descriptor, _counted(parts, told))
            return newcomer.publish(blocks, keep)
        finally:
            newcomer.close()


def bytes_of(source: ModelSource) -> int:
    """Bytes of all parameters, buffers and rows."""
    return sum(s.num_bytes for s in source.dense) + sum(t.num_bytes for t in source.tables)


def _stateless(attrs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attrs.items() if name not in _STATE} | {"step": 0}


def _new_dense(base: Checkpoint, name: str, changes: Changes) -> DenseShape:
    shape = base.dense_shape(name)
    if name not in changes.dense:
        return shape
    attrs = {key: value for key, value in shape.attrs.items() if key not in _STATE}
    return replace(shape, state_names=(), step=0, attrs=attrs)


def _new_sparse(base: Checkpoint, name: str, changes: Changes) -> SparseShape:
    shape = replace(base.sparse(name), num_shards=1)
    if name not in changes.tables:
        return shape
    return replace(shape, state_names=(), attrs=_stateless(shape.attrs))


def _parts(
    base: Checkpoint,
    changes: Changes,
    places: Places,
    dense: list[DenseShape],
    sparse: list[SparseShape],
) -> Iterator[Part]:
    for shape in dense:
        if shape.name in changes.dense:
            if changes.dense[shape.name].size:
                yield places[shape.path()], changes.dense[shape.name]
        else:
            yield from _old_dense(base, places, shape)
    for table in sparse:
        yield from _rows(base, changes.tables.get(table.name), places, table)


def _old_dense(base: Checkpoint, places: Places, shape: DenseShape) -> Iterator[Part]:
    for slot in (None, *shape.state_names):
        start = 0
        for box in boxes(shape.shape, shape.dtype):
            block = np.ascontiguousarray(base.dense_block(shape.name, slot, box))
            if block.size:
                yield places[shape.path(slot)] + start, block
            start += block.nbytes


def _rows(
    base: Checkpoint, new: NewRows | None, places: Places, table: SparseShape
) -> Iterator[Part]:
    row_bytes = table.dim * np.dtype(table.dtype).itemsize
    old = base.sparse(table.name)
    for first, last in key_blocks(table):
        yield places[table.path("keys")] + 8 * first, np.arange(first, last, dtype=np.int64)
        if new is None:
            block = base.sparse_block(table.name, first, last)
        else:
            before = rows_between(base, old, first, last) if new.needs_old else None
            block = {"rows": new.rows(first, last, before)}
        for slot, values in block.items() if row_bytes else ():
            rows = np.ascontiguousarray(values, table.dtype)
            yield places[table.path(slot)] + first * row_bytes, rows


def _counted(parts: Iterator[Part], told: Callable[[int], object] | None) -> Iterator[Part]:
    for offset, array in parts:
        yield offset, array
        if told is not None:
            told(array.nbytes)
