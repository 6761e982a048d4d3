"""The states beside the tables, in an open checkpoint file: group /states."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from mpifleet.checkpoint.items import by_name, members_of, shape_of
from mpifleet.checkpoint.layout import entry_name, is_numeric, link_name
from mpifleet.errors import CheckpointError
from mpifleet.states import SavedState, State

GROUP = "states"


def write_states(file: h5py.File, states: Sequence[SavedState]) -> None:
    """Write them all; what several workers share is stored once, under hard links.

    Raises CheckpointError for a value that is no number or not JSON-able.
    """
    group = file.create_group(GROUP)
    group.attrs["workers"] = max((len(saved.workers) for saved in states), default=0)
    for index, saved in enumerate(states):
        link = link_name(saved.name)
        if link in group:
            raise CheckpointError(f"{saved.name!r} appears twice among the states")
        entry = group.create_group(link)
        entry.attrs["name"] = saved.name
        entry.attrs["index"] = index
        entry.attrs["per_worker"] = int(saved.per_worker)
        _write_workers(entry, saved)


def _write_workers(entry: h5py.Group, saved: SavedState) -> None:
    groups: dict[int, h5py.Group] = {}
    datasets: dict[int, h5py.Dataset] = {}
    for worker, state in enumerate(saved.workers):
        if id(state) in groups:
            entry[str(worker)] = groups[id(state)]
            continue
        groups[id(state)] = mine = entry.create_group(str(worker))
        text = _json(saved.name, state.facts).encode()
        # Of a fixed length: a text of any length would lie in a heap of HDF5's own.
        mine.create_dataset("facts", data=np.array(text, h5py.string_dtype("utf-8", len(text))))
        arrays = mine.create_group("arrays")
        for name, array in state.arrays.items():
            if not is_numeric(array.dtype):
                raise CheckpointError(
                    f"array {name!r} of state {saved.name!r} has dtype {array.dtype}; only "
                    "numbers can be stored"
                )
            if id(array) in datasets:
                arrays[link_name(name)] = datasets[id(array)]
            else:
                datasets[id(array)] = arrays.create_dataset(link_name(name), data=array)


def _json(name: str, facts: dict[str, Any]) -> str:
    """As text, in the order of the dict."""
    try:
        return json.dumps(facts, allow_nan=False)
    except (TypeError, ValueError) as cause:
        raise CheckpointError(f"facts of state {name!r} are not JSON-able: {cause}") from cause


class StateEntries:
    """The states of an open checkpoint; none in a file that was not saved to be resumed.

    Raises CheckpointError for one that is missing or damaged.
    """

    def __init__(self, file: h5py.File, path: Path) -> None:
        self._path = path
        try:
            self._group = file.get(GROUP)
            self._entries = {} if self._group is None else by_name(self._group)
            self.workers = 0 if self._group is None else int(self._group.attrs["workers"])
            if self.workers < 0:
                raise ValueError(f"{self.workers} workers")
        except (OSError, RuntimeError, KeyError, ValueError, AttributeError) as cause:
            raise CheckpointError(f"checkpoint {path} is damaged at its states: {cause}") from cause

    @property
    def names(self) -> tuple[str, ...]:
        """In the order of writing."""
        return tuple(self._entries)

    def is_per_worker(self, name: str) -> bool:
        """Whether it makes sense on the worker that had it alone."""
        return bool(self._entry(name).attrs.get("per_worker", 1))

    def state(self, name: str, worker: int) -> State:
        """A worker's state of that name."""
        entry = self._entry(name)
        try:
            facts, arrays = self._parts(entry[str(worker)])
            return State(facts, {name: np.asarray(item[()]) for name, item in arrays.items()})
        except (OSError, RuntimeError, KeyError, ValueError, TypeError, AttributeError) as cause:
            raise CheckpointError(
                f"checkpoint {self._path} is damaged at state {name!r} of worker {worker}: {cause}"
            ) from cause

    def sizes(self, name: str) -> dict[str, int]:
        """{"arrays": number, "bytes": of them and the facts}, what workers share counted once."""
        entry = self._entry(name)
        facts: dict[int, int] = {}
        sizes: dict[int, int] = {}
        try:
            for _, group in members_of(entry):
                _, arrays = self._parts(group)
                facts[_address(group["facts"])] = int(group["facts"].dtype.itemsize)
                sizes |= {_address(item): int(item.nbytes) for item in arrays.values()}
        except (OSError, RuntimeError, KeyError, ValueError, TypeError, AttributeError) as cause:
            raise CheckpointError(
                f"checkpoint {self._path} is damaged at state {name!r}: {cause}"
            ) from cause
        return {"arrays": len(sizes), "bytes": sum(sizes.values()) + sum(facts.values())}

    @staticmethod
    def _parts(group: h5py.Group) -> tuple[dict[str, Any], dict[str, h5py.Dataset]]:
        facts = json.loads(bytes(group["facts"][()]))
        if not isinstance(facts, dict):
            raise TypeError("its facts are no JSON object")
        arrays = {entry_name(link): item for link, item in members_of(group["arrays"])}
        for item in arrays.values():
            shape_of(item)
        return facts, arrays

    def _entry(self, name: str) -> h5py.Group:
        if name not in self._entries:
            has = ", ".join(map(repr, self._entries)) or "none: it was not saved to be resumed"
            raise CheckpointError(f"checkpoint {self._path} has no state {name!r}; it has {has}")
        return self._entries[name]


def _address(item: h5py.Dataset) -> int:
    """Where it is in the file: the same for all links to it."""
    return int(h5py.h5o.get_info(item.id).addr)
