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
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.launch import is_launched, run_job
from benchmarks.report import (
    Comparison,
    Figure,
    Goal,
    compare,
    interleave,
    missed,
    plain,
    print_figures,
)

if TYPE_CHECKING:
    from benchmarks.raw_roads import RawTables
    from benchmarks.table_roads import TableRoads

Pull = Callable[[np.ndarray], np.ndarray]
"""Rows of distinct keys: int64 [n] -> float32 [n, dim]."""
Push = Callable[[np.ndarray, np.ndarray], object]
"""Distinct keys int64 [n] and their gradients float32 [n, dim], applied when it returns."""

NUM_RANKS, WORKER, SERVER = 2, 0, 1
NUM_ROWS, DIM, PULLED = 1_048_576, 16, 10_000
RATE = 0.01
KEY_SETS = 16
ROUNDS, QUICK_ROUNDS = 31, 5
CALLS, LOOP_CALLS = 8, 1  # of one road in one round

TAKE, LOOP, INDEX_ADD = "numpy take", "loop of Get", "torch index_add_"
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


def key_sets() -> list[np.ndarray]:
    """KEY_SETS arrays of distinct random keys, int64 [PULLED]."""
    random = np.random.default_rng(0)
    return [random.choice(NUM_ROWS, PULLED, replace=False) for _ in range(KEY_SETS)]


def pull_roads(raw: RawTables, node: TableRoads, world: TableRoads) -> dict[str, Pull]:
    """Every road of a pull by name."""
    return raw.pulls() | {
        "node home pull": node.pull,
        "world home pull": world.pull,
        "node home pull, any keys": node.pull_any,
        "world home pull, any keys": world.pull_any,
    }


def check_pulls(raw: RawTables, tables: Sequence[TableRoads], keys: np.ndarray) -> None:
    """See that every road gives the bytes that its table was filled with.

    Raises AssertionError naming the road.
    """
    from benchmarks.raw_roads import rows_of

    roads = {name: (pull, rows_of(keys, DIM)) for name, pull in raw.pulls().items()}
    for table in tables:
        roads[f"{table.home} home pull"] = (table.pull, table.first_rows(keys))
        sorted_rows = table.first_rows(np.sort(keys))
        roads[f"{table.home} home pull, any keys"] = (table.pull_any, sorted_rows)
    for name, (pull, expected) in roads.items():
        if pull(keys).tobytes() != expected.tobytes():
            raise AssertionError(f"{name} gives other rows than the table holds")


def pull_figures(
    pulls: Mapping[str, Pull], keys: Sequence[np.ndarray], rounds: int
) -> list[Figure]:
    """Times of all roads of a pull."""
    roads = {
        name: lambda call, pull=pull: pull(keys[call % len(keys)]) for name, pull in pulls.items()
    }
    return figures_of(roads, PULL_COMPARISONS, rounds)


def push_figures(
    name: str, push: Push, index_add: Push, keys: Sequence[np.ndarray], rounds: int
) -> list[Figure]:
    """Times of one road of a push and of torch's index_add_ on private memory."""
    grads = np.full((PULLED, DIM), 0.5, np.float32)
    roads = {
        road: lambda call, push=push: push(keys[call % len(keys)], grads)
        for road, push in ((name, push), (INDEX_ADD, index_add))
    }
    return figures_of(roads, [Comparison(name, INDEX_ADD, Goal(3.0, at_most=True))], rounds)


def figures_of(
    roads: Mapping[str, Callable[[int], object]], comparisons: Sequence[Comparison], rounds: int
) -> list[Figure]:
    """A figure for every comparison, and a plain one for every road that none of them measures."""
    times = interleave(roads, rounds, dict.fromkeys(roads, CALLS) | {LOOP: LOOP_CALLS})
    compared = {asked.road for asked in comparisons}
    figures = [plain(name, seconds) for name, seconds in times.items() if name not in compared]
    return figures + [compare(times, asked) for asked in comparisons]


def work(raw: RawTables, tables: Sequence[TableRoads], rounds: int) -> None:
    """The worker's part: check, measure, print, and let the server's tables end one by one."""
    keys = key_sets()
    check_pulls(raw, tables, keys[0])
    print_figures(pull_figures(pull_roads(raw, *tables), keys, rounds))
    for table in tables:
        name = f"{table.home} home push"
        print_figures(push_figures(name, table.push, _index_add(raw), keys, rounds))
        table.stop()


def _index_add(raw: RawTables) -> Push:
    return lambda keys, grads: raw.index_add(keys, grads, RATE)


def wait_in_mpi(comm: Any) -> None:
    """Wait for all ranks without taking the core from those that measure. Collective."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.001)


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
