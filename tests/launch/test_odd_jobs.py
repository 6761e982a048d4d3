"""What goes wrong on one rank only, before or beside training, ends the whole job or nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.phases import START_LIMIT_S
from tests.launch.started_job import plain_command, run_command

JOB = str(Path(__file__).parent / "jobs" / "odd_job.py")

pytestmark = pytest.mark.timeout(START_LIMIT_S + 60)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("role", "MPIFLEET_ROLE='banana': the valid roles are server and worker"),
        ("address", "192.0.2.1"),
        ("files", "servers start from different checkpoints"),
        ("unsendable", "not JSON serializable"),
        ("early", "rank 1 (worker 1) came to the end of the script"),
    ],
)
def test_an_error_of_one_rank_ends_all(start_job, tmp_path, case, words):
    counts = (2, 1) if case == "files" else (1, 2)
    job = start_job(run_command(*counts, JOB, case, str(tmp_path)))
    assert job.wait(START_LIMIT_S) != 0, job.output()
    assert words in job.stderr
    assert job.last_line().startswith("mpifleet: rank ")


def test_an_error_before_the_lifeline_ends_all_without_our_launcher_too(start_job, tmp_path):
    job = start_job(plain_command(3, JOB, "role", str(tmp_path)))
    assert job.wait(START_LIMIT_S) != 0, job.output()
    assert "mpifleet: rank 1 (starting) failed: ConfigError" in job.stderr


def test_waiting_in_a_collective_for_a_slow_worker_is_no_stall(start_job, tmp_path):
    job = start_job(run_command(1, 2, JOB, "slow", str(tmp_path)))
    assert job.wait(START_LIMIT_S) == 0, job.output()
    assert job.stdout.count("gathered [0, 1]") >= 1
