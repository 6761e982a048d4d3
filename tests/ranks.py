"""pytest on every rank of one MPI job: ranks agree on each outcome, rank 0 reports.

Registered by the conftest of each folder whose tests run under ``mpirun``.  After a test's call and
again after its teardown the ranks exchange their outcomes, so that a failure on one rank fails the
test on all.  A test that does not end is reported with the stacks of all threads, and the job ends.

Markers: ``ranks(2, 4)`` runs a test at these world sizes only; ``timeout(seconds)`` sets the limit
of a test (DEFAULT_LIMIT_S otherwise).
MPIFLEET_TEST_RANKS, when set, is the world size the caller expects.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _pytest.config import create_terminal_writer

from mpifleet import mpi

MPI: Any = mpi.load_mpi()
WORLD = MPI.COMM_WORLD
DEFAULT_LIMIT_S = 60.0
GRACE_S = 5.0
FOLDERS: set[Path] = set()
"""The folders whose tests run on all ranks: their conftest calls register()."""
PASSED, SKIPPED, FAILED = range(3)

limit_key = pytest.StashKey[float]()
started_key = pytest.StashKey[float]()
failed_key = pytest.StashKey[bool]()
outcomes_key = pytest.StashKey["Outcomes"]()
stderr_key = pytest.StashKey[int]()


def register(config: pytest.Config, folder: Path) -> None:
    """Makes the tests below `folder` run on all ranks. Collective."""
    FOLDERS.add(folder)
    plugin = sys.modules[__name__]
    if not config.pluginmanager.is_registered(plugin):
        config.pluginmanager.register(plugin, "mpifleet-ranks")


class Outcomes:
    """Exchange of outcomes on a communicator that no test uses."""

    def __init__(self) -> None:
        self.comm = WORLD.Dup()

    def exchange(self, mine: int, limit_s: float) -> list[int] | None:
        """Every rank's outcome, in rank order, or None when some rank did not come in time.

        Collective.
        """
        theirs = np.empty(self.comm.size, np.int64)
        deadline = time.monotonic() + limit_s
        with mpi.serial:
            request = self.comm.Iallgather(np.array([mine], np.int64), theirs)
        while True:
            with mpi.serial:
                if request.Test():
                    return [int(outcome) for outcome in theirs]
            if time.monotonic() > deadline:
                return None
            time.sleep(0.0005)


class Watchdog:
    """Ends this process, stacks first, when the test has not ended `limit_s` after the start.

    A Python timer names rank and test; faulthandler's own thread follows GRACE_S later, for a test
    that never gives the interpreter back.
    """

    def __init__(self, nodeid: str, limit_s: float, stderr: int) -> None:
        self._timer = threading.Timer(limit_s, _end_with_stacks, (nodeid, limit_s, stderr))
        self._timer.daemon = True
        self._timer.start()
        faulthandler.dump_traceback_later(limit_s + GRACE_S, exit=True, file=stderr)

    def cancel(self) -> None:
        """The test has ended."""
        self._timer.cancel()
        faulthandler.cancel_dump_traceback_later()


def _end_with_stacks(nodeid: str, limit_s: float, stderr: int) -> None:
    say(stderr, f"{nodeid} has not ended after {limit_s:g} s; all stacks follow")
    faulthandler.dump_traceback(file=stderr, all_threads=True)
    os._exit(1)


def say(stderr: int, text: str) -> None:
    """Writes `text` to the terminal's stderr, each line after this rank's number."""
    lines = "".join(f"rank {WORLD.rank}: {line}\n" for line in text.splitlines())
    os.write(stderr, lines.encode())


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ranks(*sizes): run at these world sizes only")
    expected = int(os.environ.get("MPIFLEET_TEST_RANKS", WORLD.size))
    if expected != WORLD.size:
        pytest.exit(
            f"{expected} ranks were started but MPI sees {WORLD.size}: "
            f"mpirun and mpi4py's {mpi.library(MPI)} are not the same MPI",
            returncode=4,
        )
    config.stash[outcomes_key] = Outcomes()
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        config.stash[stderr_key] = os.dup(2)
    if WORLD.rank != 0:
        config.option.xmlpath = None
        for name in ("lfplugin", "nfplugin"):
            config.pluginmanager.unregister(name=name)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    reporter: Any = session.config.pluginmanager.getplugin("terminalreporter")
    if WORLD.rank != 0 and reporter is not None:
        # The reporter must stay, other plugins call it; it writes to nowhere.
        nowhere = open(os.devnull, "w")  # noqa: SIM115 - it lives as long as the process
        reporter._tw = create_terminal_writer(session.config, nowhere)


def pytest_report_header() -> str:
    return f"MPI: {mpi.library(MPI)}, rank {WORLD.rank} of {WORLD.size}, {mpi.thread_level(MPI)}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in filter(ours, items):
        marker = item.get_closest_marker("timeout")
        item.stash[limit_key] = float(marker.args[0]) if marker else DEFAULT_LIMIT_S
        # Our watchdog replaces the plugin's, whose signal cannot interrupt a call into MPI.
        item.add_marker(pytest.mark.timeout(0), append=False)
        sizes = item.get_closest_marker("ranks")
        if sizes and WORLD.size not in sizes.args:
            reason = f"runs at {' or '.join(map(str, sizes.args))} ranks, not at {WORLD.size}"
            item.add_marker(pytest.mark.skip(reason=reason))


def ours(item: pytest.Item) -> bool:
    """Whether the test stands in a folder whose tests run on all ranks."""
    return not FOLDERS.isdisjoint(item.path.parents)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if not ours(item):
        return (yield)
    item.stash[started_key] = time.monotonic()
    item.stash[failed_key] = False
    watchdog = Watchdog(item.nodeid, item.stash[limit_key], item.config.stash[stderr_key])
    try:
        return (yield)
    finally:
        watchdog.cancel()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    # Every rank comes here once with its outcome (of the call, or of a setup that did not pass)
    # and once with its teardown.
    last_of_two = report.when == "teardown"
    if ours(item) and (last_of_two or report.when == "call" or not report.passed):
        agree(item, report)
    return report


def agree(item: pytest.Item, report: pytest.TestReport) -> None:
    """Makes `report` a failure when the test failed on another rank. Collective."""
    stderr = item.config.stash[stderr_key]
    mine = {"passed": PASSED, "skipped": SKIPPED, "failed": FAILED}[report.outcome]
    if mine == FAILED and WORLD.size > 1:
        # At once, on rank 0 too: its report comes at the end, which a later hang may prevent.
        say(stderr, f"FAILED {item.nodeid} ({report.when})\n{report.longreprtext}")
    left_s = item.stash[started_key] + item.stash[limit_key] + GRACE_S - time.monotonic()
    outcomes = item.config.stash[outcomes_key].exchange(mine, max(left_s, GRACE_S))
    if outcomes is None:
        say(
            stderr,
            f"{item.nodeid} {report.outcome} here, but some rank did not reach its end in time\n"
            f"{report.longreprtext}",
        )
        os._exit(1)
    failed = [rank for rank, outcome in enumerate(outcomes) if outcome == FAILED]
    item.stash[failed_key] = item.stash[failed_key] or bool(failed)
    if failed and mine != FAILED:
        report.outcome = "failed"
        report.longrepr = f"failed on ranks {failed} (see their messages); {report.outcome} here"


def pytest_sessionfinish(session: pytest.Session) -> None:
    # Rank 0 speaks for all: the ranks agree, and one non-zero status is enough for the launcher.
    if WORLD.rank != 0 and session.exitstatus == pytest.ExitCode.TESTS_FAILED:
        session.exitstatus = pytest.ExitCode.OK


@pytest.fixture
def comm(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A duplicate of the world communicator, for this test alone. Collective."""
    with mpi.serial:
        duplicate = WORLD.Dup()
    yield duplicate
    # After a failure the ranks may stand at different places: nothing collective then.
    if not request.node.stash[failed_key]:
        with mpi.serial:
            duplicate.Free()


@pytest.fixture
def shared_tmp_path(comm: Any, tmp_path: Path) -> Path:
    """Rank 0's temporary folder, on every rank. Collective."""
    with mpi.serial:
        return Path(comm.bcast(str(tmp_path)))
