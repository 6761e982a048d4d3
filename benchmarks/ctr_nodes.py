"""The click-through job with its server on another node: its rate over TCP against one node's.

    python -m benchmarks.ctr_nodes [--quick]

starts the two-node Slurm of tests/cluster on this machine, and on it the job of benchmarks.ctr
with one worker and one server, each on a node of its own; the same job on one node takes turns
with it.  Where there can be no such Slurm it says so in one line and measures nothing.  Both nodes
are this machine: the loopback device is faster than a network, and its work falls on the same two
cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import ctr_data, ctr_runs
from benchmarks.ctr_data import CtrData
from benchmarks.ctr_runs import Job, lags_in
from benchmarks.report import Figure, Goal, figure_of_rates, print_figures
from benchmarks.two_nodes import ENV, ROOT, two_nodes, why_not

if TYPE_CHECKING:
    from tests.cluster.slurm_cluster import SlurmCluster

ROUNDS = 3
LIMIT_S = 200.0
GOAL = Goal(0.7, at_most=False)
WAYS = {"": (), ", pull ahead": ("--pull-ahead", "1")}
ONE, TWO = "one node bf16", "two nodes bf16"


def on_two_nodes(cluster: SlurmCluster, arguments: Sequence[str], data: CtrData) -> dict[str, Any]:
    """What one worker measured whose server is on the other node. Raises RunError."""
    with tempfile.TemporaryDirectory(prefix="ctr-") as scratch:
        out = Path(scratch) / "figures.json"
        options = ["--data", str(data.directory), "--out", str(out), *arguments]
        try:
            step = cluster.srun(
                [sys.executable, "-m", "mpi4py", "-m", "benchmarks.ctr_job", *options],
                ntasks_per_node=1,
                env=ENV | {"MPIFLEET_SERVER_NUM": "1"},
                timeout=LIMIT_S,
                options=[f"--chdir={ROOT}"],
            )
        except subprocess.TimeoutExpired as late:
            raise ctr_runs.RunError(f"the job on two nodes took over {LIMIT_S:g} s") from late
        if step.returncode or not out.exists():
            raise ctr_runs.RunError(f"the job on two nodes failed: ...{step.stderr[-500:]}")
        return json.loads(out.read_text()) | {"lags": lags_in(step.stderr)}


def measure(data: CtrData, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """What every job wrote, per round; the jobs take turns."""
    results: dict[str, list[dict[str, Any]]] = {}
    with two_nodes() as cluster:
        for _ in range(rounds):
            for way, options in WAYS.items():
                arguments = ("--bf16", *options)
                one = ctr_runs.run(Job("job", arguments, ranks=2), data)
                results.setdefault(ONE + way, []).append(one)
                two = on_two_nodes(cluster, arguments, data)
                results.setdefault(TWO + way, []).append(two)
    return results


def figures_of(results: Mapping[str, Sequence[Mapping[str, Any]]], judge: bool) -> list[Figure]:
    """Rates against one node's, and where a step's time goes."""
    series = {name: [each["samples_per_s"] for each in some] for name, some in results.items()}
    goal = GOAL if judge else None
    figures = [figure_of_rates(series, TWO + way, ONE + way, goal) for way in WAYS]
    figures.append(figure_of_rates(series, f"{ONE}, pull ahead", ONE, None))
    for name, some in results.items():
        for phase in some[0]["split_ms"]:
            value = statistics.median(each["split_ms"][phase] for each in some)
            figures.append(Figure(f"{name}: {phase}", float(f"{value:.3g}"), "ms/step"))
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Run the jobs in turns and print their figures; status 1 when a goal is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ctr_nodes", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="one round of a tenth of the samples")
    quick = parser.parse_args(argv).quick
    if reason := why_not():
        print(f"ctr_nodes: not measured: {reason}", file=sys.stderr)
        return 0
    try:
        results = measure(ctr_data.prepare(0, quick), 1 if quick else ROUNDS)
    except ctr_runs.RunError as error:
        print(f"ctr_nodes: {error}", file=sys.stderr)
        return 1
    figures = figures_of(results, judge=not quick)
    print_figures(figures)
    return int(any(figure.met is False for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
