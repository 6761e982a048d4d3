"""Writes a directory from which a model predicts without MPI; docs/inference.md describes it.

model.json                      what the model has, and the names of the files that hold it
dense-000001.safetensors        parameters and buffers by name
rows-000001-000.safetensors     one table: rows, and their keys where not all are there
<file>.sums                     digests of a file's bytes

model.json is replaced last, files of earlier exports go after that: a reader finds one whole model.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpifleet._version import __version__
from mpifleet.checkpoint.digests import Sums, sums_path
from mpifleet.checkpoint.directory import sync_directory
from mpifleet.errors import CheckpointError, ConfigError, KeyRangeError
from mpifleet.portable.safetensors_file import write_tensors
from mpifleet.portable.sources import ModelSource, TableSource
from mpifleet.portable.tensor_stream import TensorStream
from mpifleet.portable.written_file import replacing

FORMAT_NAME = "mpifleet-inference"
FORMAT_VERSION = 1
INDEX = "model.json"
ALL, TRAINED, GIVEN = "all", "trained", "given"
Keys = str | Mapping[str, Any]
Told = Callable[[int], object]

_FILE = re.compile(r"(?:dense|rows)-(\d{6,})(?:-\d{3,})?\.safetensors(?:\.sums)?")


def write_inference(
    directory: Path, source: ModelSource, keys: Keys = ALL, told: Told | None = None
) -> None:
    """Write a model into `directory`, instead of the one that is there.

    keys: "all" rows; "trained", those that differ from their first values, which give the rest; or
    keys by table, where tables that are not named keep all.  told: called with bytes of dense
    parameters and rows as they are written.  Memory: one piece, and the keys.
    Raises ConfigError for keys that cannot be, CheckpointError; the earlier model then stays.
    """
    picked = {table.name: _picked(table, keys) for table in source.tables}
    _check_names(keys, picked)
    written: list[Path] = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        number = 1 + max(_numbers(directory), default=0)
        dense = f"dense-{number:06d}.safetensors"
        _write(directory / dense, source.dense, told, written)
        tables = []
        for index, table in enumerate(source.tables):
            file = f"rows-{number:06d}-{index:03d}.safetensors"
            kind, own = picked[table.name]
            _write(directory / file, _streams(table, own), told, written)
            tables.append(_facts(table, file, kind, own))
        sync_directory(directory)
        written.clear()  # from here on model.json may name them
        _publish(directory, dense, tables, source.aliases)
        _remove_older(directory, number)
    except OSError as cause:
        raise CheckpointError(f"cannot write a model into {directory}: {cause}") from cause
    finally:
        for path in written:
            with contextlib.suppress(OSError):
                path.unlink()


def _picked(table: TableSource, keys: Keys) -> tuple[str, np.ndarray | None]:
    """What kind of choice it is, and the keys; None for all."""
    if isinstance(keys, Mapping):
        if table.name not in keys:
            return ALL, None
        return GIVEN, _checked_keys(table, keys[table.name])
    if not isinstance(keys, str) or keys not in (ALL, TRAINED):
        raise ConfigError(f"keys={keys!r}; use {ALL!r}, {TRAINED!r}, or keys by table name")
    if keys == ALL:
        return ALL, None
    if table.first is None:
        raise ConfigError(f"keys={TRAINED!r}: table {table.name!r} does not say how its rows began")
    none = np.empty(0, np.int64)
    return TRAINED, np.concatenate([none, *(_changed(table, *block) for block in table.blocks())])


def _changed(table: TableSource, keys: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The keys whose rows are not bit for bit the first ones."""
    assert table.first is not None
    first = table.first.rows(keys, table.dim, table.dtype)
    bits = np.dtype(f"u{first.itemsize}")
    return keys[(rows.view(bits) != first.view(bits)).any(axis=1)]


def _checked_keys(table: TableSource, keys: Any) -> np.ndarray:
    try:
        found = np.asarray(keys).reshape(-1)
    except (ValueError, TypeError) as cause:  # lists of several lengths; tensors of a GPU
        raise ConfigError(
            f"keys of table {table.name!r} are no array of integers: {cause}"
        ) from cause
    if found.size and found.dtype.kind not in "iu":
        raise ConfigError(f"keys of table {table.name!r} are {found.dtype}; use integers")
    distinct = np.unique(found)
    for key in distinct[:1].tolist() + distinct[-1:].tolist():
        if not 0 <= key < table.num_rows:
            raise KeyRangeError(f"table {table.name!r}: key {key} is outside [0, {table.num_rows})")
    return distinct.astype(np.int64)


def _check_names(keys: Keys, tables: Iterable[str]) -> None:
    names = list(tables)
    for name in keys if isinstance(keys, Mapping) else ():
        if name not in names:
            there = ", ".join(map(repr, names)) or "none"
            raise ConfigError(
                f"keys of table {name!r}: the model has no such table; it has {there}"
            )


def _streams(table: TableSource, keys: np.ndarray | None) -> list[TensorStream]:
    rows = table.stream("rows", keys)
    return [rows] if keys is None else [rows, TensorStream.of("keys", torch.from_numpy(keys))]


def _facts(table: TableSource, file: str, kind: str, keys: np.ndarray | None) -> dict[str, Any]:
    return {
        "name": table.name,
        "num_rows": table.num_rows,
        "dim": table.dim,
        "dtype": table.dtype,
        "modules": list(table.modules),
        "padding": list(table.padding),
        "first": None if table.first is None else asdict(table.first),
        "keys": kind,
        "stored": table.num_rows if keys is None else int(keys.size),
        "file": file,
    }


def _numbers(directory: Path) -> list[int]:
    found = (_FILE.fullmatch(path.name) for path in directory.iterdir())
    return [int(match[1]) for match in found if match]


def _write(
    path: Path, streams: Iterable[TensorStream], told: Told | None, written: list[Path]
) -> None:
    """written: gets the names of what is made here."""
    # "x": of two writers that took the same number one is refused.
    with open(path, "xb") as file:
        written.append(path)
        blocks = write_tensors(file, streams, {"format": "pt"}, told)
        file.flush()
        os.fsync(file.fileno())
    with open(sums_path(path), "x", encoding="utf-8") as file:
        written.append(sums_path(path))
        file.write(Sums.of_blocks(blocks).text())
        file.flush()
        os.fsync(file.fileno())


def _publish(
    directory: Path,
    dense: str,
    tables: Sequence[Mapping[str, Any]],
    aliases: Mapping[str, str],
) -> None:
    index = {
        "format": FORMAT_NAME,
        "format_version": FORMAT_VERSION,
        "package": __version__,
        "dense": dense,
        "aliases": dict(aliases),
        "tables": tables,
    }
    with replacing(directory / INDEX) as file:
        file.write((json.dumps(index, indent=1, ensure_ascii=False) + "\n").encode())


def _remove_older(directory: Path, number: int) -> None:
    for path in list(directory.iterdir()):
        match = _FILE.fullmatch(path.name)
        if match and int(match[1]) < number:
            path.unlink(missing_ok=True)
