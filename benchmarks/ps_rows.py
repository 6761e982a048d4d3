"""Pull and push of rows: the package's tables against numpy, torch and a loop of Gets.

    python -m benchmarks.ps_rows [--quick]

starts a job of one worker and one server. Pulls are of 10,000 unique rows of 64 B out of 1,048,576,
another random set in every call; torch runs on one thread. Exit status 1 when a goal is missed;
a job that the user started (mpirun -n 2 ...) only prints.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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

Pull = Callable[[np.ndarray], np.ndarray]
"""Rows of unique keys: int64 [n] -> float32 [n, dim]."""
Push = Callable[[np.ndarray, np.ndarray], object]
"""Keys int64 [n] and their gradients float32 [n, dim], applied when it returns."""

NUM_RANKS, WORKER, SERVER = 2, 0, 1
NUM_ROWS, DIM, PULLED = 1_048_576, 16, 10_000
RATE = 0.01
KEY_SETS = 16
ROUNDS, QUICK_ROUNDS = 31, 5
CALLS = {"loop of Get": 1}  # in a round; every other road:
CALLS_OTHERWISE = 8

PULL_COMPARISONS = [
    Comparison("raw load", "numpy take", Goal(2.0, at_most=True)),
    Comparison("raw load", "loop of Get", Goal(20.0, at_most=False), speedup=True),
    Comparison("raw indexed Get", "numpy take", Goal(3.2, at_most=True)),
    Comparison("raw indexed Get", "loop of Get", Goal(10.0, at_most=False), speedup=True),
]
PUSH_COMPARISONS: list[Comparison] = []


def key_sets() -> list[np.ndarray]:
    """KEY_SETS arrays of unique random keys, int64 [PULLED]."""
    random = np.random.default_rng(0)
    return [random.choice(NUM_ROWS, PULLED, replace=False) for _ in range(KEY_SETS)]


def pull_figures(
    pulls: Mapping[str, Pull],
    keys: Sequence[np.ndarray],
    expected: Callable[[np.ndarray], np.ndarray],
    rounds: int,
) -> list[Figure]:
    """Times of all roads of a pull, after each was seen to give the expected bytes."""
    for name, pull in pulls.items():
        if pull(keys[0]).tobytes() != expected(keys[0]).tobytes():
            raise AssertionError(f"{name} pulled other rows than the table holds")
    roads = {
        name: lambda call, pull=pull: pull(keys[call % len(keys)]) for name, pull in pulls.items()
    }
    return figures_of(roads, PULL_COMPARISONS, rounds)


def push_figures(
    pushes: Mapping[str, Push],
    keys: Sequence[np.ndarray],
    rounds: int,
) -> list[Figure]:
    """Times of all roads of a push: each returns when its update stands in the table."""
    grads = np.full((PULLED, DIM), 0.5, np.float32)
    roads = {
        name: lambda call, push=push: push(keys[call % len(keys)], grads)
        for name, push in pushes.items()
    }
    return figures_of(roads, PUSH_COMPARISONS, rounds)


def figures_of(
    roads: Mapping[str, Callable[[int], object]], comparisons: Sequence[Comparison], rounds: int
) -> list[Figure]:
    """A figure for every comparison, and a plain one for every road none of them measures."""
    times = interleave(roads, rounds, dict.fromkeys(roads, CALLS_OTHERWISE) | CALLS)
    compared = {asked.road for asked in comparisons}
    figures = [plain(name, seconds) for name, seconds in times.items() if name not in compared]
    return figures + [compare(times, asked) for asked in comparisons]


def wait_in_mpi(comm: Any) -> None:
    """Wait for all ranks without taking the core from those that measure. Collective."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.001)


def measure(rounds: int) -> None:
    """The work of one rank; the worker prints the figures. Collective."""
    import torch

    from benchmarks.raw_roads import RawTables, rows_of
    from mpifleet.mpi import load_mpi

    torch.set_num_threads(1)
    mpi = load_mpi()
    comm = mpi.COMM_WORLD.Dup()
    if comm.size != NUM_RANKS:
        raise SystemExit(f"ps_rows runs on {NUM_RANKS} ranks, not on {comm.size}")
    tables = RawTables(mpi, comm, NUM_ROWS, DIM, SERVER)
    if comm.rank == WORKER:
        keys = key_sets()
        figures = pull_figures(tables.pulls(), keys, lambda k: rows_of(k, DIM), rounds)
        pushes = {"torch index_add_": lambda k, grads: tables.index_add(k, grads, RATE)}
        print_figures(figures + push_figures(pushes, keys, rounds))
    wait_in_mpi(comm)
    tables.free()
    comm.Free()


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
