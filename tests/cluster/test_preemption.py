"""A step on two nodes that is told to stop: the status of its script survives srun."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from mpifleet import PREEMPTED
from tests.cluster.slurm_cluster import NODE_ENV
from tests.cluster.test_training_ends import LIMIT_S, counts
from tests.launch.conftest import start_job  # noqa: F401

JOB = str(Path(__file__).parents[1] / "launch" / "jobs" / "preempted_job.py")

pytestmark = pytest.mark.timeout(150)


def found(job, what):
    return sorted(re.findall(rf"^{what} (\d.*)$", job.stdout, re.MULTILINE))


def by_srun(_cluster, srun):
    os.kill(srun.pid, signal.SIGUSR2)


def by_slurm(cluster, _srun):
    """As Slurm tells the tasks of a job that it is about to preempt."""
    (number,) = cluster._control(["squeue", "--noheader", "--format=%i", "--states=R"]).split()
    cluster._control(["scancel", "--signal=TERM", number])


@pytest.mark.parametrize("tell", [by_srun, by_slurm])
def test_a_step_that_is_told_to_stop_keeps_its_status(start_job, cluster, tmp_path, tell):  # noqa: F811
    """Though srun ends the server with a signal when it sees the worker's status."""
    options = cluster.step_options(ntasks_per_node=1)
    script = [JOB, str(tmp_path / "saved"), "--forever", "--pause-s", "0.05"]
    command = ["srun", *options, str(NODE_ENV), sys.executable, "-u", *script]
    job = start_job(command, {**cluster.environment, **counts(1, 1)})
    job.wait_until(lambda: bool(found(job, "ready")), LIMIT_S, "two steps")
    tell(cluster, job.process)
    assert job.wait(30) == PREEMPTED, job.output()
    assert len(found(job, "stopped")) == 1, job.output()
    assert (tmp_path / "saved" / "latest").exists()
