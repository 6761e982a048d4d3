"""safetensors files: a header in JSON, then the tensors' bytes.  Reading one runs no code.

Eight bytes give the header's length (little-endian); the header names each tensor's dtype, shape
and range of bytes behind it; the ranges follow each other without a gap.  Written here in pieces,
and read by mapping, which lets a table be larger than memory in both directions.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mpifleet.checkpoint.digests import BLOCK_BYTES, Block, digest_of
from mpifleet.errors import CheckpointError, DataError
from mpifleet.partition import pieces
from mpifleet.portable.tensor_stream import DTYPES, TensorStream, dtype_name

MAX_HEADER_BYTES = 100_000_000
"""Readers refuse a longer header, as safetensors' own library does."""
METADATA = "__metadata__"

_CODES = {
    "bool": "BOOL",
    "bfloat16": "BF16",
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
}
_DTYPES = {code: DTYPES[name] for name, code in _CODES.items() if name in DTYPES}


class Place(NamedTuple):
    """Where a tensor lies in the file: its first byte, dtype and shape."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(
    file: BinaryIO,
    streams: Iterable[TensorStream],
    metadata: Mapping[str, str],
    told: Callable[[int], object] | None = None,
) -> list[Block]:
    """Write tensors into a new file and give its bytes' digests. Memory: one piece.

    Those of long elements come first, so that each begins where its elements are aligned.
    told: called with the number of bytes of each piece.  Raises CheckpointError for a name that
    appears twice or cannot be one, OSError.
    """
    ordered = sorted(streams, key=lambda stream: -stream.dtype.itemsize)
    out = _Digesting(file)
    out.write(_header(ordered, metadata))
    for stream in ordered:
        for data in stream.buffers():
            for start, stop in pieces(len(data), BLOCK_BYTES):
                out.write(data[start:stop])
            if told is not None:
                told(len(data))
    return out.blocks


class _Digesting:
    """A file and the digests of what was written into it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._size = 0
        self.blocks: list[Block] = []

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self.blocks.append(Block(self._size, len(data), digest_of(data)))
        self._size += len(data)


def _header(streams: Iterable[TensorStream], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    start = 0
    for stream in streams:
        name = stream.name
        if name in entries or name == METADATA:
            raise CheckpointError(f"{name!r} cannot name one tensor more in the file")
        entries[name] = {
            "dtype": _CODES[dtype_name(stream.dtype)],
            "shape": list(stream.shape),
            "data_offsets": [start, start + stream.num_bytes],
        }
        start += stream.num_bytes
    try:
        text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as cause:
        raise CheckpointError(f"a name cannot be written as UTF-8: {cause}") from cause
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(f"the names of all tensors take {len(text):,} bytes: too many")
    return struct.pack("<Q", len(text)) + text


class SafetensorsFile:
    """An existing file: `places` of its tensors by name, in the file's order, and `metadata`.

    Raises DataError, naming the file, where it is missing or not what the format promises.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, str] = {}
        self.places: dict[str, Place] = {}
        try:
            with open(path, "rb") as file:
                size = file.seek(0, 2)
                file.seek(0)
                self._read_header(file, size)
        except OSError as cause:
            raise DataError(f"{path} cannot be read: {cause.strerror}") from cause
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as cause:
            raise DataError(f"{path} is no whole safetensors file: {cause}") from cause

    def tensor(self, name: str) -> Tensor:
        """A tensor's values, read into memory of its own."""
        place = self._place(name)
        whole = torch.empty(math.prod(place.shape), dtype=place.dtype)
        if place.num_bytes:
            with open(self.path, "rb") as file:
                file.seek(place.start)
                data = memoryview(whole.view(torch.uint8).numpy().data)
                if file.readinto(data) != place.num_bytes:
                    raise DataError(f"{self.path} ends inside {name!r}")
        return whole.reshape(place.shape)

    def mapped(self, name: str) -> Tensor:
        """A tensor whose memory is the file's: read when it is touched, by all who map it once.

        What is written into it never reaches the file.
        """
        place = self._place(name)
        if not place.num_bytes or place.start % place.dtype.itemsize:
            return self.tensor(name)
        data = np.memmap(self.path, np.uint8, "c", place.start, (place.num_bytes,))
        return torch.from_numpy(np.asarray(data)).view(place.dtype).reshape(place.shape)

    def _place(self, name: str) -> Place:
        if name not in self.places:
            raise DataError(f"{self.path} has no tensor {name!r}")
        return self.places[name]

    def _read_header(self, file: BinaryIO, size: int) -> None:
        (length,) = struct.unpack("<Q", file.read(8)) if size >= 8 else (size,)
        if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(f"its header of {length:,} bytes does not fit {size:,} bytes")
        entries = json.loads(file.read(length).decode(), object_pairs_hook=_once)
        self.metadata = {str(k): str(v) for k, v in entries.pop(METADATA, {}).items()}
        places = sorted((entry["data_offsets"], name) for name, entry in entries.items())
        end = 0
        for (start, stop), name in places:
            place = _checked_place(name, entries[name], 8 + length + start)
            if start != end or stop - start != place.num_bytes:
                raise ValueError(f"{name!r} lies at bytes {start} to {stop}, not from {end} on")
            self.places[name], end = place, stop
        if 8 + length + end != size:
            raise ValueError(f"it has {size:,} bytes, its header tells of {8 + length + end:,}")


def _once(members: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(members)
    if len(found) != len(members):
        raise ValueError("a name appears twice")
    return found


def _checked_place(name: str, entry: Mapping[str, Any], start: int) -> Place:
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"{name!r} has dtype {entry['dtype']!r}; known: {', '.join(_DTYPES)}")
    shape = tuple(entry["shape"])
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"{name!r} has shape {shape}")
    return Place(start, _DTYPES[entry["dtype"]], shape)
