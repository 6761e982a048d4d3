"""A job told to end, or whose launcher or terminal goes away, ends and leaves nothing behind."""

from __future__ import annotations

import os
import pty
import signal
from pathlib import Path

import pytest

from tests.launch.started_job import plain_command, run_command

JOB = str(Path(__file__).parent / "jobs" / "lifeline_job.py")

pytestmark = pytest.mark.timeout(90)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_to_the_launcher_ends_the_job(start_job, name):
    number = getattr(signal, name)
    job = start_job(run_command(1, 2, JOB, "1:busy"))
    job.wait_ready(3)
    os.kill(job.process.pid, number)
    assert job.wait() == 128 + number
    assert job.leftovers() == []


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_to_bare_mpirun_ends_the_job(start_job, name):
    job = start_job(plain_command(3, JOB))
    job.wait_ready(3)
    os.kill(job.process.pid, getattr(signal, name))
    assert job.wait() != 0
    assert job.leftovers() == []


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_to_one_rank_inside_mpi_ends_the_job(start_job, name):
    job = start_job(run_command(1, 2, JOB))
    os.kill(job.wait_ready(3)[2], getattr(signal, name))
    assert job.wait() != 0
    assert job.last_line() == f"mpifleet: rank 2 (server 0) got {name}"


def test_a_killed_launcher_takes_the_job_with_it(start_job):
    job = start_job(run_command(1, 2, JOB, "1:busy"))
    job.wait_ready(3)
    os.kill(job.process.pid, signal.SIGKILL)
    job.wait()
    assert job.leftovers(10) == []


def test_a_killed_mpirun_takes_the_ranks_with_it(start_job):
    job = start_job(plain_command(3, JOB, "1:busy"))
    job.wait_ready(3)
    os.kill(job.process.pid, signal.SIGKILL)
    job.wait()
    assert job.leftovers(10) == []


def test_nothing_is_left_when_everything_is_killed_at_once(start_job):
    job = start_job(run_command(1, 2, JOB))
    job.wait_ready(3)
    pids = job.pids()
    assert len(pids) >= 5, "launcher, mpirun and three ranks"
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    job.wait()
    assert job.leftovers() == []


def test_a_closed_terminal_ends_the_job(start_job):
    master, terminal = pty.openpty()
    take_terminal = (
        "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    command = run_command(1, 2, JOB, "1:busy")
    job = start_job([command[0], "-c", take_terminal, *command], None, terminal)
    os.close(terminal)
    seen = b""
    while seen.count(b"ready ") < 3:
        seen += os.read(master, 65536)
        job.pids()
    os.close(master)
    assert job.wait() != 0
    assert job.leftovers() == []
