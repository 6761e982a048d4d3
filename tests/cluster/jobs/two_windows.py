"""Four ranks on two nodes: a window shared inside each node and one over all ranks.

Prints one JSON object from rank 0: what every rank saw.
"""

import json
import os

import numpy as np

from mpifleet import mpi

MPI = mpi.load_mpi()
ELEMENTS = 100_000
ADDS = 100


def node_window(node) -> bool:
    """Whether each rank of the node reads by load what every other wrote by store."""
    window = MPI.Win.Allocate_shared(ELEMENTS * 8, 8, comm=node)
    window.Lock_all()
    blocks = [np.frombuffer(window.Shared_query(rank)[0], np.float64) for rank in range(node.size)]
    blocks[node.rank][:] = node.rank + 1
    window.Sync()
    node.Barrier()
    window.Sync()
    right = all(bool((block == rank + 1).all()) for rank, block in enumerate(blocks))
    node.Barrier()
    window.Unlock_all()
    del blocks
    window.Free()
    return right


def world_window(world) -> dict[str, bool]:
    """Whether Get, indexed Get and Fetch_and_op over all ranks give the right values."""
    window = MPI.Win.Allocate(ELEMENTS * 8, 8, comm=world)
    mine = np.frombuffer(window.tomemory(), np.float64)
    mine[:] = np.arange(ELEMENTS) + world.rank * ELEMENTS
    mine[0] = 0
    world.Barrier()
    window.Lock_all()
    seen = {"unified": window.Get_attr(MPI.WIN_MODEL) == MPI.WIN_UNIFIED}
    target = (world.rank + world.size // 2) % world.size
    whole = np.empty(ELEMENTS)
    window.Get(whole, target)
    window.Flush(target)
    expected = np.arange(ELEMENTS) + target * ELEMENTS
    seen["get"] = bool((whole[1:] == expected[1:]).all())
    starts = np.arange(16, ELEMENTS - 16, 48, dtype=np.int32)
    rows = MPI.DOUBLE.Create_indexed_block(16, starts).Commit()
    picked = np.empty(16 * len(starts))
    window.Get([picked, picked.size, MPI.DOUBLE], target, [0, 1, rows])
    window.Flush(target)
    wanted = expected[starts[:, None] + np.arange(16)].ravel()
    seen["indexed"] = bool((picked == wanted).all())
    rows.Free()
    world.Barrier()
    one, before = np.ones(1), np.empty(1)
    for _ in range(ADDS):
        window.Fetch_and_op(one, before, 0, 0, MPI.SUM)
        window.Flush(0)
    world.Barrier()
    window.Fetch_and_op(one, before, 0, 0, MPI.NO_OP)
    window.Flush(0)
    seen["added"] = before[0] == ADDS * world.size
    world.Barrier()
    window.Unlock_all()
    del mine
    window.Free()
    return seen


def main() -> None:
    world = MPI.COMM_WORLD
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    seen = {
        "node": os.environ["SLURMD_NODENAME"],
        "node_size": node.size,
        "level": mpi.thread_level(MPI),
        "shared": node_window(node),
        **world_window(world),
    }
    gathered = world.gather({name: bool(v) if name == "added" else v for name, v in seen.items()})
    if world.rank == 0:
        print(json.dumps(gathered))


if __name__ == "__main__":
    main()
