"""Scripts that forget to stop or leave early while others train still end well, and say so once."""

from __future__ import annotations

import pytest

from tests.launch.phases import CTR_JOB, START_LIMIT_S
from tests.launch.started_job import run_command

SAID = "the script ended without fleet.stop_worker(): stopping now"

pytestmark = pytest.mark.timeout(START_LIMIT_S + 60)


@pytest.mark.parametrize(
    ("mode", "how"),
    [("sync", "forget"), ("sync", "exit0@5"), ("sync", "break@5"), ("async", "exit0@5")],
)
def test_a_worker_that_ends_early_lets_the_others_finish(start_job, mode, how):
    job = start_job(run_command(1, 2, CTR_JOB, "--mode", mode, f"worker1:{how}"))
    assert job.wait(START_LIMIT_S) == 0, job.output()
    assert "done" in job.stdout.splitlines()
    lines = [line for line in job.stderr.splitlines() if SAID in line]
    assert len(lines) == 1
    assert "rank 1 (worker 1)" in lines[0]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_who_waits_for_a_worker_that_has_left_is_told(start_job, mode):
    job = start_job(run_command(1, 2, CTR_JOB, "--meet", "--mode", mode, "worker1:break@5"))
    assert job.wait(START_LIMIT_S) == 1, job.output()
    words = "mpifleet: rank 0 (worker 0) failed: StallError: waiting for all in a collective call, "
    assert job.last_line() == words + "but rank 1 (worker 1) came to the end of the script"
