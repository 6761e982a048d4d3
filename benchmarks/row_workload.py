"""What the benchmarks of rows ask for: 10,000 random rows of 64 B out of 1,048,576, by any road."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.report import Comparison, Figure, Goal, compare, interleave, plain

if TYPE_CHECKING:
    from benchmarks.raw_roads import PrivateTable
    from benchmarks.table_roads import TableRoads

Pull = Callable[[np.ndarray], np.ndarray]
"""Rows of distinct keys: int64 [n] -> float32 [n, dim]."""
Push = Callable[[np.ndarray, np.ndarray], object]
"""Distinct keys int64 [n] and their gradients float32 [n, dim], applied when it returns."""

NUM_ROWS, DIM, PULLED = 1_048_576, 16, 10_000
RATE = 0.01
KEY_SETS = 16
ROUNDS, QUICK_ROUNDS = 31, 5
CALLS, LOOP_CALLS = 8, 1  # of one road in one round
TAKE, LOOP, INDEX_ADD = "numpy take", "loop of Get", "torch index_add_"


def key_sets() -> list[np.ndarray]:
    """KEY_SETS arrays of distinct random keys, int64 [PULLED]."""
    random = np.random.default_rng(0)
    return [random.choice(NUM_ROWS, PULLED, replace=False) for _ in range(KEY_SETS)]


def check_tables(tables: Sequence[TableRoads], keys: np.ndarray) -> None:
    """See that every table gives the bytes that it was filled with.

    Raises AssertionError naming the road.
    """
    for table in tables:
        name, first = f"{table.home} home pull", table.first_rows(keys)
        check_pull(name, table.pull(keys), first)
        check_pull(f"{name}, any keys", table.pull_any(keys), table.first_rows(np.sort(keys)))


def check_pull(name: str, pulled: np.ndarray, expected: np.ndarray) -> None:
    """Raise AssertionError naming the road when its bytes are not the expected ones."""
    if pulled.tobytes() != expected.tobytes():
        raise AssertionError(f"{name} gives other rows than the table holds")


def pull_figures(
    pulls: Mapping[str, Pull],
    comparisons: Sequence[Comparison],
    keys: Sequence[np.ndarray],
    rounds: int,
) -> list[Figure]:
    """Times of all roads of a pull."""
    roads = {
        name: lambda call, pull=pull: pull(keys[call % len(keys)]) for name, pull in pulls.items()
    }
    return figures_of(roads, comparisons, rounds)


def push_figures(
    table: TableRoads,
    private: PrivateTable,
    goal: Goal | None,
    keys: Sequence[np.ndarray],
    rounds: int,
) -> list[Figure]:
    """Times of a push to `table` and of torch's index_add_ on private memory."""
    name = f"{table.home} home push"
    grads = np.full((PULLED, DIM), 0.5, np.float32)
    roads = {
        name: lambda call: table.push(keys[call % len(keys)], grads),
        INDEX_ADD: lambda call: private.index_add(keys[call % len(keys)], grads, RATE),
    }
    return figures_of(roads, [Comparison(name, INDEX_ADD, goal)], rounds)


def figures_of(
    roads: Mapping[str, Callable[[int], object]], comparisons: Sequence[Comparison], rounds: int
) -> list[Figure]:
    """A figure for every comparison, and a plain one for every road that none of them measures."""
    times = interleave(roads, rounds, dict.fromkeys(roads, CALLS) | {LOOP: LOOP_CALLS})
    compared = {asked.road for asked in comparisons}
    figures = [plain(name, seconds) for name, seconds in times.items() if name not in compared]
    return figures + [compare(times, asked) for asked in comparisons]


def wait_in_mpi(comm: Any) -> None:
    """Wait for all ranks without taking the core from those that measure. Collective."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.001)
