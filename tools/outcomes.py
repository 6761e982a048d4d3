"""What the parts of a test run gave: counts, the table, and files that no rank count ran."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.parts import MPI_FOLDERS, Part
from tools.processes import TIMED_OUT

HEADER = ("part", "interpreter", "ranks", "passed", "failed", "skipped", "seconds")


@dataclass
class Outcome:
    """One part's counts; `notes` are its failures in words, `ran` the files it really tested."""

    part: Part
    counts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    ran: set[str] = field(default_factory=set)
    not_run: str = ""


def read_tally(outcome: Outcome, tally: Path) -> None:
    """Counts the tests that the part's tally file names; one that started only has failed."""
    open_tests: dict[str, None] = {}
    lines = tally.read_text(encoding="utf-8").splitlines() if tally.exists() else []
    for line in lines:
        record = json.loads(line)
        if "started" in record:
            open_tests[record["started"]] = None
            continue
        open_tests.pop(record["test"], None)
        result = record["outcome"]
        outcome.counts[result] += 1
        if result != "skipped":
            outcome.ran.add(record["test"].partition("::")[0])
        if result == "failed":
            outcome.notes.append(f"{record['test']}: {record['reason']}")
    for test in open_tests:
        outcome.counts["failed"] += 1
        outcome.ran.add(test.partition("::")[0])
        outcome.notes.append(f"{test}: did not end")


def close(outcome: Outcome, status: int) -> None:
    """Takes the exit status into account: a part that failed has one failure at least."""
    part = outcome.part
    if not part.is_pytest:
        outcome.counts["passed" if status == 0 else "failed"] += 1
    elif sum(outcome.counts.values()) == 0:
        outcome.counts["failed"] += 1
        outcome.notes.append("no test ran")
    elif status != 0 and outcome.counts["failed"] == 0:
        outcome.counts["failed"] += 1
    if status == TIMED_OUT:
        outcome.notes.append(f"ended after {outcome.seconds:.0f} s")
    elif status != 0:
        outcome.notes.append(f"exit status {status}")


def files_without_a_test(root: Path, outcomes: Iterable[Outcome]) -> list[str]:
    """Test files of the MPI suite that ran no test at any world size."""
    ran = set().union(*(outcome.ran for outcome in outcomes))
    files = (path for folder in MPI_FOLDERS for path in (root / folder).rglob("test_*.py"))
    return sorted(name for path in files if (name := str(path.relative_to(root))) not in ran)


def table(outcomes: Sequence[Outcome]) -> str:
    """One line per part, columns aligned."""
    rows: list[tuple[str, ...]] = [HEADER]
    for outcome in outcomes:
        part, counts = outcome.part, outcome.counts
        results: tuple[str, ...]
        if outcome.not_run:
            results = ("-", "-", "-", "NOT RUN")
        else:
            numbers = [str(counts[name]) for name in ("passed", "failed", "skipped")]
            results = (*numbers, f"{outcome.seconds:.0f}")
        rows.append((part.name, part.mpi, str(part.ranks or "-"), *results))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def report(outcomes: Sequence[Outcome], untested: Sequence[str]) -> tuple[str, bool]:
    """The closing text of the run, and whether all is well."""
    total: Counter[str] = Counter()
    lines = ["", table(outcomes), ""]
    for outcome in outcomes:
        total += outcome.counts
        where = outcome.part.title
        if outcome.not_run:
            lines.append(f"NOT RUN  {where}: {outcome.not_run}")
        lines += [f"FAILED   {where}: {note}" for note in outcome.notes]
    for name in untested:
        total["failed"] += 1
        lines.append(f"FAILED   {name}: ran no test at any number of ranks")
    counts = [f"{total[name]} {name}" for name in ("passed", "failed", "skipped")]
    lines.append(", ".join(counts))
    return "\n".join(lines), total["failed"] == 0
