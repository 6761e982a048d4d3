"""A job exports its model; a process that has no MPI at all predicts the same bits."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.launch.phases import START_LIMIT_S
from tests.launch.started_job import run_command
from tests.launch.test_one_script import said

JOB = str(Path(__file__).parent / "jobs" / "exporting_job.py")
WITHOUT_MPI = (
    "import sys, runpy; sys.modules['mpi4py'] = None; sys.argv = sys.argv[1:]; "
    "runpy.run_path(sys.argv[0])"
)

pytestmark = pytest.mark.timeout(2 * START_LIMIT_S + 60)


def test_a_process_without_mpi_predicts_as_the_job(start_job, tmp_path):
    served = str(tmp_path / "served")
    job = said(start_job(run_command(1, 2, JOB, "train", served)), "predictions")
    alone = start_job([sys.executable, "-c", WITHOUT_MPI, JOB, "infer", served])
    assert said(alone, "predictions") == job
    assert set(job.removeprefix("predictions ")) != {"0"}
