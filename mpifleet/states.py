"""What a job remembers beside its tables, and who provides it: saved for training to be resumed."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

_SIZE_BYTES = 8


@dataclass(frozen=True, eq=False)
class State:
    """facts: JSON-able values by name; arrays: booleans, integers or floats of any shape by name.

    No name is empty or holds a NUL.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)


class StateProvider(Protocol):
    """Something that remembers what is not in the tables, without which training does not go on.

    name: unique in the job.  per_worker: the state makes sense on the worker that had it, and where
    the number of workers has changed nobody takes it; else all then take worker 0's.
    """

    @property
    def name(self) -> str:
        """What the state is called in a checkpoint."""
        ...

    @property
    def per_worker(self) -> bool:
        """See the class."""
        ...

    def state(self) -> State:
        """What is to be saved; copies. Raises CheckpointError for what cannot be."""
        ...

    def check(self, state: State) -> None:
        """Raise CheckpointError where `restore` could not take this; nothing changes."""
        ...

    def restore(self, state: State) -> None:
        """Go on from there."""
        ...


@dataclass(frozen=True, eq=False)
class SavedState:
    """One provider's state on every worker, in their order.

    Workers that have the same array share one object, and the same State where all is the same.
    """

    name: str
    per_worker: bool
    workers: Sequence[State]

    @property
    def num_bytes(self) -> int:
        """Of the arrays, each counted once."""
        return sum(array.nbytes for array in distinct_arrays([self]))


def distinct_arrays(states: Iterable[SavedState]) -> list[np.ndarray]:
    """All arrays of the states, each object once."""
    every = (a for saved in states for state in saved.workers for a in state.arrays.values())
    return list({id(array): array for array in every}.values())


def pack_states(states: Sequence[SavedState]) -> bytes:
    """The states as bytes: JSON, then the arrays; what workers share stands there once."""
    arrays = distinct_arrays(states)
    number = {id(array): index for index, array in enumerate(arrays)}
    head: dict[str, Any] = {"arrays": [[a.dtype.str, list(a.shape)] for a in arrays], "states": []}
    for saved in states:
        place = {id(state): index for index, state in reversed(list(enumerate(saved.workers)))}
        workers = [
            place[id(state)]
            if place[id(state)] < index
            else [state.facts, {name: number[id(a)] for name, a in state.arrays.items()}]
            for index, state in enumerate(saved.workers)
        ]
        head["states"].append([saved.name, saved.per_worker, workers])
    text = json.dumps(head).encode()
    parts = (np.ascontiguousarray(array).tobytes() for array in arrays)
    return b"".join((len(text).to_bytes(_SIZE_BYTES, "little"), text, *parts))


def unpack_states(packed: bytes) -> list[SavedState]:
    """The inverse of `pack_states`; the arrays are views of `packed`."""
    if not packed:
        return []
    start = _SIZE_BYTES + int.from_bytes(packed[:_SIZE_BYTES], "little")
    head = json.loads(packed[_SIZE_BYTES:start])
    arrays = []
    for code, shape in head["arrays"]:
        dtype, count = np.dtype(code), int(np.prod(shape, dtype=np.int64))
        arrays.append(np.frombuffer(packed, dtype, count, start).reshape(shape))
        start += arrays[-1].nbytes
    states = []
    for name, per_worker, entries in head["states"]:
        workers: list[State] = []
        for entry in entries:
            if isinstance(entry, int):
                workers.append(workers[entry])
            else:
                facts, numbers = entry
                workers.append(State(facts, {n: arrays[index] for n, index in numbers.items()}))
        states.append(SavedState(name, per_worker, workers))
    return states
