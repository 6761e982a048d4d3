"""Opens a directory that `inference_writing` wrote, without trusting what is in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpifleet.checkpoint.digests import check
from mpifleet.errors import CheckpointError, DataError
from mpifleet.portable.inference_writing import (
    ALL,
    FORMAT_NAME,
    FORMAT_VERSION,
    GIVEN,
    INDEX,
    TRAINED,
)
from mpifleet.portable.row_store import RowStore
from mpifleet.portable.safetensors_file import SafetensorsFile
from mpifleet.portable.sources import FirstValues
from mpifleet.portable.tensor_stream import dtype_name


@dataclass(frozen=True)
class StoredTable:
    """A table as model.json describes it; see `TableSource`.

    keys: "all", "trained" or "given"; stored: how many rows the file holds.
    """

    name: str
    num_rows: int
    dim: int
    dtype: str
    modules: tuple[str, ...]
    padding: tuple[int, ...]
    first: FirstValues | None
    keys: str
    stored: int
    file: Path

    @property
    def lacks_rows(self) -> bool:
        """Whether there are keys of which nobody can tell the row."""
        return self.keys == GIVEN and self.stored < self.num_rows

    def store(self, unknown: str, mapped: bool = True) -> RowStore:
        """Its rows. unknown: see RowStore; only tables of given keys have unknown keys.

        mapped: rows stay in the file until they are read.  Raises CheckpointError where the file
        does not hold what model.json says.
        """
        try:
            tensors = SafetensorsFile(self.file)
            rows = tensors.mapped("rows") if mapped else tensors.tensor("rows")
            keys = None if self.keys == ALL else tensors.tensor("keys").numpy()
        except DataError as cause:
            raise CheckpointError(str(cause)) from cause
        found = (tuple(rows.shape), dtype_name(rows.dtype))
        wanted = ((self.stored, self.dim), self.dtype)
        if found != wanted or (keys is None and self.stored != self.num_rows):
            raise CheckpointError(f"{self.file}: rows are {found}, {INDEX} says {wanted}")
        if keys is not None and not _are_keys(keys, self):
            raise CheckpointError(f"{self.file}: its keys are not distinct, sorted and in range")
        return RowStore(
            self.name, rows, keys, "initial" if self.keys == TRAINED else unknown, self.first
        )


def _are_keys(keys: np.ndarray, table: StoredTable) -> bool:
    if keys.dtype != np.int64 or keys.shape != (table.stored,):
        return False
    ends_fit = not keys.size or (keys[0] >= 0 and keys[-1] < table.num_rows)
    return bool(ends_fit and (np.diff(keys) > 0).all())


@dataclass(frozen=True)
class InferenceDirectory:
    """dense: parameters and buffers by name.  aliases: further names of those.  tables by name."""

    path: Path
    dense: SafetensorsFile
    aliases: dict[str, str]
    tables: dict[str, StoredTable]


def open_inference(directory: Path, verify: bool = True) -> InferenceDirectory:
    """Read model.json and open the files that it names.

    verify: compare all their bytes with their digests, which reads each once.  Raises
    CheckpointError where anything is missing, damaged or of another version.
    """
    index = directory / INDEX
    try:
        found = json.loads(index.read_text(encoding="utf-8"))
        if found.get("format") != FORMAT_NAME:
            raise ValueError(f"format {found.get('format')!r}, not {FORMAT_NAME!r}")
        version = found["format_version"]
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"{index} has format version {version}; this mpifleet reads {FORMAT_VERSION}"
            )
        tables = [_table(directory, facts) for facts in found["tables"]]
        dense = _file(directory, found["dense"])
        aliases = {str(name): str(other) for name, other in found["aliases"].items()}
    except FileNotFoundError as cause:
        raise CheckpointError(
            f"no model at {directory}: it has no {INDEX}; fleet.save_inference_model() or "
            "mpifleet export --to inference write one"
        ) from cause
    except OSError as cause:
        raise CheckpointError(f"{index} cannot be read: {cause.strerror}") from cause
    except (ValueError, TypeError, KeyError, AttributeError) as cause:
        raise CheckpointError(f"{index} is damaged: {cause!r}") from cause
    for path in (dense, *(table.file for table in tables)) if verify else ():
        check(path)
    try:
        return InferenceDirectory(
            directory, SafetensorsFile(dense), aliases, {table.name: table for table in tables}
        )
    except DataError as cause:
        raise CheckpointError(str(cause)) from cause


def while_it_stands(directory: Path, read: Callable[[], None]) -> None:
    """Call `read`, again where another model took this one's place, and its files, meanwhile.

    Raises what `read` does of a model that stood all the while.
    """
    while True:
        before = _index_bytes(directory)
        try:
            return read()
        except (CheckpointError, DataError):
            if _index_bytes(directory) == before:
                raise


def _index_bytes(directory: Path) -> bytes | None:
    try:
        return (directory / INDEX).read_bytes()
    except OSError:
        return None


def _table(directory: Path, facts: Mapping[str, Any]) -> StoredTable:
    first = facts["first"]
    if facts["keys"] not in (ALL, TRAINED, GIVEN):
        raise ValueError(f"keys {facts['keys']!r}")
    return StoredTable(
        str(facts["name"]),
        int(facts["num_rows"]),
        int(facts["dim"]),
        str(facts["dtype"]),
        tuple(map(str, facts["modules"])),
        tuple(map(int, facts["padding"])),
        None
        if first is None
        else FirstValues(str(first["initializer"]), float(first["scale"]), int(first["seed"])),
        facts["keys"],
        int(facts["stored"]),
        _file(directory, facts["file"]),
    )


def _file(directory: Path, name: Any) -> Path:
    if not isinstance(name, str) or Path(name).name != name:
        raise ValueError(f"{name!r} is not the name of a file in it")
    return directory / name
