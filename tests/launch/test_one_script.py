"""One script unchanged in one process, under `mpifleet run` and under mpirun."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from tests.launch.phases import CTR_JOB, START_LIMIT_S
from tests.launch.started_job import plain_command, run_command

DIGITS_JOB = str(Path(CTR_JOB).with_name("digits_job.py"))

pytestmark = pytest.mark.timeout(3 * START_LIMIT_S + 60)


def said(job, what: str) -> str:
    """The line of the job's output that begins with `what`; the job must end well."""
    assert job.wait(START_LIMIT_S) == 0, job.output()
    found = re.findall(rf"^{what} .*$", job.stdout, re.MULTILINE)
    assert len(found) == 1, job.output()
    return found[0]


def test_one_worker_gives_the_bits_of_one_process(start_job):
    alone = said(start_job([sys.executable, CTR_JOB]), "digest")
    assert said(start_job(run_command(1, 1, CTR_JOB)), "digest") == alone
    assert said(start_job(plain_command(2, CTR_JOB)), "digest") == alone
    # One server per node by default: with two, asked for, the rows lie elsewhere, their bits stay.
    assert said(start_job(run_command(2, 1, CTR_JOB)), "digest") == alone
    shorter = start_job([sys.executable, CTR_JOB, "--steps", "39"])
    assert said(shorter, "digest") != alone, "the line tells one step from none"


@pytest.mark.parametrize("mode", ["alone", "sync", "async"])
def test_digits_are_learned(start_job, tmp_path, mode):
    digits, file = load_digits(), str(tmp_path / "digits.npz")
    np.savez(file, data=digits.data, target=digits.target)
    command = [sys.executable, DIGITS_JOB, "sync", file]
    if mode != "alone":
        command = run_command(2, 2, DIGITS_JOB, mode, file)
    assert float(said(start_job(command), "accuracy").split()[1]) >= 0.9
