"""Readers, generators and metrics need numpy alone: neither torch nor MPI is loaded."""

import subprocess
import sys

import pytest

HEAVY = ["torch", "mpi4py", "mpi4py.MPI", "h5py", "rich", "multiprocessing"]


@pytest.mark.parametrize(
    "module",
    [
        "mpifleet.metrics",
        "mpifleet.data.criteo",
        "mpifleet.data.criteo_synthetic",
        "mpifleet.data.movielens",
        "mpifleet.data.prefetch",
    ],
)
def test_nothing_heavy_is_loaded(module):
    code = f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
