"""Held-out AUC of the click-through job after one epoch, by mode, beside one process and Paddle.

    python -m benchmarks.ctr_auc [--quick]

Three seeds, each with samples and first weights of its own.  A difference is that of the seed with
the largest one; later epochs are not looked at, they memorise rare ids.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import ctr_data, ctr_runs
from benchmarks.ctr_runs import Job, RunError, has_peers
from benchmarks.report import Figure, Goal, print_figures

SEEDS = (0, 1, 2)
BF16 = "--bf16"
# A joint batch of 1,000 samples, as one process has it.
HALF = ("--batch-size", "500")
JOBS = {
    "one process bf16": Job("job", (BF16,)),
    "one process fp32": Job("job"),
    "plain torch fp32": Job("torch"),
    "one process bf16, batch 2000": Job("job", (BF16, "--batch-size", "2000")),
    "async 1 worker bf16": Job("job", (BF16,), ranks=2),
    "async 1 worker fp32": Job("job", ranks=2),
    "async 1 worker bf16, pull ahead": Job("job", (BF16, "--pull-ahead", "1"), ranks=2),
    "sync 2 workers bf16, joint batch 1000": Job("job", (BF16, "--mode", "sync", *HALF), ranks=3),
    "sync 2 workers bf16": Job("job", (BF16, "--mode", "sync"), ranks=3),
    "hybrid 2 workers bf16": Job("job", (BF16, "--mode", "hybrid"), ranks=3),
    "SSP 2 workers bf16": Job("job", (BF16, "--mode", "ssp"), ranks=3),
    "async 2 workers bf16": Job("job", (BF16,), ranks=3),
    "async 2 workers fp32": Job("job", ranks=3),
    "async 2 workers bf16, pull ahead": Job("job", (BF16, "--pull-ahead", "1"), ranks=3),
    "async 1 worker of 2 threads bf16": Job("job", (BF16, "--threads", "2"), ranks=2),
    "one process of 2 threads bf16": Job("job", (BF16, "--threads", "2")),
    "Paddle async 1 thread fp32": Job("paddle"),
    "Paddle one process fp32": Job("paddle alone", ("--alone",)),
}
TEACHER = "the teacher itself"


@dataclass(frozen=True)
class Asked:
    """Two modes whose AUC is compared, and how far apart they may be."""

    name: str
    against: str
    goal: Goal | None = None


def _at_most(bound: float) -> Goal:
    return Goal(bound, at_most=True)


ASKED = (
    Asked("async 1 worker bf16", "one process bf16", _at_most(0.001)),
    Asked("async 1 worker fp32", "one process fp32", _at_most(0.001)),
    Asked("async 1 worker bf16, pull ahead", "one process bf16"),
    Asked("sync 2 workers bf16, joint batch 1000", "one process bf16", _at_most(0.001)),
    Asked("sync 2 workers bf16", "one process bf16, batch 2000", _at_most(0.001)),
    Asked("hybrid 2 workers bf16", "sync 2 workers bf16", _at_most(0.002)),
    Asked("SSP 2 workers bf16", "one process bf16"),
    Asked("async 2 workers bf16", "one process bf16"),
    Asked("async 2 workers fp32", "one process fp32"),
    Asked("async 2 workers bf16, pull ahead", "one process bf16"),
    Asked("async 1 worker of 2 threads bf16", "one process bf16"),
    Asked("one process of 2 threads bf16", "one process bf16"),
    Asked("one process bf16", "one process fp32"),
    Asked("plain torch fp32", "one process fp32"),
    Asked("Paddle async 1 thread fp32", "one process fp32"),
    Asked("Paddle one process fp32", "one process fp32"),
    Asked("one process fp32", TEACHER),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all modes with all seeds and print their figures; status 1 when a goal is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ctr_auc", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="one seed, a tenth of the samples")
    quick = parser.parse_args(argv).quick
    jobs = {name: job for name, job in JOBS.items() if has_peers() or not job.is_peer}
    areas: dict[str, list[float]] = {}
    for seed in SEEDS[:1] if quick else SEEDS:
        for name, result in of_seed(jobs, seed, quick).items():
            areas.setdefault(name, []).append(result["auc"])
            print_figures(seed_figures(f"{name}, seed {seed}", result))
    figures = compared(areas, judge=not quick)
    print_figures(figures)
    return int(any(figure.met is False for figure in figures))


def seed_figures(name: str, result: Mapping[str, Any]) -> list[Figure]:
    """AUC of one job, and how many updates its pushes had missed."""
    lags = result.get("lags", {}).items()
    area = Figure(name, float(f"{result['auc']:.5f}"), "AUC")
    return [area, *(Figure(f"{name}: lag of {what}", lag, "updates") for what, lag in lags)]


def of_seed(jobs: Mapping[str, Job], seed: int, quick: bool) -> dict[str, dict[str, Any]]:
    """What every job wrote with one seed; one that fails is left out."""
    data = ctr_data.prepare(seed, quick)
    results: dict[str, dict[str, Any]] = {TEACHER: {"auc": data.teacher_auc(seed)}}
    for name, job in jobs.items():
        job = replace(job, arguments=(*job.arguments, "--auc", "--seed", str(seed)))
        try:
            results[name] = ctr_runs.run(job, data, quiet=False)
            said = f"{results[name]['auc']:.5f}, lags {results[name]['lags']}"
            print(f"ctr_auc: seed {seed}: {name}: {said}", file=sys.stderr, flush=True)
        except RunError as error:
            print(f"ctr_auc: {name}: {error}", file=sys.stderr, flush=True)
    return results


def compared(areas: Mapping[str, Sequence[float]], judge: bool = True) -> list[Figure]:
    """One figure per comparison: median AUC, and as ratio the largest difference of a seed.

    judge: whether goals count.
    """
    figures = []
    for asked in ASKED:
        mine, theirs = areas.get(asked.name, []), areas.get(asked.against, [])
        if not mine or len(mine) != len(theirs):
            continue
        most = max((m - t for m, t in zip(mine, theirs, strict=True)), key=abs)
        goal = asked.goal if judge else None
        figures.append(
            Figure(
                f"{asked.name}, difference",
                float(f"{statistics.median(mine):.5f}"),
                "AUC",
                asked.against,
                float(f"{most:.2g}"),
                str(goal) if goal else None,
                goal.met_by(abs(most)) if goal else None,
            )
        )
    return figures


if __name__ == "__main__":
    sys.exit(main())
