"""A model as one plain state_dict, rows and all: safetensors files and torch's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO, cast

import torch
from torch import Tensor

from mpifleet.errors import CheckpointError, ConfigError, DataError
from mpifleet.portable.safetensors_file import SafetensorsFile, write_tensors
from mpifleet.portable.sources import ModelSource, TableSource
from mpifleet.portable.tensor_stream import TensorStream
from mpifleet.portable.written_file import replacing

SAFETENSORS = (".safetensors",)
TORCH = (".pt", ".pth")
Told = Callable[[int], object]


def weight_names(table: TableSource) -> tuple[str, ...]:
    """Names of a table's rows in a state_dict: of the modules' weights, else the table's own."""
    return tuple(f"{module}.weight" if module else "weight" for module in table.modules) or (
        f"{table.name}.weight",
    )


def state_streams(source: ModelSource) -> list[TensorStream]:
    """What a plain model's state_dict() would hold: tied parameters under each of their names.

    Rows that look-ups answer with zeros are zeros.  Raises CheckpointError where a table and a
    parameter have the same name.
    """
    streams = {stream.name: stream for stream in source.dense}
    for name, other in source.aliases.items():
        if other in streams and name not in streams:
            first = streams[other]
            streams[name] = TensorStream(name, first.dtype, first.shape, first.pieces)
    for table in source.tables:
        for name in weight_names(table):
            if name in streams:
                raise CheckpointError(f"table {table.name!r} and a parameter are called {name!r}")
            streams[name] = table.stream(name, zero_padding=True)
    return list(streams.values())


def check_suffix(path: Path, otherwise: str = "") -> None:
    """Raise ConfigError where the name does not say which format is meant.

    otherwise: what else could be done.
    """
    known = (*SAFETENSORS, *TORCH)
    if path.suffix not in known:
        more = f", {otherwise}" if otherwise else ""
        raise ConfigError(f"{path}: the name must end in {', '.join(known)}{more}")


def write_state(path: Path, streams: list[TensorStream], told: Told | None = None) -> None:
    """Write tensors as the suffix says: .safetensors in pieces, .pt and .pth from memory, whole.

    told: called with numbers of bytes.  Raises ConfigError for another suffix, CheckpointError.
    """
    check_suffix(path)
    with replacing(path) as file:
        if path.suffix in SAFETENSORS:
            write_tensors(file, streams, {"format": "pt"}, told)
        else:
            _write_torch(file, streams, told)


def _write_torch(file: BinaryIO, streams: list[TensorStream], told: Told | None) -> None:
    tensors = {}
    for stream in streams:
        tensors[stream.name] = stream.tensor()
        if told is not None:
            told(stream.num_bytes)
    try:
        torch.save(tensors, file)
    except RuntimeError as cause:  # what its archive writer makes of a full disk
        raise CheckpointError(f"cannot write {file.name}: {cause}") from cause


def read_state(path: Path) -> Mapping[str, Tensor]:
    """The tensors of a state_dict file by name, mapped from it where the format allows.

    torch's own files are read with weights_only: nothing in them is run.  Raises DataError for a
    file that is damaged or holds anything but tensors by name, ConfigError for another suffix.
    """
    check_suffix(path)
    if path.suffix in SAFETENSORS:
        file = SafetensorsFile(path)
        return {name: file.mapped(name) for name in file.places}
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as cause:  # torch has many: of the archive, of what may not be loaded
        raise DataError(f"{path} cannot be read as tensors: {_first_line(cause)}") from cause
    if not isinstance(found, dict):
        raise DataError(f"{path} holds a {type(found).__name__}, not a state_dict")
    for name, tensor in found.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise DataError(
                f"{path}: {name!r} is a {type(tensor).__name__}, not a tensor; save the "
                "model's state_dict() alone"
            )
    return cast("dict[str, Tensor]", found)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
