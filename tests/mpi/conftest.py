"""Every test of this folder runs on all ranks of one MPI job; see tests/ranks.py."""

from pathlib import Path

import pytest

import tests.quick_start.sitecustomize  # noqa: F401
from tests import ranks


def pytest_configure(config: pytest.Config) -> None:
    ranks.register(config, Path(__file__).parent)
