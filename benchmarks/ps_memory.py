"""Memory of a server with many workers, counted, against the formula.

    python -m benchmarks.ps_memory [--quick]

A server of float32 tables takes

    4 * (rows * dim + dense parameters) * (1 + arrays of the optimizer's state) + at most 256 MiB

whatever the number of workers, in async and in sync mode: the mailbox is divided among them. One
server and 15 workers, the tables of the CTR example with adam (2 arrays of state), and in every
step of every worker as much as a batch of 1,000 samples pushes. Counted is what has come since
torch and MPI were there: the server's private memory at its highest, and every page that any rank
touched in the windows, once. In sync mode, measured second in the same job, that includes what the
end of the first tables left behind. Exit status 1 when it is more than the formula says.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.process_memory import PrivatePeak, new_bytes, private_bytes, shared_bytes
from benchmarks.program import join, run_program
from benchmarks.report import Figure, Goal, print_figures
from benchmarks.row_workload import wait_in_mpi

if TYPE_CHECKING:
    from benchmarks.ctr_tables import CtrTables
    from mpifleet.roles import Roles

NUM_RANKS, QUICK_RANKS = 16, 4
NUM_ROWS, DIM, DENSE_SIZE = 1_000_001, 10, 431_202
PUSHED = 13_300
STEPS = 3
STATE_ARRAYS = 2  # adam: both moments
OVERHEAD_BYTES = 256 << 20
GOAL = Goal(1.0, at_most=True)


def formula_bytes(num_elements: int, state_arrays: int) -> int:
    """The formula of this module's docstring for so many float32, rows and dense together."""
    return 4 * num_elements * (1 + state_arrays) + OVERHEAD_BYTES


def memory_figures(mode: str, num_workers: int, windows: int, private: int) -> list[Figure]:
    """Counted bytes in all against the formula's, and their two parts."""
    formula = formula_bytes(NUM_ROWS * DIM + DENSE_SIZE, STATE_ARRAYS)
    ratio = (windows + private) / formula
    name = f"memory of a server of {num_workers} workers, {mode}"
    whole = Figure(
        name,
        _mib(windows + private),
        "MiB",
        f"table + state + 256 MiB = {_mib(formula)} MiB",
        round(ratio, 3),
        str(GOAL),
        GOAL.met_by(ratio),
    )
    parts = {"windows": windows, "private": private}
    return [whole, *(Figure(f"{name}: {part}", _mib(size), "MiB") for part, size in parts.items())]


def _mib(num_bytes: int) -> float:
    return round(num_bytes / 2**20, 1)


def train(table: CtrTables, worker: int) -> None:
    """STEPS pushes of rows of this worker's own choice and of everything dense, and the end."""
    random = np.random.default_rng(worker)
    for _ in range(STEPS):
        table.step(random.choice(NUM_ROWS, PUSHED, replace=False))
    table.stop()


def count(table: CtrTables, roles: Roles, peak: PrivatePeak) -> int:
    """Train, and return the private peak of the server. Collective; 0 on workers."""
    from mpifleet.roles import Role

    if roles.role is Role.WORKER:
        train(table, roles.index)
    else:
        table.serve()
    wait_in_mpi(roles.world)
    return peak.peak_bytes if roles.role is Role.SERVER else 0


def measure(_: bool) -> None:
    """One rank's part of the job; the server prints. Collective."""
    from benchmarks.ctr_tables import CtrTables
    from mpifleet.roles import Role

    mpi, roles = join("ps_memory")
    # Memory that MPI shares on first contact is none of the tables'.
    roles.world.Alltoall(np.zeros(roles.world.size), np.empty(roles.world.size))
    private_before, shared_before = private_bytes(), shared_bytes()
    for mode in ("async", "sync"):
        with PrivatePeak() as peak:
            table = CtrTables(mpi, roles, mode == "sync", NUM_ROWS, DIM, DENSE_SIZE)
            private = count(table, roles, peak)
        windows = np.array([new_bytes(shared_before, shared_bytes())])
        roles.world.Allreduce(mpi.IN_PLACE, windows)
        if roles.role is Role.SERVER:
            private -= private_before
            print_figures(memory_figures(mode, roles.num_workers, int(windows[0]), private))
        table.free()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure here when a launcher started us, else start the job that does."""
    means = f"{QUICK_RANKS} ranks"
    return run_program("ps_memory", __doc__, means, measure, NUM_RANKS, QUICK_RANKS, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
