"""A job that is told to stop stops everywhere at once, and a new one goes on with the same bits."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from mpifleet import PREEMPTED
from tests.launch.phases import START_LIMIT_S
from tests.launch.started_job import plain_command, run_command

JOB = str(Path(__file__).parent / "jobs" / "preempted_job.py")
RUN = {
    "run": lambda *args: run_command(1, 2, JOB, *args),
    "mpirun": lambda *args: plain_command(3, JOB, *args),
    "alone": lambda *args: [sys.executable, "-u", JOB, *args],
}

pytestmark = pytest.mark.timeout(4 * START_LIMIT_S)


def found(job, what):
    """All lines of the job's output that begin with `what`, without it, in order."""
    return sorted(re.findall(rf"^{what} (.*)$", job.stdout, re.MULTILINE))


def digest(job):
    assert job.wait(START_LIMIT_S) == 0, job.output()
    (line,) = found(job, "digest")
    return line


def wait_for_steps(job):
    job.wait_until(lambda: bool(found(job, "ready")), START_LIMIT_S, "two steps")


def rank_of(job, who):
    return int(next(line.split()[0] for line in found(job, "pid") if line.endswith(who)))


CASES = {
    "run-launcher-SIGTERM": ("run", "launcher", signal.SIGTERM),
    "run-server-SIGUSR2": ("run", "server", signal.SIGUSR2),
    "mpirun-launcher-SIGUSR2": ("mpirun", "launcher", signal.SIGUSR2),
    "mpirun-worker1-SIGTERM": ("mpirun", "worker1", signal.SIGTERM),
    "alone-worker0-SIGTERM": ("alone", "worker0", signal.SIGTERM),
}


@pytest.mark.parametrize("case", CASES)
def test_preempted_and_resumed_is_uninterrupted(start_job, tmp_path, case):
    how, to, number = CASES[case]
    folder = str(tmp_path / "saved")
    expected = digest(start_job(RUN[how](str(tmp_path / "none"))))
    job = start_job(RUN[how](folder, "--pause-s", "0.1"))
    wait_for_steps(job)
    os.kill(job.process.pid if to == "launcher" else rank_of(job, to), number)
    assert job.wait(30) == PREEMPTED, job.output()
    assert job.leftovers() == []
    stopped = found(job, "stopped")
    assert [line.split()[0] for line in stopped] == (["0"] if how == "alone" else ["0", "1"])
    assert len({tuple(line.split()[1:]) for line in stopped}) == 1, "after the same step"
    if how == "run":
        assert job.last_line() == "mpifleet: preempted, can be resumed: exit status 75"
    again = start_job(RUN[how](folder))
    assert digest(again) == expected, job.output()
    assert found(again, "resumed") == stopped


@pytest.mark.parametrize("mode", ["sync", "async", "bounded", "hybrid"])
def test_workers_that_wait_for_others_stop_too(start_job, tmp_path, mode):
    """An epoch of uneven workers, which meet at its end: the signals come at any moment."""
    folder, options = str(tmp_path / "saved"), ("--mode", mode, "--uneven", "--forever")
    for delay in range(2):
        job = start_job(RUN["run"](folder, *options, "--pause-s", "0.02"))
        wait_for_steps(job)
        os.kill(rank_of(job, "server" if delay else "worker0"), signal.SIGUSR2)
        assert job.wait(30) == PREEMPTED, job.output()
        stopped = found(job, "stopped")
        assert len(stopped) == 2, job.output()
        assert len({line.split()[1] for line in stopped}) == 1, "in the same epoch"


def test_without_asking_a_signal_ends_the_job(start_job, tmp_path):
    job = start_job(RUN["run"](str(tmp_path), "--plain", "--forever"))
    wait_for_steps(job)
    os.kill(rank_of(job, "worker1"), signal.SIGTERM)
    assert job.wait(30) == 128 + signal.SIGTERM
    assert "got SIGTERM" in job.last_line()
