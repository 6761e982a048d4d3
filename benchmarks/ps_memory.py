"""Memory of a server with many workers, counted, against the formula.

    python -m benchmarks.ps_memory

A server's tables and mailbox take

    rows * dim * 4 * (1 + arrays of the optimizer's state) + at most 256 MiB

whatever the number of workers: the mailbox is divided among them. One server with an adam table (2
arrays of state) and 15 workers, each of which pushes 10,000 rows; counted is what the server's
resident memory grew by since before the table was made. Exit status 1 when it is more.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.launch import is_launched, run_job
from benchmarks.report import Figure, Goal, missed, print_figures

NUM_RANKS = 16
NUM_ROWS, DIM, PUSHED = 1_048_576, 16, 10_000
RATE = 0.001
STATE_ARRAYS = 2  # adam: both moments
OVERHEAD_BYTES = 256 << 20
GOAL = Goal(1.0, at_most=True)


def bound_bytes(num_rows: int, dim: int, state_arrays: int) -> int:
    """The formula of this module's docstring, for float32."""
    return num_rows * dim * 4 * (1 + state_arrays) + OVERHEAD_BYTES


def resident_bytes() -> int:
    """This process's resident memory, its part of shared memory included (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmRSS")


def memory_figure(counted: int, num_workers: int) -> Figure:
    """Counted bytes against the formula's."""
    ratio = counted / bound_bytes(NUM_ROWS, DIM, STATE_ARRAYS)
    return Figure(
        f"memory of a server of {num_workers} workers",
        round(counted / 2**20, 1),
        "MiB",
        "table + state + 256 MiB",
        round(ratio, 3),
        str(GOAL),
        GOAL.met_by(ratio),
    )


def measure() -> None:
    """One rank's part of the job; the server prints. Collective."""
    import torch

    from benchmarks.table_roads import TableRoads
    from mpifleet.mpi import load_mpi
    from mpifleet.roles import Role, Roles

    torch.set_num_threads(1)
    mpi = load_mpi()
    roles = Roles.assign(mpi, mpi.COMM_WORLD, num_servers=1)
    before = resident_bytes()
    table = TableRoads(mpi, roles, "node", NUM_ROWS, DIM, RATE, torch.optim.Adam)
    if roles.role is Role.WORKER:
        push_once(table, roles.index)
    else:
        table.serve()
        print_figures([memory_figure(resident_bytes() - before, roles.num_workers)])
    table.free()


def push_once(table: Any, worker: int) -> None:
    """One push of PUSHED rows of this worker's own choice, and the end."""
    keys = np.random.default_rng(worker).choice(NUM_ROWS, PUSHED, replace=False)
    table.push(keys, np.ones((PUSHED, DIM), np.float32))
    table.stop()


def main() -> int:
    """Measure here when a launcher started us, else start the job that does."""
    if not is_launched():
        status, lines = run_job("benchmarks.ps_memory", NUM_RANKS, [])
        return status or int(bool(missed(lines)))
    measure()
    return 0


if __name__ == "__main__":
    sys.exit(main())
