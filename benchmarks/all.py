"""All benchmarks, one after another: their JSON lines, and on request the rows of a table.

    python -m benchmarks.all [--quick] [--markdown]

Exit status 1 when a benchmark failed or missed a goal, with their names last on stderr. Figures
mean something on a quiet machine only; --quick shows that everything runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.launch import run_command
from benchmarks.report import figures_of_lines, missed

PS = ("ps_rows", "ps_idle", "ps_memory", "ps_lanes", "ps_gaps", "ps_served")
BENCHMARKS = (*PS, "checkpoint", "ctr", "ctr_nodes", "ctr_auc", "ctr_cost")
LIMIT_S = 3600.0
HEAD = ("| figure | measured | against | ratio | goal | met |", "|---|---|---|---|---|---|")


def run_all(quick: bool) -> tuple[dict[str, list[str]], list[str]]:
    """Run every benchmark, passing its output on.

    Returns the lines of each and, in words, what failed or was missed.
    """
    printed, wrong = {}, []
    for name in BENCHMARKS:
        command = [sys.executable, "-m", f"benchmarks.{name}", *(["--quick"] if quick else [])]
        status, printed[name] = run_command(command, LIMIT_S)
        goals = missed(printed[name])
        if goals:
            wrong.append(f"{name} missed {', '.join(goals)}")
        elif status:
            wrong.append(f"{name} ended with status {status}")
    return printed, wrong


def table_row(figure: dict[str, Any]) -> str:
    """One row of the Markdown table of figures."""
    met = {True: "yes", False: "no", None: ""}[figure["met"]]
    measured = f"{figure['value']:,.6g} {figure['unit']}"
    rest = (figure["against"], figure["ratio"], figure["goal"])
    cells = [figure["name"], measured, *("" if cell is None else str(cell) for cell in rest), met]
    return f"| {' | '.join(cells)} |"


def table_rows(printed: dict[str, list[str]]) -> list[str]:
    """The Markdown tables of all benchmarks, one under the name of each that printed figures."""
    rows: list[str] = []
    for name, lines in printed.items():
        if figures := figures_of_lines(lines):
            rows += ["", f"`{name}`", "", *HEAD, *map(table_row, figures)]
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run them, and say what failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.all", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="each in its quick form")
    parser.add_argument("--markdown", action="store_true", help="at the end, tables of all figures")
    chosen = parser.parse_args(argv)
    printed, wrong = run_all(chosen.quick)
    if chosen.markdown:
        print("\n".join(table_rows(printed)), flush=True)
    for words in wrong:
        print(f"benchmarks: {words}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
