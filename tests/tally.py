"""pytest plugin that writes each outcome to a file as it happens: a run that dies is counted too.

MPIFLEET_TEST_TALLY names the file; one JSON object a line: {"started": test} and
{"test": id, "outcome": "passed" | "failed" | "skipped", "seconds": s, "reason": text}.
Of the ranks of an MPI job rank 0 writes.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

_RANK_NAMES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")


def pytest_configure(config: pytest.Config) -> None:
    rank = next((os.environ[name] for name in _RANK_NAMES if name in os.environ), "0")
    if rank == "0" and "MPIFLEET_TEST_TALLY" in os.environ:
        config.pluginmanager.register(Tally(os.environ["MPIFLEET_TEST_TALLY"]), "mpifleet-tally")


class Tally:
    """Collects a test's phases and writes its outcome when the last of them has ended."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.outcome = "passed"
        self.reason = ""
        self.seconds = 0.0

    def write(self, **record: Any) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.outcome, self.reason, self.seconds = "passed", "", 0.0
        self.write(started=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds += report.duration
        if report.failed or (report.skipped and self.outcome != "failed"):
            self.outcome, self.reason = report.outcome, reason_of(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.write(test=nodeid, outcome=self.outcome, seconds=self.seconds, reason=self.reason)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        # A module that does not import, or that is skipped as a whole.
        if not report.passed:
            self.write(
                test=report.nodeid, outcome=report.outcome, seconds=0, reason=reason_of(report)
            )


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The last line of what the report says."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    return (report.longreprtext.strip().splitlines() or [""])[-1]
