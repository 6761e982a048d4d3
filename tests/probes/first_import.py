"""A 2-rank program that imports mpi4py.MPI before anything else and says what it then gets.

Rank 0 prints one JSON object: level (of MPI.Query_thread), and for allocate and shared, by rank,
"ok" or MPI's error class of that kind of window.
"""

from mpi4py import MPI  # isort: skip  (first on purpose: what is measured here)

import json
from collections.abc import Callable

CLASSES = {getattr(MPI, name): name for name in dir(MPI) if name.startswith("ERR_")}


def outcome(make: Callable[..., MPI.Win]) -> str:
    """Build, use and free a window of 64 bytes on the world. Collective."""
    try:
        win = make(64, 1, MPI.INFO_NULL, MPI.COMM_WORLD)
    except MPI.Exception as refusal:
        return CLASSES[refusal.Get_error_class()]
    win.Lock_all()
    win.Put(bytearray(8), MPI.COMM_WORLD.size - 1)
    win.Flush_all()
    win.Unlock_all()
    win.Free()
    return "ok"


def main() -> None:
    allocate = MPI.COMM_WORLD.allgather(outcome(MPI.Win.Allocate))
    shared = MPI.COMM_WORLD.allgather(outcome(MPI.Win.Allocate_shared))
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps({"level": MPI.Query_thread(), "allocate": allocate, "shared": shared}))


if __name__ == "__main__":
    main()
