"""The states beside the tables of a checkpoint: what there is, and what differs between two."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mpifleet.checkpoint import Checkpoint
from mpifleet.checkpoint.digests import digest_of


def states_in(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Sizes of each state, what workers share counted once.

    facts: worker 0's, of states without arrays; else None.
    """
    states = checkpoint.states
    return [
        {
            "name": name,
            "workers": states.workers,
            "per_worker": states.is_per_worker(name),
            **(sizes := states.sizes(name)),
            "facts": None if sizes["arrays"] else states.state(name, 0).facts,
        }
        for name in states.names
    ]


def state_differences(one: Checkpoint, two: Checkpoint) -> list[dict[str, Any]]:
    """Facts that differ; of an array its type, shape and the begin of its digest."""
    ours, theirs = _facts(one), _facts(two)
    found = []
    first: Mapping[str, Any]
    second: Mapping[str, Any]
    for name in dict.fromkeys((*ours, *theirs)):
        if name not in ours or name not in theirs:
            first, second = {"present": name in ours}, {"present": name in theirs}
        else:
            first, second = ours[name], theirs[name]
        for what in dict.fromkeys((*first, *second)):
            values = first.get(what), second.get(what)
            if values[0] != values[1]:
                names = {"kind": "states", "name": name, "what": what}
                found.append({**names, "first": values[0], "second": values[1]})
    return found


def _facts(checkpoint: Checkpoint) -> Mapping[str, Mapping[str, Any]]:
    states = checkpoint.states
    return {
        name: {
            "per_worker": states.is_per_worker(name),
            **{
                f"worker {worker}: {what}": value
                for worker in range(states.workers)
                for what, value in _of_worker(checkpoint, name, worker)
            },
        }
        for name in states.names
    }


def _of_worker(checkpoint: Checkpoint, name: str, worker: int) -> Iterator[tuple[str, Any]]:
    state = checkpoint.states.state(name, worker)
    yield from state.facts.items()
    for array_name, array in state.arrays.items():
        yield array_name, f"{array.dtype} {list(array.shape)} {digest_of(array.tobytes())[:8]}"
