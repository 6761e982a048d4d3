"""All workers' states on worker 0, which hands them to the first server."""

import hashlib
import json
from typing import Any

import numpy as np

from mpifleet.array_bytes import arrays_of, bytes_of, fact_of
from mpifleet.errors import CheckpointError
from mpifleet.mpi import bcast_json, gather_json, serial
from mpifleet.partition import pieces
from mpifleet.states import SavedState, State
from mpifleet.window import MAX_COUNT

_TAG = 3
Named = list[tuple[str, bool, State]]
"""A worker's own states: name, per_worker, state."""
Digests = list[dict[str, str]]


def gather_states(comm: Any, own: Named) -> list[SavedState]:
    """Every worker's states of each name on worker 0, nothing elsewhere. Collective.

    comm: the workers', None in a single process.  Arrays that are the same as worker 0's do not
    travel and are kept once.  Memory on worker 0: what differs among the workers, and one message.
    Raises CheckpointError on every worker where they have different names.
    """
    if comm is None:
        return [SavedState(name, per_worker, [state]) for name, per_worker, state in own]
    _check_names(comm, [name for name, _, _ in own])
    digests = [_digests(state) for _, _, state in own]
    first: Digests = bcast_json(comm, digests)
    if comm.rank:
        _send(comm, own, digests, first)
        return []
    by_worker = [[state for _, _, state in own]]
    by_worker += [_receive(comm, worker, by_worker[0]) for worker in range(1, comm.size)]
    return [
        SavedState(name, per_worker, [states[index] for states in by_worker])
        for index, (name, per_worker, _) in enumerate(own)
    ]


def _check_names(comm: Any, names: list[str]) -> None:
    for worker, theirs in enumerate(all_names := gather_json(comm, names)):
        if theirs != all_names[0]:
            raise CheckpointError(
                f"workers have different states: worker 0 {all_names[0]}, worker {worker} "
                f"{theirs}; register the same ones on all, in the same order"
            )


def _digests(state: State) -> dict[str, str]:
    return {name: _digest(array) for name, array in state.arrays.items()}


def _digest(array: np.ndarray) -> str:
    seen = hashlib.blake2b(f"{array.dtype.str}{array.shape}".encode(), digest_size=16)
    seen.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return seen.hexdigest()


def _send(comm: Any, own: Named, digests: Digests, first: Digests) -> None:
    """Facts of all states, and the arrays whose digest is not worker 0's."""
    facts, differing = [], []
    for (_, _, state), ours, theirs in zip(own, digests, first, strict=True):
        arrays: dict[str, Any] = dict.fromkeys(state.arrays)
        for name, digest in ours.items():
            if digest != theirs.get(name):
                arrays[name] = fact_of(state.arrays[name])
                differing.append(state.arrays[name])
        facts.append([state.facts, arrays])
    for part in (json.dumps(facts).encode(), bytes_of(differing)):
        data = np.frombuffer(part, np.uint8)
        with serial:
            comm.Send(np.array([data.size], np.int64), 0, _TAG)
            for start, stop in pieces(data.size, MAX_COUNT):
                comm.Send(data[start:stop], 0, _TAG)


def _receive(comm: Any, worker: int, first: list[State]) -> list[State]:
    """That worker's states; what is worker 0's too is worker 0's very object."""
    facts, data = json.loads(_receive_bytes(comm, worker).tobytes()), _receive_bytes(comm, worker)
    described = [fact for _, its in facts for fact in its.values() if fact is not None]
    differing = iter(arrays_of(described, data))
    states = []
    for (its_facts, its_arrays), ours in zip(facts, first, strict=True):
        arrays = {
            name: ours.arrays[name] if fact is None else next(differing)
            for name, fact in its_arrays.items()
        }
        same = its_facts == ours.facts and _same_objects(arrays, ours.arrays)
        states.append(ours if same else State(its_facts, arrays))
    return states


def _same_objects(arrays: dict[str, np.ndarray], ours: dict[str, np.ndarray]) -> bool:
    return arrays.keys() == ours.keys() and all(arrays[name] is ours[name] for name in ours)


def _receive_bytes(comm: Any, worker: int) -> np.ndarray:
    size = np.empty(1, np.int64)
    with serial:
        comm.Recv(size, worker, _TAG)
        data = np.empty(int(size[0]), np.uint8)
        for start, stop in pieces(data.size, MAX_COUNT):
            comm.Recv(data[start:stop], worker, _TAG)
    return data
