"""Pull and push of rows: the package's tables against numpy, torch and a loop of Gets.

    python -m benchmarks.ps_rows [--quick]

starts a job of one worker and one server on this node. Every call takes another random set of
10,000 distinct rows of 64 B out of 1,048,576, the same set on every road; torch has one thread.
A push (sgd) lasts from the call until the table's version shows it applied. "any keys" adds what a
look-up does for keys that may repeat: sorting, and dropping duplicates. Exit status 1 when a goal
is missed; a job that the user started (mpirun -n 2 ...) only prints.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.program import join, run_program
from benchmarks.report import Comparison, Goal, print_figures
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


def measure(quick: bool) -> None:
    """One rank's part of the job. Collective."""
    from benchmarks.raw_roads import RawTables
    from benchmarks.table_roads import TableRoads

    mpi, roles = join("ps_rows", NUM_RANKS)
    raw = RawTables(mpi, roles.world, NUM_ROWS, DIM, SERVER)
    tables = [TableRoads(mpi, roles, home, NUM_ROWS, DIM, RATE) for home in ("node", "world")]
    if roles.world.rank == WORKER:
        work(raw, tables, QUICK_ROUNDS if quick else ROUNDS)
    else:
        for table in tables:  # pulls need no server that serves; pushes come table by table
            table.serve()
    wait_in_mpi(roles.world)
    for table in tables:
        table.free()
    raw.free()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure here when a launcher started us, else start the job that does."""
    means = f"{QUICK_ROUNDS} rounds"
    return run_program("ps_rows", __doc__, means, measure, NUM_RANKS, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
