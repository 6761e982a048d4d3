"""Write a checkpoint so that a reader sees either the whole new file or the previous one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from mpifleet.checkpoint.layout import (
    BLOCK_BYTES,
    CHECKPOINT_FORMAT,
    FILE_NAME,
    FORMAT_NAME,
    RESERVED_BLOCK_NAMES,
    DenseEntry,
    SparseEntry,
    is_numeric,
    json_text,
    link_name,
)
from mpifleet.checkpoint.sink import Sink
from mpifleet.errors import CheckpointError, FleetError

_PREFIX, _SUFFIX = f".{FILE_NAME}.", ".tmp"


def write_checkpoint(
    directory: str | os.PathLike[str],
    *,
    dense: Iterable[DenseEntry],
    sparse: Iterable[SparseEntry],
    buffers: Mapping[str, np.ndarray],
    meta: Mapping[str, Any],
) -> Path:
    """Write `<directory>/model.h5`, replacing the previous one at once; returns its path.

    Makes the directory where it is missing. Written under a temporary name beside it, synced,
    renamed, and the directory synced. Not collective: one rank writes, its blocks of at most
    BLOCK_BYTES come from each SparseEntry. meta: JSON-able values by name. Raises CheckpointError
    naming path and cause, after removing the temporary file; errors of this package that a block
    raises pass through. Leftovers of writers that were killed are removed.
    """
    target = Path(directory) / FILE_NAME
    dense, sparse = list(dense), list(sparse)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target.parent)
        _check_space(target.parent, dense, sparse, buffers)
        with _temporary(target.parent) as (descriptor, temporary):
            sink = Sink(descriptor)
            try:
                with h5py.File(sink, "w") as file:
                    _write_all(file, sink, dense, sparse, buffers, meta)
            finally:
                sink.check()  # the disk's error, not what HDF5 made of it
            os.fchmod(descriptor, 0o666 & ~_umask())
            os.fsync(descriptor)
            os.replace(temporary, target)  # noqa: PTH105
        _sync_directory(target.parent)
    except FleetError:
        raise
    except (OSError, RuntimeError, ValueError, TypeError, KeyError) as cause:
        raise CheckpointError(f"cannot write checkpoint {target}: {cause}") from cause
    return target


def _write_all(
    file: h5py.File,
    sink: Sink,
    dense: list[DenseEntry],
    sparse: list[SparseEntry],
    buffers: Mapping[str, np.ndarray],
    meta: Mapping[str, Any],
) -> None:
    file.attrs["format"] = FORMAT_NAME
    file.attrs["format_version"] = CHECKPOINT_FORMAT
    file.attrs["complete"] = 0
    facts = file.create_group("meta")
    for name, value in meta.items():
        facts.attrs[link_name(name)] = json_text(f"meta entry {name!r}", value)
    group = file.create_group("dense")
    for index, entry in enumerate(dense):
        _write_dense(_new_entry(group, entry.name, index), entry)
        sink.check()
    group = file.create_group("sparse")
    for index, table in enumerate(sparse):
        _write_sparse(_new_entry(group, table.name, index), sink, table)
    group = file.create_group("buffers")
    for index, (name, values) in enumerate(buffers.items()):
        _write_array(_new_entry(group, name, index), "value", values, name)
    file.flush()
    file.attrs["complete"] = 1


def _new_entry(parent: h5py.Group, name: str, index: int) -> h5py.Group:
    link = link_name(name)
    if link in parent:
        raise CheckpointError(f"{name!r} appears twice among the {parent.name[1:]} entries")
    group = parent.create_group(link)
    group.attrs["name"] = name
    group.attrs["index"] = index
    return group


def _write_dense(group: h5py.Group, entry: DenseEntry) -> None:
    group.attrs["step"] = int(entry.step)
    group.attrs["attributes"] = json_text(f"attrs of {entry.name!r}", entry.attrs)
    _write_array(group, "value", entry.value, entry.name)
    state = group.create_group("state")
    for slot, values in entry.state.items():
        if np.shape(values) != np.shape(entry.value):
            raise CheckpointError(
                f"state {slot!r} of {entry.name!r} has shape {np.shape(values)}, "
                f"its value {np.shape(entry.value)}: they must agree"
            )
        _write_array(state, link_name(slot), values, f"{entry.name}, state {slot}")


def _write_array(group: h5py.Group, link: str, values: np.ndarray, owner: str) -> None:
    array = np.asarray(values)
    if not is_numeric(array.dtype):
        raise CheckpointError(f"{owner!r} has dtype {array.dtype}; only numbers can be stored")
    group.create_dataset(link, data=array)


def _write_sparse(group: h5py.Group, sink: Sink, table: SparseEntry) -> None:
    dtype = np.dtype(table.dtype)
    if not is_numeric(dtype) or set(table.state_names) & set(RESERVED_BLOCK_NAMES):
        raise CheckpointError(
            f"table {table.name!r} with dtype {dtype} and state {list(table.state_names)}: use a "
            f"numeric dtype and state names other than {', '.join(RESERVED_BLOCK_NAMES)}"
        )
    group.attrs["num_rows"] = int(table.num_rows)
    group.attrs["dim"] = int(table.dim)
    group.attrs["attributes"] = json_text(f"attrs of {table.name!r}", table.attrs)
    keys = group.create_dataset("keys", shape=(table.num_rows,), dtype=np.int64)
    shape = (table.num_rows, table.dim)
    datasets = {"rows": group.create_dataset("rows", shape=shape, dtype=dtype)}
    state = group.create_group("state")
    for slot in table.state_names:
        datasets[slot] = state.create_dataset(link_name(slot), shape=shape, dtype=dtype)
    for first, last in block_bounds(table):
        arrays = table.block(first, last)
        _check_block(table, dtype, first, last, arrays)
        keys[first:last] = np.arange(first, last, dtype=np.int64)
        for name, dataset in datasets.items():
            dataset[first:last] = arrays[name]
        sink.check()


def block_bounds(table: SparseEntry) -> Iterator[tuple[int, int]]:
    """[first_key, last_key) of every block, in order: rows and state within BLOCK_BYTES."""
    itemsize = np.dtype(table.dtype).itemsize
    row_bytes = 8 + table.dim * itemsize * (1 + len(table.state_names))
    per_block = max(1, BLOCK_BYTES // row_bytes)
    for first in range(0, table.num_rows, per_block):
        yield first, min(first + per_block, table.num_rows)


def _check_block(
    table: SparseEntry, dtype: np.dtype, first: int, last: int, arrays: dict[str, np.ndarray]
) -> None:
    wanted = {"rows", *table.state_names}
    shape = (last - first, table.dim)
    found = {name: (array.shape, array.dtype) for name, array in arrays.items()}
    if found != dict.fromkeys(wanted, (shape, dtype)):
        raise CheckpointError(
            f"block [{first}, {last}) of table {table.name!r} holds {found}; "
            f"expected {sorted(wanted)}, each {dtype} {shape}"
        )


def _check_space(
    directory: Path,
    dense: list[DenseEntry],
    sparse: list[SparseEntry],
    buffers: Mapping[str, np.ndarray],
) -> None:
    """Refuse early what cannot fit: a full disk found after minutes helps nobody."""
    needed = sum(np.asarray(values).nbytes for values in buffers.values())
    for entry in dense:
        needed += np.asarray(entry.value).nbytes * (1 + len(entry.state))
    for table in sparse:
        row_bytes = table.dim * np.dtype(table.dtype).itemsize * (1 + len(table.state_names))
        needed += table.num_rows * (8 + row_bytes)
    disk = os.statvfs(directory)
    free = disk.f_bavail * disk.f_frsize
    if needed > free:
        raise CheckpointError(
            f"cannot write checkpoint {directory / FILE_NAME}: it needs {needed:,} bytes, "
            f"{free:,} bytes are free"
        )


@contextlib.contextmanager
def _temporary(directory: Path) -> Iterator[tuple[int, str]]:
    """A new private file, locked while its writer lives; removed unless it was renamed away."""
    descriptor, path = tempfile.mkstemp(prefix=_PREFIX, suffix=_SUFFIX, dir=directory)
    try:
        with contextlib.suppress(OSError):  # a file system without locks keeps leftovers
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield descriptor, path
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # noqa: PTH108
        os.close(descriptor)


def _remove_leftovers(directory: Path) -> None:
    """Remove temporary files whose writer is gone: those that nobody holds locked."""
    for path in directory.glob(f"{_PREFIX}*{_SUFFIX}"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    """The process's file mode mask; it can only be read by setting it, here to a private one."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
