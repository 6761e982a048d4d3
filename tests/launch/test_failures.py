"""A rank that fails, dies or freezes ends the whole job, and the last line names it."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.launch.started_job import plain_command, run_command

JOB = str(Path(__file__).parent / "jobs" / "lifeline_job.py")
HOST = socket.gethostname()
ROLES = ["worker 0", "worker 1", "server 0"]
LIMIT_S = 10.0

pytestmark = pytest.mark.timeout(90)


def last_words(job):
    """The last line that a rank wrote: mpirun writes its own reports after it."""
    return [line for line in job.stderr.splitlines() if line.startswith("mpifleet: ")][-1]


def test_a_job_that_works_says_nothing(start_job):
    job = start_job(run_command(1, 2, JOB, "0:finish", "1:finish", "2:finish"))
    assert job.wait(40) == 0
    assert [line for line in job.stderr.splitlines() if "mpifleet: rank" in line] == []


def test_one_rank_alone_needs_no_hub(start_job):
    job = start_job(run_command(0, 1, JOB, "0:raise"))
    assert job.wait(40) == 1
    assert job.last_line() == "mpifleet: rank 0 (worker 0) failed: ValueError: no such thing"


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_an_exception_ends_the_job_while_the_others_wait_in_mpi(start_job, rank):
    job = start_job(run_command(1, 2, JOB, f"{rank}:raise"))
    # Not "all ranks ready": the job may have ended before the slowest has said so.
    job.wait_until(lambda: "Traceback" in job.stderr, 40, "the exception is told")
    began_s = time.monotonic()
    assert job.wait() == 1
    assert time.monotonic() - began_s < LIMIT_S
    words = f"mpifleet: rank {rank} ({ROLES[rank]}) failed: ValueError: no such thing"
    assert job.last_line() == words


def test_every_log_tells_why_the_job_ended(start_job, tmp_path):
    logs = tmp_path / "logs"
    command = run_command(1, 2, JOB)
    command[4:4] = ["--log_dir", str(logs)]
    job = start_job(command)
    names = {0: "workerlog.0", 1: "workerlog.1", 2: "serverlog.0"}

    def ready():
        texts = {r: (logs / n).read_text() for r, n in names.items() if (logs / n).exists()}
        return all(f"ready {rank} " in texts.get(rank, "") for rank in names)

    job.wait_until(ready, 40, "all ranks ready in their logs")
    pid = int((logs / names[1]).read_text().split()[-1])
    os.kill(pid, signal.SIGKILL)
    assert job.wait(LIMIT_S) != 0
    words = f"mpifleet: rank 1 (worker 1) on {HOST} died"
    assert job.last_line() == words
    assert words in (logs / names[0]).read_text().splitlines()
    assert words in (logs / names[2]).read_text().splitlines()
    assert "ready 0 " in job.stdout, "rank 0 stays on the terminal"
    assert "ready 1 " not in job.stdout


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_killed_before_it_holds_a_lifeline_is_named(start_job, tmp_path, rank):
    code = (
        "import os, signal, time\n"
        f"if os.environ['OMPI_COMM_WORLD_RANK'] == '{rank}': os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(600)\n"
    )
    script = tmp_path / "dies_early.py"
    script.write_text(code)
    job = start_job(run_command(1, 2, str(script)))
    assert job.wait(40) == 137
    words = f"mpifleet: rank {rank} ({ROLES[rank]}) on {HOST} ended early, as "
    assert job.last_line().startswith(words)


@pytest.mark.parametrize("delay_s", ["0.0", "0.03", "0.1", "0.3"])
def test_a_rank_killed_in_mpi_init_is_named(start_job, delay_s):
    """Open MPI 5's launcher says nothing of it in the first moments."""
    script = str(Path(JOB).with_name("killed_in_init.py"))
    job = start_job(run_command(1, 2, script, delay_s))
    assert job.wait(40) == 137
    words = rf"mpifleet: rank 1 \(worker 1\) on {HOST} (died|ended early, as \w+ reports)"
    assert re.fullmatch(words, job.last_line()), job.output()


def test_exit_status_of_a_rank_is_the_jobs(start_job):
    job = start_job(run_command(1, 2, JOB, "1:exit"))
    assert job.wait(40) == 3
    assert job.last_line() == "mpifleet: rank 1 (worker 1) left with exit status 3"


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_killed_rank_is_named(start_job, rank):
    job = start_job(run_command(1, 2, JOB))
    os.kill(job.wait_ready(3)[rank], signal.SIGKILL)
    assert job.wait(LIMIT_S) != 0
    assert job.last_line() == f"mpifleet: rank {rank} ({ROLES[rank]}) on {HOST} died"


@pytest.mark.parametrize("rank", [0, 2])
def test_a_killed_rank_is_named_under_bare_mpirun(start_job, rank):
    job = start_job(plain_command(3, JOB))
    os.kill(job.wait_ready(3)[rank], signal.SIGKILL)
    assert job.wait(LIMIT_S) != 0
    assert last_words(job) == f"mpifleet: rank {rank} ({ROLES[rank]}) on {HOST} died"


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_killed_while_the_others_finalize_is_named(start_job, rank):
    actions = [f"{r}:late" if r == rank else f"{r}:finish" for r in range(3)]
    job = start_job(run_command(1, 2, JOB, *actions))
    pid = job.wait_ready(3)[rank]
    time.sleep(0.5)  # the others reach MPI_Finalize; earlier would be another test of this file
    os.kill(pid, signal.SIGKILL)
    assert job.wait(LIMIT_S) != 0
    assert job.last_line() == f"mpifleet: rank {rank} ({ROLES[rank]}) on {HOST} died"


def test_a_killed_rank_is_seen_although_its_child_lives(start_job):
    job = start_job(run_command(1, 2, JOB, "1:fork"))
    pids = job.wait_ready(3)
    job.wait_until(lambda: "child 1 " in job.stdout, 10, "the rank has forked")
    os.kill(pids[1], signal.SIGKILL)
    assert job.wait(LIMIT_S) != 0
    assert job.last_line() == f"mpifleet: rank 1 (worker 1) on {HOST} died"


def test_signals_to_a_forked_child_are_not_the_ranks(start_job):
    job = start_job(run_command(1, 2, JOB, "1:fork"))
    job.wait_ready(3)
    job.wait_until(lambda: "child 1 " in job.stdout, 10, "the rank has forked")
    child = int(job.stdout.split("child 1 ")[1].split()[0])
    os.kill(child, signal.SIGTERM)
    job.wait_until(lambda: child not in job.pids(), 5, "the child ends")
    time.sleep(2.0)  # longer than a failure needs to end the job
    assert job.process.poll() is None
    os.kill(job.process.pid, signal.SIGTERM)
    assert job.wait() == 143


@pytest.mark.parametrize("rank", [0, 1])
def test_a_frozen_rank_is_reported_and_then_ended(start_job, rank):
    limits = {"STALL_REPORT_S": "2", "STALL_END_S": "4"}
    job = start_job(run_command(1, 2, JOB, "2:sleep"), limits)
    os.kill(job.wait_ready(3)[rank], signal.SIGSTOP)
    who = f"rank {rank} ({ROLES[rank]}) on {HOST}"
    job.wait_until(lambda: "no sign of life" in job.stderr, 5, "the silence is reported")
    reports = [line for line in job.stderr.splitlines() if "no sign of life" in line]
    assert who in reports[0]
    assert job.wait(LIMIT_S) != 0
    assert job.last_line().startswith(f"mpifleet: {who} silent for ")
    assert "Current thread" in job.stderr, "stacks of the ranks that waited"
    assert "time.sleep" in job.stderr or "in main" in job.stderr


def test_a_job_frozen_and_thawed_as_a_whole_goes_on(start_job):
    limits = {"STALL_REPORT_S": "2", "STALL_END_S": "4"}
    job = start_job(run_command(1, 2, JOB), limits)
    pids = job.wait_ready(3).values()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(6.0)  # well past the end limit: the point is that this time does not count
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    time.sleep(2.0)
    assert job.process.poll() is None, job.stderr
    os.kill(job.process.pid, signal.SIGTERM)
    assert job.wait() == 143
