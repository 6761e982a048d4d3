"""The same ends on a two-node Slurm: under plain srun, and under `mpifleet run` inside it."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from tests.cluster.conftest import cluster  # noqa: F401
from tests.cluster.slurm_cluster import NODE_ENV
from tests.launch.started_job import run_command

JOB = str(Path(__file__).parent / "jobs" / "lifeline_job.py")
HOST = socket.gethostname()
ROLES = ["worker 0", "worker 1", "worker 2", "server 0"]
LIMIT_S = 15.0

pytestmark = pytest.mark.timeout(120)


def srun_command(slurm, *actions):
    return ["srun", *slurm.step_options(), str(NODE_ENV), sys.executable, "-u", JOB, *actions]


def last_words(job):
    """The last line that a rank wrote: srun writes its own reports after it."""
    return [line for line in job.stderr.splitlines() if line.startswith("mpifleet: ")][-1]


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_killed_rank_is_named_under_plain_srun(start_job, cluster, rank):  # noqa: F811
    job = start_job(srun_command(cluster), cluster.environment)
    os.kill(job.wait_ready(4)[rank], signal.SIGKILL)
    assert job.wait(LIMIT_S) != 0
    assert last_words(job) == f"mpifleet: rank {rank} ({ROLES[rank]}) on {HOST} died"


def test_an_exception_under_plain_srun(start_job, cluster):  # noqa: F811
    job = start_job(srun_command(cluster, "2:raise"), cluster.environment)
    job.wait_until(lambda: "Traceback" in job.stderr, 40, "the exception is told")
    assert job.wait(LIMIT_S) == 1
    assert last_words(job) == "mpifleet: rank 2 (worker 2) failed: ValueError: no such thing"


def test_a_cancelled_step_leaves_nothing(start_job, cluster):  # noqa: F811
    job = start_job(srun_command(cluster, "1:busy"), cluster.environment)
    job.wait_ready(4)
    os.kill(job.process.pid, signal.SIGTERM)
    assert job.wait(LIMIT_S) != 0
    assert job.leftovers() == []


def run_in_allocation(start_job, slurm, *actions):
    """`mpifleet run` of the job inside an allocation of two nodes."""
    # Both nodes are this machine: ranks must not meet in /dev/shm across them.
    environment = {**slurm.environment, "OMPI_MCA_btl": "self,tcp"}
    allocation = ["salloc", "--quiet", "--nodes=2", "--ntasks-per-node=2"]
    job = start_job([*allocation, *run_command(1, 3, JOB, *actions)], environment)
    return job, job.wait_ready(4)


def test_mpifleet_run_uses_srun_inside_an_allocation(start_job, cluster):  # noqa: F811
    job, pids = run_in_allocation(start_job, cluster)
    assert "srun -N 2 -n 4 " in job.stderr
    assert "--ntasks-per-node=2" in job.stderr
    os.kill(pids[3], signal.SIGKILL)
    assert job.wait(LIMIT_S) != 0
    assert job.last_line() == f"mpifleet: rank 3 (server 0) on {HOST} died"


def test_a_job_that_works_inside_an_allocation(start_job, cluster):  # noqa: F811
    job, _ = run_in_allocation(start_job, cluster, *(f"{rank}:finish" for rank in range(4)))
    assert job.wait(LIMIT_S) == 0


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
def test_an_ended_launcher_ends_the_step(start_job, cluster, name):  # noqa: F811
    job, _ = run_in_allocation(start_job, cluster, "1:busy")
    (launcher,) = (
        pid
        for pid in job.pids()
        if b"mpifleet.cli.main" in Path(f"/proc/{pid}/cmdline").read_bytes()
        and b"salloc" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    os.kill(launcher, getattr(signal, name))
    job.wait(LIMIT_S)
    assert job.leftovers(10) == []
