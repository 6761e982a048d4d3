"""A run of this interpreter in a process of its own, with the package importable."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.python_path import PYTHON_PATH, ROOT


def run_python(
    *arguments: str | Path, cwd: Path = ROOT, limit_s: float = 120, **environment: str
) -> str:
    """Standard output of `python arguments`; fails with its stderr where its status is not 0.

    environment: variables added to this process's own.
    """
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": PYTHON_PATH} | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
