"""PYTHONPATH of the processes that tests start: the package and the tests, and a quick start."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON_PATH = os.pathsep.join([str(ROOT / "tests" / "quick_start"), str(ROOT)])
# Ranks load numba anew each time; its code is tested in the processes that run all tests.
JOB_ENVIRONMENT = {"PYTHONPATH": PYTHON_PATH, "MPIFLEET_TEST_WITHOUT_NUMBA": "1"}
