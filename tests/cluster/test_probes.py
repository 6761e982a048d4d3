"""What the probes found holds with one rank on each node; two on each: test_training_ends.py."""

import re
import sys
from pathlib import Path

import pytest

from tests.python_path import JOB_ENVIRONMENT

ROOT = Path(__file__).parents[2]
LIMIT_S = 90.0
PROBES = ("test_writer_gate.py", "test_pull_roads.py", "test_delivery.py")

pytestmark = pytest.mark.timeout(150)


def test_the_probes_hold_between_one_rank_on_each_node(cluster):
    files = [f"tests/probes/{name}" for name in PROBES]
    result = cluster.srun(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-pno:cacheprovider", *files],
        ntasks_per_node=1,
        env={**JOB_ENVIRONMENT, "MPIFLEET_PROBE_MESSAGES": "2000"},
        timeout=LIMIT_S,
        options=[f"--chdir={ROOT}"],
    )
    assert result.returncode == 0, result.stdout + result.stderr
    # Windows of one node's shared memory are refused between two; all else has to run.
    tally = re.search(r"(\d+) passed, (\d+) skipped", result.stdout)
    assert tally, result.stdout
    assert tally.groups() == ("5", "3"), result.stdout
