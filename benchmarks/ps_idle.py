"""What an idle server costs, and how quickly it answers out of its sleep.

    python -m benchmarks.ps_idle [--quick]

starts a job of one worker and one server on this node. The worker does nothing for a while, and
the server's processor time is set against that time; then it pushes one row every 50 ms, each push
finding the server asleep, and pulls 10,000 rows by load, which need no server. Exit status 1 when
the goal is missed; a job that the user started only prints.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.program import join, run_program
from benchmarks.report import Figure, Goal, interleave, plain, print_figures

if TYPE_CHECKING:
    from benchmarks.table_roads import TableRoads

NUM_RANKS, WORKER = 2, 0
NUM_ROWS, DIM, PULLED = 1_048_576, 16, 10_000
RATE = 0.01
IDLE_S, QUICK_IDLE_S = 10.0, 3.0
APART_S = 0.05
ROUNDS = 41
GOAL = Goal(0.05, at_most=True)


def idle_figure(busy_s: float, idle_s: float) -> Figure:
    """A server's processor time over the time in which nobody asked it for anything."""
    share = busy_s / idle_s
    percent = round(100 * share, 2)
    met = GOAL.met_by(share)
    return Figure("idle server", percent, "%", "one core", round(share, 4), str(GOAL), met)


def latencies(table: TableRoads) -> list[Figure]:
    """Median times of a push that wakes the server, and of a pull while it sleeps."""
    keys = np.random.default_rng(0).choice(NUM_ROWS, PULLED, replace=False)
    grads = np.zeros((1, DIM), np.float32)
    pushed_s = []
    for key in keys[:ROUNDS]:
        time.sleep(APART_S)
        start = time.perf_counter()
        table.push(np.array([key]), grads)
        pushed_s.append(time.perf_counter() - start)
    times = interleave({"pull beside an idle server": lambda _: table.pull(keys)}, ROUNDS)
    return [plain("push of one row to an idle server", pushed_s)] + [
        plain(name, seconds) for name, seconds in times.items()
    ]


def serve_and_count(table: TableRoads, comm: Any) -> None:
    """Serve, and tell the worker how much processor time that took."""
    start_s = time.process_time()
    table.serve()
    comm.Send(np.array([time.process_time() - start_s]), WORKER)


def measure(quick: bool) -> None:
    """One rank's part of the job. Collective.

    Two tables, served one after the other: one for the idle time, one for the latencies.
    """
    from benchmarks.table_roads import TableRoads

    idle_s = QUICK_IDLE_S if quick else IDLE_S
    mpi, roles = join("ps_idle", NUM_RANKS)
    idle, busy = (TableRoads(mpi, roles, "node", NUM_ROWS, DIM, RATE) for _ in range(2))
    if roles.world.rank == WORKER:
        time.sleep(idle_s)
        idle.stop()
        busy_s = np.empty(1)
        roles.world.Recv(busy_s, 1 - WORKER)
        print_figures([idle_figure(float(busy_s[0]), idle_s), *latencies(busy)])
        busy.stop()
    else:
        serve_and_count(idle, roles.world)
        busy.serve()
    for table in (idle, busy):
        table.free()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure here when a launcher started us, else start the job that does."""
    means = f"idle for {QUICK_IDLE_S:g} s only"
    return run_program("ps_idle", __doc__, means, measure, NUM_RANKS, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
