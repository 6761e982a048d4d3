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


def test_preempted_and_resumed_is_uninterrupted(start_job, tmp_path):
    """Told by the launcher's SIGTERM, gone on with under another launcher, in new processes."""
    folder = str(tmp_path / "saved")
    job = start_job(RUN["run"](folder, "--pause-s", "0.1"))
    wait_for_steps(job)
    os.kill(job.process.pid, signal.SIGTERM)
    assert job.wait(30) == PREEMPTED, job.output()
    assert job.last_line() == "mpifleet: preempted, can be resumed: exit status 75"
    assert job.leftovers() == []
    stopped = found(job, "stopped")
    assert [line.split()[0] for line in stopped] == ["0", "1"]
    assert len({tuple(line.split()[1:]) for line in stopped}) == 1, "after the same step"
    again, whole = start_job(RUN["mpirun"](folder)), start_job(RUN["run"](str(tmp_path / "none")))
    assert digest(again) == digest(whole), job.output()
    assert found(again, "resumed") == stopped


CASES = {
    "hybrid": ("mpirun", "launcher", signal.SIGUSR2),
    "async": ("run", "server", signal.SIGTERM),
}


@pytest.mark.parametrize("mode", CASES)
def test_workers_that_wait_for_others_stop_too(start_job, tmp_path, mode):
    """Worker 1 meets worker 0 at the end of each epoch, and waits for it there most of the time."""
    how, to, number = CASES[mode]
    options = ("--mode", mode, "--uneven", "--forever", "--pause-s", "0.02")
    job = start_job(RUN[how](str(tmp_path / "saved"), *options))
    wait_for_steps(job)
    os.kill(job.process.pid if to == "launcher" else rank_of(job, to), number)
    assert job.wait(30) == PREEMPTED, job.output()
    stopped = found(job, "stopped")
    assert len(stopped) == 2, job.output()
    assert len({line.split()[1] for line in stopped}) == 1, "in the same epoch"


def test_a_single_process_stops_and_goes_on(start_job, tmp_path):
    folder = str(tmp_path / "saved")
    job = start_job(RUN["alone"](folder, "--forever", "--pause-s", "0.02"))
    wait_for_steps(job)
    os.kill(job.process.pid, signal.SIGTERM)
    assert job.wait(30) == PREEMPTED, job.output()
    again = start_job(RUN["alone"](folder))
    digest(again)
    assert found(again, "resumed") == found(job, "stopped")
