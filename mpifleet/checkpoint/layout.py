"""What a checkpoint holds and how its parts are called in the file (format version 2).

docs/checkpoint-format.md describes the same field by field. Only numbers and UTF-8 text are stored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpifleet.errors import CheckpointError
from mpifleet.partition import shard_rows

CHECKPOINT_FORMAT = 2
"""Version of the layout that is written."""
READABLE_FORMATS = (1, 2)
"""Versions that are read; every other is refused."""

FORMAT_NAME = "mpifleet-checkpoint"
RESERVED_STATE_NAMES = ("rows", "keys")
MAX_ATTRIBUTE_BYTES = 32 << 10
"""Longer facts become datasets: HDF5 holds attributes of less than 64 KiB."""
MODEL_FACT = "model"
"""Name of the fact that says how the model calls its tensors, for exports into other formats."""


@dataclass(frozen=True)
class DenseShape:
    """A dense parameter without its values.

    shape: any torch shape.  state_names: slots of the optimizer's state, of the same shape.
    step: number of updates so far.  attrs: JSON-able facts (rule).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    state_names: tuple[str, ...] = ()
    step: int = 0
    attrs: Mapping[str, Any] = field(default_factory=dict)

    def path(self, slot: str | None = None) -> str:
        """Path inside the file of the value, or of a slot of the state."""
        where = f"dense/{link_name(self.name)}"
        return f"{where}/value" if slot is None else f"{where}/state/{link_name(slot)}"

    @property
    def num_bytes(self) -> int:
        """Of value and state."""
        size = math.prod(self.shape) * np.dtype(self.dtype).itemsize
        return size * (1 + len(self.state_names))


@dataclass(frozen=True)
class SparseShape:
    """A sparse table without its values: keys 0 to num_rows - 1, in num_shards stretches.

    Stretch s holds the keys s, s + num_shards, s + 2 num_shards, ... in this order.
    attrs: JSON-able facts (initializer, seed, update count, rule).  stretches: of a delta, how many
    keys each stretch holds of these.
    """

    name: str
    num_rows: int
    dim: int
    dtype: str
    state_names: tuple[str, ...]
    attrs: Mapping[str, Any]
    num_shards: int = 1
    stretches: tuple[int, ...] | None = None

    def path(self, slot: str) -> str:
        """Path inside the file of "keys", "rows" or a slot of the state."""
        where = f"sparse/{link_name(self.name)}"
        own = slot in RESERVED_STATE_NAMES
        return f"{where}/{slot}" if own else f"{where}/state/{link_name(slot)}"

    def empty_rows(self, count: int) -> dict[str, np.ndarray]:
        """Arrays [count, dim] for "rows" and each state slot, not filled."""
        shape = (max(0, count), self.dim)
        return {slot: np.empty(shape, self.dtype) for slot in ("rows", *self.state_names)}

    def first_row(self, shard: int) -> int:
        """Where stretch `shard` begins in the file's order."""
        if self.stretches is not None:
            return sum(self.stretches[:shard])
        return sum(shard_rows(self.num_rows, self.num_shards, s) for s in range(shard))

    @property
    def stored_rows(self) -> int:
        """How many rows are in the file."""
        return self.num_rows if self.stretches is None else sum(self.stretches)

    @property
    def num_bytes(self) -> int:
        """Of keys, rows and state."""
        row_bytes = self.dim * np.dtype(self.dtype).itemsize * (1 + len(self.state_names))
        return self.stored_rows * (8 + row_bytes)


@dataclass(eq=False)
class DenseEntry:
    """One dense parameter with its optimizer state: see DenseShape; state: arrays by slot."""

    name: str
    value: np.ndarray
    state: dict[str, np.ndarray] = field(default_factory=dict)
    step: int = 0
    attrs: dict[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> DenseShape:
        """Raises CheckpointError where the state does not fit the value."""
        for slot, values in self.state.items():
            if np.shape(values) != np.shape(self.value):
                raise CheckpointError(
                    f"state {slot!r} of {self.name!r} has shape {np.shape(values)}, "
                    f"its value {np.shape(self.value)}: they must agree"
                )
        dtype = np.asarray(self.value).dtype.str
        shape = tuple(np.shape(self.value))
        return DenseShape(self.name, shape, dtype, tuple(self.state), self.step, self.attrs)

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """Value and state by their paths inside the file."""
        shape = self.shape
        yield shape.path(), np.asarray(self.value)
        for slot, values in self.state.items():
            yield shape.path(slot), np.asarray(values, shape.dtype)


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
