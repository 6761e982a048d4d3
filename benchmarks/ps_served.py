"""Pull and push of rows between two nodes: what a worker waits for when no server is on its node.

    python -m benchmarks.ps_served [--quick]

starts the two-node Slurm of tests/cluster on this machine and on it a job of one worker and one
server, each on a node of its own; where there can be no such Slurm it says so in one line and
measures nothing. The rows are those of ps_rows. In the node home the server gathers them into the
worker's mailbox and the worker Gets them; in the world home the worker reads them one-sided, over
Open MPI 4's osc/pt2pt. A push lasts until the table's version shows it applied. The two nodes
share this machine's cores and the loopback device, so the figures have no goals.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.launch import is_launched
from benchmarks.program import join
from benchmarks.report import Comparison, print_figures
from benchmarks.row_workload import (
    DIM,
    NUM_ROWS,
    QUICK_ROUNDS,
    RATE,
    ROUNDS,
    TAKE,
    check_tables,
    key_sets,
    pull_figures,
    push_figures,
    wait_in_mpi,
)
from benchmarks.two_nodes import ENV, ROOT, two_nodes, why_not

if TYPE_CHECKING:
    from benchmarks.table_roads import TableRoads

NUM_RANKS = 2
LIMIT_S = 300.0
PULL_COMPARISONS = [
    Comparison("node home pull, served", TAKE),
    Comparison("world home pull, far", TAKE),
]


def work(tables: Sequence[TableRoads], rounds: int) -> None:
    """The worker's part: check, measure, print, and let the server's tables end one by one."""
    from benchmarks.raw_roads import PrivateTable

    private, keys = PrivateTable(NUM_ROWS, DIM), key_sets()
    check_tables(tables, keys[0])
    names = [asked.road for asked in PULL_COMPARISONS]
    pulls = {name: table.pull for name, table in zip(names, tables, strict=True)}
    pulls[TAKE] = private.take
    print_figures(pull_figures(pulls, PULL_COMPARISONS, keys, rounds))
    for table in tables:
        print_figures(push_figures(table, private, None, keys, rounds))
        table.stop()


def measure(rounds: int) -> None:
    """One rank's part of the job. Collective."""
    from benchmarks.table_roads import TableRoads
    from mpifleet.roles import Role

    mpi, roles = join("ps_served")
    if roles.world.size != NUM_RANKS or roles.one_node:
        raise SystemExit(f"ps_served runs on one rank on each of {NUM_RANKS} nodes")
    tables = [TableRoads(mpi, roles, home, NUM_ROWS, DIM, RATE) for home in ("node", "world")]
    if roles.role is Role.WORKER:
        work(tables, rounds)
    else:
        for table in tables:  # serving one, a server answers reads of the other too
            table.serve()
    wait_in_mpi(roles.world)
    for table in tables:
        table.free()


def run_on_two_nodes(arguments: Sequence[str]) -> int:
    """Start the cluster, run this module on both its nodes, print what it printed; its status."""
    with two_nodes() as cluster:
        step = cluster.srun(
            [sys.executable, "-m", "mpi4py", "-m", "benchmarks.ps_served", *arguments],
            ntasks_per_node=1,
            env=ENV,
            timeout=LIMIT_S,
            options=[f"--chdir={ROOT}"],
        )
    print(step.stdout, end="", flush=True)
    print(step.stderr, end="", file=sys.stderr)
    return step.returncode


def main(argv: Sequence[str] | None = None) -> int:
    """Measure here when a launcher started us, else start the nodes and the job that does."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ps_served", description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds")
    chosen = parser.parse_args(argv)
    if is_launched():
        measure(QUICK_ROUNDS if chosen.quick else ROUNDS)
        return 0
    if reason := why_not():
        print(f"ps_served: not measured: {reason}", file=sys.stderr)
        return 0
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        return run_on_two_nodes(arguments)
    except subprocess.TimeoutExpired as late:
        print(late.stderr or "", end="", file=sys.stderr)
        print(f"ps_served: the job had not ended after {LIMIT_S:g} s", file=sys.stderr)
        return os.EX_UNAVAILABLE


if __name__ == "__main__":
    sys.exit(main())
