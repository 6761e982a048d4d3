"""Read a checkpoint, table blocks included, without trusting that the file is whole."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import h5py
import numpy as np

from mpifleet.checkpoint.about import About
from mpifleet.checkpoint.items import by_name, members_of, shape_of
from mpifleet.checkpoint.layout import (
    FORMAT_NAME,
    READABLE_FORMATS,
    RESERVED_STATE_NAMES,
    DenseEntry,
    DenseShape,
    SparseShape,
    entry_name,
    link_name,
)
from mpifleet.checkpoint.state_entries import StateEntries
from mpifleet.errors import CheckpointError
from mpifleet.partition import shard_range, shard_rows

Box = tuple[slice, ...]
"""A part of an array: one slice per axis."""


def open_file(where: Path) -> h5py.File:
    """The HDF5 file, whose digests were checked. Raises CheckpointError."""
    try:
        return h5py.File(where, "r", locking=False)
    except OSError as cause:
        raise CheckpointError(
            f"checkpoint {where} cannot be opened; it is damaged, truncated or not HDF5: {cause}"
        ) from cause


class Checkpoint:
    """An open checkpoint file; a context manager that closes it.

    Names keep the order in which they were written. Raises CheckpointError for unknown names and
    for a file whose content is not what its version promises.
    """

    def __init__(self, file: h5py.File, path: Path, is_old: bool) -> None:
        self.path = path
        self._file = file
        self._check_head(is_old)
        with self._reading("its table of contents"):
            facts = list(file["meta"].attrs.items())
            facts += [(n, self._array(item).tobytes()) for n, item in members_of(file["meta"])]
            self.meta: dict[str, Any] = {entry_name(n): json.loads(text) for n, text in facts}
            self._groups = {kind: by_name(file[kind]) for kind in ("dense", "sparse", "buffers")}
            self.about = About.of(file.attrs)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; may be called again."""
        self._file.close()

    @property
    def members(self) -> tuple[Path, ...]:
        """The files that it is read from, base first."""
        return (self.path,)

    @property
    def dense_names(self) -> tuple[str, ...]:
        """Names of the dense parameters."""
        return tuple(self._groups["dense"])

    @property
    def sparse_names(self) -> tuple[str, ...]:
        """Names of the sparse tables."""
        return tuple(self._groups["sparse"])

    @property
    def buffer_names(self) -> tuple[str, ...]:
        """Names of the buffers."""
        return tuple(self._groups["buffers"])

    @property
    def states(self) -> StateEntries:
        """What was saved beside the tables for training to be resumed."""
        return StateEntries(self._file, self.path)

    @property
    def format_version(self) -> int:
        """One of READABLE_FORMATS."""
        return int(self._file.attrs["format_version"])

    @property
    def compression(self) -> str | None:
        """What save_persistables was asked for, with the level; None where not compressed."""
        found = self._file.attrs.get("compression")
        return None if found is None else str(found)

    def dense_shape(self, name: str) -> DenseShape:
        """One dense parameter without its values."""
        group = self._entry("dense", name)
        with self._reading(f"dense parameter {name!r}"):
            shape, dtype = shape_of(group["value"])
            state = {entry_name(slot): item.shape for slot, item in members_of(group["state"])}
            attrs = dict(json.loads(group.attrs["attributes"]))
            step = int(group.attrs["step"])
        for slot, found in state.items():
            if found != shape:
                raise CheckpointError(
                    f"checkpoint {self.path}: state {slot!r} of {name!r} has shape "
                    f"{found}, its value {shape}"
                )
        return DenseShape(name, shape, dtype, tuple(state), step, attrs)

    def dense(self, name: str) -> DenseEntry:
        """One dense parameter, its state, step and attributes."""
        shape = self.dense_shape(name)
        value = self.dense_block(name)
        state = {slot: self.dense_block(name, slot) for slot in shape.state_names}
        return DenseEntry(name, value, state, shape.step, dict(shape.attrs))

    def dense_block(self, name: str, slot: str | None = None, box: Box = ()) -> np.ndarray:
        """A part of a parameter, or of a slot of its state; () is all of it."""
        group = self._entry("dense", name)
        with self._reading(f"dense parameter {name!r}"):
            members = {entry_name(link): item for link, item in members_of(group["state"])}
            return self._array(group["value"] if slot is None else members[slot], box)

    def sparse(self, name: str) -> SparseShape:
        """One sparse table without its rows."""
        return self.stored(name)

    def stored(self, name: str) -> SparseShape:
        """What this file itself holds of a sparse table: of a delta's, the changed rows."""
        group = self._entry("sparse", name)
        with self._reading(f"sparse table {name!r}"):
            num_rows, dim = int(group.attrs["num_rows"]), int(group.attrs["dim"])
            num_shards = int(group.attrs.get("num_shards", 1))
            attrs = dict(json.loads(group.attrs["attributes"]))
            dtype = str(group["rows"].dtype)
            state_names = tuple(entry_name(slot) for slot, _ in members_of(group["state"]))
            shapes = [group["rows"].shape, *(item.shape for _, item in members_of(group["state"]))]
            num_keys, stretches = group["keys"].shape, None
            if "stretches" in group:
                stretches = tuple(self._array(group["stretches"]).tolist())
            if num_shards < 1 or len(stretches or [0] * num_shards) != num_shards:
                raise ValueError(f"num_shards {num_shards}, stretches {stretches}")
        table = SparseShape(name, num_rows, dim, dtype, state_names, attrs, num_shards, stretches)
        count = table.stored_rows
        if num_keys != (count,) or any(shape != (count, dim) for shape in shapes):
            raise CheckpointError(
                f"checkpoint {self.path}: table {name!r} has num_rows={num_rows}, dim={dim}, but "
                f"keys {num_keys}, rows and state {shapes}"
            )
        return table

    def read_rows(
        self, table: SparseShape, shard: int, first: int, out: Mapping[str, np.ndarray]
    ) -> None:
        """Read rows of one stretch, from its row `first` on, into "rows" and state slots of `out`.

        out: C-contiguous arrays [n, dim] of the table's dtype; row i of stretch s is that of key
        s + i * num_shards.  O(bytes moved), without another copy.
        """
        count = len(out["rows"])
        most = shard_rows(table.num_rows, table.num_shards, shard)
        if not (0 <= shard < table.num_shards and 0 <= first <= first + count <= most):
            raise CheckpointError(
                f"checkpoint {self.path}: rows [{first}, {first + count}) of stretch {shard} of "
                f"table {table.name!r} lie outside [0, {most})"
            )
        keys = np.empty(count, np.int64)
        self.read_stored(table.name, table.first_row(shard) + first, {"keys": keys, **out})
        if not np.array_equal(keys, np.arange(first, first + count) * table.num_shards + shard):
            raise CheckpointError(
                f"checkpoint {self.path}: table {table.name!r} does not hold its keys in order"
            )

    def read_stored(self, name: str, start: int, out: Mapping[str, np.ndarray]) -> None:
        """Read rows of a sparse table as they lie in this file, from place `start` on.

        out: "keys" int64 [n], "rows" and state slots [n, dim], C-contiguous, of their dtypes.
        """
        group = self._entry("sparse", name)
        with self._reading(f"sparse table {name!r}"):
            for slot, values in out.items():
                own = slot in RESERVED_STATE_NAMES
                item = group[slot] if own else group["state"][link_name(slot)]
                shape_of(item)
                if len(values):
                    item.read_direct(values, np.s_[start : start + len(values)])

    def shard_block(self, name: str, shard: int, first: int, last: int) -> dict[str, np.ndarray]:
        """{"rows": [n, dim], each state name: [n, dim]} of rows [first, last) of one stretch."""
        return self._stretch(self.sparse(name), shard, first, last)

    def _stretch(
        self, table: SparseShape, shard: int, first: int, last: int
    ) -> dict[str, np.ndarray]:
        out = table.empty_rows(last - first)
        self.read_rows(table, shard, first, out)
        return out

    def sparse_block(self, name: str, first_key: int, last_key: int) -> dict[str, np.ndarray]:
        """{"rows": [n, dim], each state name: [n, dim]} of first_key <= key < last_key."""
        table = self.sparse(name)
        if not 0 <= first_key <= last_key <= table.num_rows:
            raise CheckpointError(
                f"checkpoint {self.path}: keys [{first_key}, {last_key}) of table {name!r} "
                f"lie outside [0, {table.num_rows})"
            )
        out, count = table.empty_rows(last_key - first_key), table.num_shards
        for shard in range(count):
            rows = shard_range(first_key, last_key, count, shard)
            block = self._stretch(table, shard, rows.start, rows.stop)
            for slot, values in block.items():
                out[slot][(shard - first_key) % count :: count] = values
        return out

    def buffers(self) -> dict[str, np.ndarray]:
        """Every buffer of the model by name."""
        return {name: self.buffer_block(name) for name in self.buffer_names}

    def buffer_shape(self, name: str) -> tuple[tuple[int, ...], str]:
        """(shape, dtype) of one buffer."""
        group = self._entry("buffers", name)
        with self._reading(f"buffer {name!r}"):
            return shape_of(group["value"])

    def buffer_block(self, name: str, box: Box = ()) -> np.ndarray:
        """A part of a buffer; () is all of it."""
        group = self._entry("buffers", name)
        with self._reading(f"buffer {name!r}"):
            return self._array(group["value"], box)

    def _check_head(self, is_old: bool) -> None:
        head = self._file.attrs
        if head.get("format") != FORMAT_NAME:
            raise CheckpointError(f"{self.path} is HDF5 but not a checkpoint of mpifleet")
        version = head.get("format_version")
        if version not in READABLE_FORMATS:
            raise CheckpointError(
                f"checkpoint {self.path} has format version {version}; this mpifleet reads "
                f"versions {', '.join(map(str, READABLE_FORMATS))}"
            )
        if is_old and version != 1:
            raise CheckpointError(f"checkpoint {self.path} is incomplete: its digests are missing")
        if head.get("complete") != 1:
            raise CheckpointError(f"checkpoint {self.path} is incomplete: its writer was stopped")

    def _entry(self, kind: str, name: str) -> h5py.Group:
        groups = self._groups[kind]
        if name not in groups:
            raise CheckpointError(
                f"checkpoint {self.path} has no {kind} entry {name!r}; "
                f"it has {', '.join(map(repr, groups)) or 'none'}"
            )
        return groups[name]

    def _array(self, item: Any, box: Box = ()) -> np.ndarray:
        shape_of(item)
        return np.asarray(item[box])

    @contextlib.contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except (OSError, RuntimeError, KeyError, ValueError, TypeError, AttributeError) as cause:
            raise CheckpointError(
                f"checkpoint {self.path} is damaged at {what}: {cause}"
            ) from cause
