"""What a step of workers without a model costs: by table size, row width, keys and workers.

    python -m benchmarks.ctr_cost [--quick] [--plot docs/ctr_cost.png]

A step sorts and deduplicates its keys, pulls their rows, pushes a gradient for each and one for
431,202 dense parameters, and pulls these: a click-through step without forward and backward.  One
server, async, adam, keys drawn uniformly from the table.  One thing is varied at a time; the others
stay at a table of 1,000,001 rows of 16, 26,000 keys per step and 2 workers.  The figure needs
matplotlib.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.launch import is_launched, run_job
from benchmarks.program import join
from benchmarks.report import Figure, figures_of_lines, print_figures

if TYPE_CHECKING:
    from benchmarks.ctr_tables import CtrTables

DENSE_SIZE = 431_202
SETS = 8  # of keys, used in turn


@dataclass(frozen=True)
class Setting:
    """One place on the curves."""

    rows: int = 1_000_001
    dim: int = 16
    keys: int = 26_000
    workers: int = 2

    def __str__(self) -> str:
        return " ".join(f"{name} {value}" for name, value in asdict(self).items())


BASE = Setting()
VARIED = {
    "rows": [100_000, 1_000_001, 5_000_000, 20_000_000],
    "dim": [8, 16, 64],
    "keys": [2_600, 26_000, 104_000],
    "workers": [1, 2, 3, 4],
}
LABELS = {
    "rows": "rows of the table",
    "dim": "float32 per row",
    "keys": "keys per step and worker",
    "workers": "workers",
}


def settings(quick: bool) -> list[Setting]:
    """Every setting once."""
    if quick:
        return [replace(BASE, rows=100_000, workers=workers) for workers in (1, 2)]
    varied = [replace(BASE, **{name: v}) for name, values in VARIED.items() for v in values]
    return list(dict.fromkeys(varied))


def measure(mine: Sequence[Setting], quick: bool) -> None:
    """One rank's part of a job; worker 0 prints. Collective."""
    from benchmarks.ctr_tables import CtrTables
    from mpifleet.roles import Role

    mpi, roles = join("ctr_cost")
    for setting in mine:
        table = CtrTables(mpi, roles, False, setting.rows, setting.dim, DENSE_SIZE)
        seconds = 0.0
        if roles.role is Role.SERVER:
            table.serve()
        else:
            seconds = step_seconds(table, setting, roles.index, 20 if quick else 100)
        slowest = np.array([seconds])
        roles.world.Allreduce(mpi.IN_PLACE, slowest, mpi.MAX)
        if roles.role is Role.WORKER and roles.index == 0:
            print_figures(figures(setting, float(slowest[0])))
        table.free()


def step_seconds(table: CtrTables, setting: Setting, worker: int, steps: int) -> float:
    """Seconds per step of one worker, the wait for the end of its pushes included."""
    random = np.random.default_rng(worker)
    keys = [random.integers(setting.rows, size=setting.keys) for _ in range(SETS)]
    for step in range(SETS):
        table.step(keys[step])
    start_s = time.perf_counter()
    for step in range(steps):
        table.step(keys[step % SETS])
    table.stop()
    return (time.perf_counter() - start_s) / steps


def figures(setting: Setting, seconds: float) -> list[Figure]:
    """Step time of one worker, and looked-up rows per second of all."""
    rate = setting.workers * setting.keys / seconds
    return [
        Figure(f"step: {setting}", float(f"{1e3 * seconds:.4g}"), "ms"),
        Figure(f"rows: {setting}", float(f"{rate:.4g}"), "rows/s"),
    ]


def plot(lines: Sequence[str], path: Path) -> None:
    """One panel per varied thing: step time on the left axis, rows/s on the right."""
    from matplotlib.figure import Figure as Drawing

    values = {figure["name"]: figure["value"] for figure in figures_of_lines(lines)}
    drawing = Drawing(figsize=(13, 3.4), layout="constrained")
    for panel, (name, places) in zip(drawing.subplots(1, len(VARIED)), VARIED.items(), strict=True):
        at = [str(replace(BASE, **{name: place})) for place in places]
        panel.plot(places, [values[f"step: {s}"] for s in at], "o-", color="tab:blue")
        panel.set(xlabel=LABELS[name], ylabel="step, ms", ylim=(0, None))
        panel.yaxis.label.set_color("tab:blue")
        rates = panel.twinx()
        rates.plot(places, [values[f"rows: {s}"] / 1e6 for s in at], "s--", color="tab:orange")
        rates.set(ylabel="million rows/s, all workers", ylim=(0, None))
        rates.yaxis.label.set_color("tab:orange")
        if name in ("rows", "keys"):
            panel.set_xscale("log")
        else:
            panel.set_xticks(places)
    drawing.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure here when a launcher started us, else start a job per number of workers."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ctr_cost", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two settings, few steps")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curves there")
    parser.add_argument("--settings", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if is_launched():
        measure([Setting(**fields) for fields in options.settings], options.quick)
        return 0
    status, lines = 0, []
    wanted = settings(options.quick)
    for workers in sorted({setting.workers for setting in wanted}):
        mine = [asdict(setting) for setting in wanted if setting.workers == workers]
        arguments = ["--settings", json.dumps(mine), *(["--quick"] if options.quick else [])]
        ended, printed = run_job("benchmarks.ctr_cost", workers + 1, arguments)
        status, lines = status or ended, lines + printed
    if options.plot and not status:
        plot(lines, options.plot)
    return status


if __name__ == "__main__":
    sys.exit(main())
