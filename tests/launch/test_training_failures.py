"""A training job in which something goes wrong ends soon, non-zero, and says who and what."""

from __future__ import annotations

import os
import re
import signal
import socket
import time

import pytest

from tests.launch.phases import CTR_JOB, START_LIMIT_S, Phases
from tests.launch.started_job import run_command

HOST = socket.gethostname()
LIMIT_S = 10.0
ROLES = ["worker 0", "worker 1", "server 0"]
FAILED = r"rank \d \(.*\) failed( at exit)?"
ENDLESS = ("--steps", "100000", "--pause-s", "0.005")

pytestmark = pytest.mark.timeout(START_LIMIT_S + 60)


def train(*arguments: str) -> list[str]:
    """`mpifleet run` of a small training job with one server and two workers."""
    return run_command(1, 2, CTR_JOB, *arguments)


def test_an_exception_in_a_step_ends_the_job(start_job, tmp_path):
    phases = Phases(tmp_path / "phases")
    job = start_job(train(*ENDLESS, "worker1:raise@6"), phases.environment)
    phases.wait(job, 1, "push", 6)
    began_s = time.monotonic()
    assert job.wait(LIMIT_S) == 1
    assert time.monotonic() - began_s < LIMIT_S
    assert "Traceback" in job.stderr
    assert "in misbehave" in job.stderr
    words = "mpifleet: rank 1 (worker 1) failed: ValueError: no such thing in step 6"
    assert job.last_line() == words


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_nan_ends_the_job_in_the_servers_loop(start_job, tmp_path, mode):
    phases = Phases(tmp_path / "phases")
    job = start_job(train("--mode", mode, *ENDLESS, "worker1:nan@6"), phases.environment)
    phases.wait(job, 1, "push", 7)
    assert job.wait(LIMIT_S) == 1
    assert "Traceback" in job.stderr
    said = job.last_line()
    assert said.startswith("mpifleet: rank 2 (server 0) failed: NonFiniteGradient: "), said
    assert "worker 1" in said
    assert "step 7" in said, "steps are counted from 1"
    assert re.search("dense0|clicks", said), "the table"


@pytest.mark.parametrize(
    ("leaver", "status", "words"),
    [
        ("worker1:exit3@5", 3, "rank 1 (worker 1) left with exit status 3"),
        ("worker1:leave", 1, rf"{FAILED}: ConfigError: .*rank 1 \(worker 1\) has no"),
        ("server0:leave", 1, rf"{FAILED}: ConfigError: .*rank 2 \(server 0\) has no"),
    ],
)
def test_who_leaves_in_the_middle_is_named(start_job, leaver, status, words):
    job = start_job(train(*ENDLESS, leaver))
    assert job.wait(START_LIMIT_S) == status
    pattern = words if "\\" in words else re.escape(words)
    assert re.fullmatch(f"mpifleet: {pattern}", job.last_line()), job.output()


@pytest.mark.parametrize("rank", [1, 2])
def test_a_frozen_rank_of_a_training_job_is_reported_then_ended(start_job, tmp_path, rank):
    phases = Phases(tmp_path / "phases")
    job = start_job(train(*ENDLESS, "--stall", "2", "5"), phases.environment)
    phases.wait(job, 0, "push", 3)
    phases.wait(job, 1, "push", 3)
    os.kill(phases.of(rank)[0].pid, signal.SIGSTOP)
    began_s = time.monotonic()
    who = f"rank {rank} ({ROLES[rank]}) on {HOST}"
    job.wait_until(lambda: "no sign of life" in job.stderr, 5, "the silence is reported")
    assert who in next(line for line in job.stderr.splitlines() if "no sign of life" in line)
    assert job.wait(LIMIT_S) != 0
    assert time.monotonic() - began_s > 3.0
    # Not "worker 0 gave up": those who wait for the frozen rank must not be the ones blamed.
    assert job.last_line().startswith(f"mpifleet: {who} silent for "), job.output()


@pytest.mark.parametrize(
    ("odd", "difference"),
    [
        ("worker1:mode", "strategy.a_sync: rank 0 (worker 0) has False, rank 1 (worker 1) has"),
        ("server0:rows", "clicks"),
    ],
)
def test_ranks_that_differ_end_at_the_start(start_job, odd, difference):
    job = start_job(train(odd))
    assert job.wait(START_LIMIT_S) == 1
    assert "ConfigError: ranks disagree on " in job.last_line()
    assert difference in job.last_line()


def test_ranks_that_mpi_does_not_join_are_refused_with_the_remedy(start_job, tmp_path):
    """The launcher starts two ranks and each believes to be alone."""
    script = tmp_path / "deaf.py"
    script.write_text(
        "import os, sys\n"
        "for name in list(os.environ):\n"
        "    if name.startswith(('PMIX_', 'PRTE_', 'OMPI_MCA_')): del os.environ[name]\n"
        f"os.execv(sys.executable, [sys.executable, {CTR_JOB!r}])\n"
    )
    job = start_job(run_command(1, 1, str(script)))
    assert job.wait(START_LIMIT_S) == 1
    assert "LaunchError: " in job.stderr
    assert "started 2 ranks, but MPI sees 1" in job.stderr
    assert "Start with the mpiexec of the MPI that mpi4py is bound to" in job.stderr
    said = "mpifleet: rank 0 (starting) failed: LaunchError: "  # each believes to be rank 0
    assert job.last_line().startswith(said), job.output()
