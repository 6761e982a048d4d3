"""The MPI suite under failures: one rank that fails, hangs or is alone ends the job for all.

Each test writes a small suite of its own and starts it under mpirun.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.python_path import PYTHON_PATH

LIMIT_S = 60
CONFTEST = """
from pathlib import Path
from tests import ranks
def pytest_configure(config):
    ranks.register(config, Path(__file__).parent)
"""
PYTEST = [sys.executable, "-m", "pytest", "--rootdir", ".", "--color=no", "-pno:cacheprovider"]


def mpirun() -> str:
    """The launcher that fits this interpreter's MPI: its own folder's first."""
    own = Path(sys.executable).with_name("mpirun")
    return str(own) if own.exists() else "mpirun"


def run_suite(folder: Path, text: str, ranks: int, expected: int) -> subprocess.CompletedProcess:
    """Runs the tests in `text` on `ranks` ranks that expect to be `expected`."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(text)
    environment = os.environ | {
        "PYTHONPATH": PYTHON_PATH,
        "MPIFLEET_TEST_RANKS": str(expected),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    return subprocess.run(
        [mpirun(), "--oversubscribe", "-n", str(ranks), *PYTEST],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_on_one_rank_fails_all(tmp_path, failing):
    text = f"""
def test_one(comm):
    assert comm.rank != {failing}, "this rank is to fail"
def test_two(comm):
    assert comm.allreduce(1) == 2
"""
    result = run_suite(tmp_path, text, ranks=2, expected=2)
    assert result.returncode != 0
    assert "1 failed, 1 passed" in result.stdout
    assert f"rank {failing}: FAILED test_it.py::test_one" in result.stderr
    assert "this rank is to fail" in result.stderr


def test_a_failing_teardown_on_one_rank_fails_all(tmp_path):
    text = """
import pytest
@pytest.fixture
def thing(comm):
    yield
    assert comm.rank == 0
def test_one(thing):
    pass
"""
    result = run_suite(tmp_path, text, ranks=2, expected=2)
    assert result.returncode != 0
    assert "1 passed, 1 error" in result.stdout


def test_a_rank_that_hangs_is_named_with_its_stacks(tmp_path):
    text = """
import pytest
@pytest.mark.timeout(2)
def test_one(comm):
    if comm.rank == 1:
        comm.recv(source=0)
"""
    result = run_suite(tmp_path, text, ranks=2, expected=2)
    assert result.returncode != 0
    assert "rank 1: test_it.py::test_one has not ended after 2 s" in result.stderr
    assert 'test_it.py", line 6 in test_one' in result.stderr


def test_a_launcher_of_another_mpi_is_refused(tmp_path):
    result = run_suite(tmp_path, "def test_one(comm): pass", ranks=1, expected=2)
    assert result.returncode != 0
    assert "2 ranks were started but MPI sees 1" in result.stdout + result.stderr
