"""Write a checkpoint so that a reader sees either the whole new file or the previous one.

The file is laid out at once: every array has its place before any is there.  So all servers write
their parts side by side, each where it belongs, without HDF5 and without waiting for one another.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5d, h5p, h5s, h5t

from mpifleet.checkpoint import digests
from mpifleet.checkpoint.chunks import chunks_of
from mpifleet.checkpoint.digests import Block, digest_of
from mpifleet.checkpoint.directory import Keep, Newcomer
from mpifleet.checkpoint.layout import (
    CHECKPOINT_FORMAT,
    FORMAT_NAME,
    MAX_ATTRIBUTE_BYTES,
    RESERVED_STATE_NAMES,
    DenseEntry,
    DenseShape,
    SparseShape,
    is_numeric,
    json_text,
    link_name,
)
from mpifleet.checkpoint.sink import Sink
from mpifleet.checkpoint.state_entries import write_states
from mpifleet.errors import CheckpointError, FleetError
from mpifleet.partition import pieces
from mpifleet.states import SavedState

Places = dict[str, int]
"""Byte offset of every array in the file, by its path inside; arrays without bytes have none."""
Part = tuple[int, np.ndarray]
"""Bytes of the file: where they begin, and a C-contiguous array that holds them."""


def lay_out(
    newcomer: Newcomer,
    dense: Sequence[DenseShape],
    sparse: Sequence[SparseShape],
    buffers: Mapping[str, np.ndarray],
    meta: Mapping[str, Any],
    states: Sequence[SavedState] = (),
    level: int = 0,
) -> Places:
    """Write everything but the dense parameters and tables, and say where these go.

    meta: JSON-able values by name.  states: with none there is no such group.  level: of gzip;
    above 0 larger arrays are made of chunks, which have no place yet.  Raises CheckpointError, also
    where all of it cannot fit on the disk, or OSError.
    """
    if not level:  # else nobody knows yet
        needed = sum(s.num_bytes for s in dense) + sum(s.num_bytes for s in sparse)
        needed += sum(np.asarray(values).nbytes for values in buffers.values())
        needed += sum(saved.num_bytes for saved in states)
        _check_space(newcomer.directory, needed)
    sink = Sink(newcomer.descriptor)
    try:
        with h5py.File(sink, "w") as file:
            places = _lay_out_all(file, dense, sparse, buffers, meta, level)
            if states:
                write_states(file, states)
            file.attrs.update(newcomer.about.facts())
            sink.check()
    finally:
        sink.check()  # the disk's error, not what HDF5 made of it
    return places


def _lay_out_all(
    file: h5py.File,
    dense: Sequence[DenseShape],
    sparse: Sequence[SparseShape],
    buffers: Mapping[str, np.ndarray],
    meta: Mapping[str, Any],
    level: int,
) -> Places:
    file.attrs["format"] = FORMAT_NAME
    file.attrs["format_version"] = CHECKPOINT_FORMAT
    file.attrs["complete"] = 1  # a file that is not has no digests, and not its name
    if level:
        file.attrs["compression"] = f"gzip-{level}"
    facts = file.create_group("meta")
    for name, value in meta.items():
        text = json_text(f"meta entry {name!r}", value)
        if len(text) > MAX_ATTRIBUTE_BYTES:  # JSON text here is ASCII
            facts.create_dataset(link_name(name), data=np.frombuffer(text.encode(), np.uint8))
        else:
            facts.attrs[link_name(name)] = text
    datasets: list[h5py.Dataset] = []
    group = file.create_group("dense")
    for index, param in enumerate(dense):
        datasets += _lay_out_dense(_new_entry(group, param.name, index), param, level)
    group = file.create_group("sparse")
    for index, table in enumerate(sparse):
        datasets += _lay_out_sparse(_new_entry(group, table.name, index), table, level)
    group = file.create_group("buffers")
    for index, (name, values) in enumerate(buffers.items()):
        array = np.asarray(values)
        _check_dtype(name, array.dtype)
        _new_entry(group, name, index).create_dataset("value", data=array)
    offsets = {dataset.name[1:]: dataset.id.get_offset() for dataset in datasets}
    return {path: int(offset) for path, offset in offsets.items() if offset is not None}


def _new_entry(parent: h5py.Group, name: str, index: int) -> h5py.Group:
    link = link_name(name)
    if link in parent:
        raise CheckpointError(f"{name!r} appears twice among the {parent.name[1:]} entries")
    group = parent.create_group(link)
    group.attrs["name"] = name
    group.attrs["index"] = index
    return group


def _lay_out_dense(group: h5py.Group, param: DenseShape, level: int) -> Iterator[h5py.Dataset]:
    group.attrs["step"] = int(param.step)
    group.attrs["attributes"] = json_text(f"attrs of {param.name!r}", param.attrs)
    dtype = _check_dtype(param.name, np.dtype(param.dtype))
    yield _reserve(group, "value", param.shape, dtype, level)
    state = group.create_group("state")
    for slot in param.state_names:
        yield _reserve(state, link_name(slot), param.shape, dtype, level)


def _lay_out_sparse(group: h5py.Group, table: SparseShape, level: int) -> Iterator[h5py.Dataset]:
    dtype = _check_dtype(table.name, np.dtype(table.dtype))
    if set(table.state_names) & set(RESERVED_STATE_NAMES):
        raise CheckpointError(
            f"table {table.name!r} with state {list(table.state_names)}: use other names than "
            f"{', '.join(RESERVED_STATE_NAMES)}"
        )
    for name in ("num_rows", "dim", "num_shards"):
        group.attrs[name] = int(getattr(table, name))
    group.attrs["attributes"] = json_text(f"attrs of {table.name!r}", table.attrs)
    if table.stretches is not None:
        group.create_dataset("stretches", data=np.array(table.stretches, np.int64))
    shape = (table.stored_rows, table.dim)
    yield _reserve(group, "keys", shape[:1], np.dtype(np.int64), level)
    yield _reserve(group, "rows", shape, dtype, level)
    state = group.create_group("state")
    for slot in table.state_names:
        yield _reserve(state, link_name(slot), shape, dtype, level)


def _reserve(
    group: h5py.Group, link: str, shape: tuple[int, ...], dtype: np.dtype, level: int
) -> h5py.Dataset:
    """A dataset that is not filled: in one piece with its place at once, or of chunks to come."""
    how, link_how = h5p.create(h5p.DATASET_CREATE), h5p.create(h5p.LINK_CREATE)
    chunks = chunks_of(shape, dtype) if level else None
    if chunks is None:
        how.set_layout(h5d.CONTIGUOUS)
        how.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    else:
        how.set_chunk(chunks.box)
        if dtype.itemsize > 1:
            how.set_shuffle()
        how.set_deflate(level)
    how.set_fill_time(h5d.FILL_TIME_NEVER)
    how.set_obj_track_times(False)
    link_how.set_char_encoding(h5t.CSET_UTF8)
    kind = h5t.py_create(dtype, logical=True)
    space = h5s.create_simple(shape) if shape else h5s.create(h5s.SCALAR)
    # Not group.create_dataset(): it gives scalars their place when they are written.
    return h5py.Dataset(h5d.create(group.id, link.encode(), kind, space, how, link_how))


def _check_dtype(owner: str, dtype: np.dtype) -> np.dtype:
    if not is_numeric(dtype):
        raise CheckpointError(f"{owner!r} has dtype {dtype}; only numbers can be stored")
    return dtype


def write_parts(descriptor: int, parts: Iterable[Part]) -> list[Block]:
    """Write each part where it belongs, at most BLOCK_BYTES at once, and have them on disk.

    Returns their digests.  O(bytes moved).  Raises OSError.
    """
    blocks = write_unsynced(descriptor, parts)
    os.fdatasync(descriptor)
    return blocks


def write_unsynced(descriptor: int, parts: Iterable[Part]) -> list[Block]:
    """The same without having them on disk."""
    blocks = []
    for offset, array in parts:
        data = memoryview(array.reshape(-1).view(np.uint8).data)
        for start, stop in pieces(len(data), digests.BLOCK_BYTES):
            piece = data[start:stop]
            blocks.append(Block(offset + start, len(piece), digest_of(piece)))
            _write_at(descriptor, piece, offset + start)
            # Dirty pages are written from here on, instead of all at the sync, and stay cached.
            os.posix_fadvise(descriptor, offset + start, len(piece), os.POSIX_FADV_DONTNEED)
    return blocks


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


@contextlib.contextmanager
def writing(directory: Path) -> Iterator[None]:
    """What goes wrong inside becomes a CheckpointError that names the directory and the cause."""
    try:
        yield
    except FleetError:
        raise
    except (OSError, RuntimeError, ValueError, TypeError, KeyError, EOFError) as cause:
        raise CheckpointError(f"cannot write a checkpoint into {directory}: {cause}") from cause


def _check_space(directory: Path, num_bytes: int) -> None:
    """Refuse early what cannot fit: a full disk found after minutes helps nobody.

    Raises CheckpointError.
    """
    disk = os.statvfs(directory)
    free = disk.f_bavail * disk.f_frsize
    if num_bytes > free:
        raise CheckpointError(
            f"cannot write a checkpoint into {directory}: it needs {num_bytes:,} bytes, "
            f"{free:,} bytes are free"
        )


def write_checkpoint(
    directory: str | os.PathLike[str],
    *,
    dense: Sequence[DenseEntry],
    sparse: Sequence[tuple[SparseShape, Mapping[str, np.ndarray]]] = (),
    buffers: Mapping[str, np.ndarray],
    meta: Mapping[str, Any],
    states: Sequence[SavedState] = (),
    keep: Keep = Keep(),  # noqa: B008 -- frozen
) -> Path:
    """Write a checkpoint from arrays in memory, alone; returns its path.

    sparse: each table with "rows" and its state by name, [num_rows, dim], keys 0, 1, 2, ...
    Raises CheckpointError naming directory and cause; the previous checkpoint then stays.
    """
    where = Path(directory)
    with writing(where):
        newcomer = Newcomer(where)
        try:
            shapes = [entry.shape for entry in dense]
            tables = [table for table, _ in sparse]
            places = lay_out(newcomer, shapes, tables, buffers, meta, states)
            parts = _parts(places, dense, sparse)
            return newcomer.publish(write_parts(newcomer.descriptor, parts), keep)
        finally:
            newcomer.close()


def _parts(
    places: Places,
    dense: Sequence[DenseEntry],
    sparse: Sequence[tuple[SparseShape, Mapping[str, np.ndarray]]],
) -> Iterator[Part]:
    for entry in dense:
        for path, array in entry.arrays():
            if array.size:
                yield places[path], np.ascontiguousarray(array)
    for table, arrays in sparse:
        if table.num_rows:
            yield places[table.path("keys")], np.arange(table.num_rows)
            for name in ("rows", *table.state_names):
                yield places[table.path(name)], _checked_rows(table, name, arrays)


def _checked_rows(table: SparseShape, name: str, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    wanted = ((table.num_rows, table.dim), np.dtype(table.dtype))
    found = (arrays[name].shape, arrays[name].dtype) if name in arrays else "missing"
    if found != wanted:
        raise CheckpointError(f"{name!r} of table {table.name!r} is {found}, not {wanted}")
    return np.ascontiguousarray(arrays[name])
