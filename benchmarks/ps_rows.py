"""Pull and push of rows: the package's tables against numpy, torch and a loop of Gets.

    python -m benchmarks.ps_rows [--quick]

starts a job of one worker and one server on this node. Every call takes another random set of
10,000 distinct rows of 64 B out of 1,048,576, the same set on every road; torch has one thread.
A push (sgd) lasts from the call until the table's version shows it applied. "any keys" adds what a
look-up does for keys that may repeat: sorting, and dropping duplicates. Exit status 1 when a goal
is missed; a job that the user started (mpirun -n 2 ...) only prints.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.launch import is_launched, run_job
from benchmarks.report import Comparison, Goal, missed, print_figures
from benchmarks.row_workload import (
    DIM,
    LOOP,
    NUM_ROWS,
    QUICK_ROUNDS,
    RATE,
    ROUNDS,
    TAKE,
    Pull,
    check_pull,
    check_tables,
    key_sets,
    pull_figures,
    push_figures,
    wait_in_mpi,
)

if TYPE_CHECKING:
    from benchmarks.raw_roads import RawTables
    from benchmarks.table_roads import TableRoads

NUM_RANKS, WORKER, SERVER = 2, 0, 1
PULL_COMPARISONS = [
    Comparison("node home pull", TAKE, Goal(2.0, at_most=True)),
    Comparison("node home pull", LOOP, Goal(20.0, at_most=False), speedup=True),
    Comparison("world home pull", TAKE, Goal(3.2, at_most=True)),
    Comparison("world home pull", LOOP, Goal(10.0, at_most=False), speedup=True),
    Comparison("node home pull, any keys", TAKE),
    Comparison("world home pull, any keys", TAKE),
    Comparison("torch index_select", TAKE),
    Comparison("raw load", TAKE),
    Comparison("raw indexed Get", TAKE),
]
PUSH_GOAL = Goal(3.0, at_most=True)


def pull_roads(raw: RawTables, node: TableRoads, world: TableRoads) -> dict[str, Pull]:
    """Every road of a pull by name."""
    return raw.pulls() | {
        "node home pull": node.pull,
        "world home pull": world.pull,
        "node home pull, any keys": node.pull_any,
        "world home pull, any keys": world.pull_any,
    }


def check_roads(raw: RawTables, tables: Sequence[TableRoads], keys: np.ndarray) -> None:
    """See that every road gives the bytes that its table was filled with.

    Raises AssertionError naming the road.
    """
    from benchmarks.raw_roads import rows_of

    for name, pull in raw.pulls().items():
        check_pull(name, pull(keys), rows_of(keys, DIM))
    check_tables(tables, keys)


def work(raw: RawTables, tables: Sequence[TableRoads], rounds: int) -> None:
    """The worker's part: check, measure, print, and let the server's tables end one by one."""
    keys = key_sets()
    check_roads(raw, tables, keys[0])
    print_figures(pull_figures(pull_roads(raw, *tables), PULL_COMPARISONS, keys, rounds))
    for table in tables:
        print_figures(push_figures(table, raw.private, PUSH_GOAL, keys, rounds))
        table.stop()


def measure(rounds: int) -> None:
    """One rank's part of the job. Collective."""
    import torch

    from benchmarks.raw_roads import RawTables
    from benchmarks.table_roads import TableRoads
    from mpifleet.mpi import load_mpi
    from mpifleet.roles import Roles

    torch.set_num_threads(1)
    mpi = load_mpi()
    if mpi.COMM_WORLD.size != NUM_RANKS:
        raise SystemExit(f"ps_rows runs on {NUM_RANKS} ranks, not on {mpi.COMM_WORLD.size}")
    roles = Roles.assign(mpi, mpi.COMM_WORLD, num_servers=1)
    raw = RawTables(mpi, roles.world, NUM_ROWS, DIM, SERVER)
    tables = [TableRoads(mpi, roles, home, NUM_ROWS, DIM, RATE) for home in ("node", "world")]
    if roles.world.rank == WORKER:
        work(raw, tables, rounds)
    else:
        for table in tables:  # pulls need no server that serves; pushes come table by table
            table.serve()
    wait_in_mpi(roles.world)
    for table in tables:
        table.free()
    raw.free()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure here when a launcher started us, else start the job that does."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ps_rows", description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds")
    chosen = parser.parse_args(argv)
    if not is_launched():
        arguments = sys.argv[1:] if argv is None else list(argv)
        status, lines = run_job("benchmarks.ps_rows", NUM_RANKS, arguments)
        return status or int(bool(missed(lines)))
    measure(QUICK_ROUNDS if chosen.quick else ROUNDS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
