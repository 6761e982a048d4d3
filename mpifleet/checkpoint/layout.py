"""What a checkpoint holds and how its parts are called in the file (format version 1).

docs/checkpoint-format.md describes the same field by field. Only numbers and UTF-8 text are stored.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpifleet.errors import CheckpointError

CHECKPOINT_FORMAT = 1
"""Version of the layout; a reader refuses every other."""

FORMAT_NAME = "mpifleet-checkpoint"
FILE_NAME = "model.h5"
BLOCK_BYTES = 64 << 20
"""Upper bound of the bytes of sparse rows and state held at once while writing."""

RESERVED_BLOCK_NAMES = ("rows", "keys")


@dataclass(eq=False)
class DenseEntry:
    """One dense parameter with its optimizer state.

    value: any torch shape. state: arrays of the same shape by slot name. step: number of updates
    so far. attrs: JSON-able facts (rule).
    """

    name: str
    value: np.ndarray
    state: dict[str, np.ndarray] = field(default_factory=dict)
    step: int = 0
    attrs: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class SparseEntry:
    """One sparse table; its rows come block by block.

    block(first_key, last_key): {"rows": [n, dim], each state name: [n, dim]}, all of `dtype`, for
    the keys first_key <= key < last_key. attrs: JSON-able facts (initializer, seed, update count,
    rule).
    """

    name: str
    num_rows: int
    dim: int
    dtype: str
    state_names: tuple[str, ...]
    attrs: dict[str, Any]
    block: Callable[[int, int], dict[str, np.ndarray]]


def link_name(name: str) -> str:
    """Name of an entry's HDF5 group: the entry's own, with "%", "/" and lone dots escaped.

    Raises CheckpointError for an empty name or one with a NUL, which HDF5 cannot hold.
    """
    if not name or "\0" in name:
        raise CheckpointError(f"{name!r} cannot be the name of a checkpoint entry")
    escaped = name.replace("%", "%25").replace("/", "%2F")
    return escaped.replace(".", "%2E") if set(escaped) == {"."} else escaped


def entry_name(link: str) -> str:
    """The name that `link_name` escaped."""
    return link.replace("%2E", ".").replace("%2F", "/").replace("%25", "%")


def json_text(owner: str, value: Any) -> str:
    """`value` as JSON. Raises CheckpointError naming `owner` where it is not JSON-able."""
    try:
        return json.dumps(value, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as cause:
        raise CheckpointError(f"{owner} is not JSON-able: {cause}") from cause


def is_numeric(dtype: np.dtype) -> bool:
    """Whether arrays of this dtype may be stored: booleans, integers and floats."""
    return dtype.kind in "biuf"
