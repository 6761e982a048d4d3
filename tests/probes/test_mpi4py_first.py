"""What a script gets that imports mpi4py.MPI first, as many do, before fleet.init().

Found, 2 ranks on one node: mpi4py asks for MULTIPLE unless MPI4PY_RC_THREAD_LEVEL says otherwise,
and both MPIs grant what is asked. With default components windows of both kinds work at every
level. Open MPI 4.1.4 with osc=pt2pt: Allocate raises ERR_WIN on every rank at MULTIPLE and works
below; Allocate_shared raises ERR_INTERN at any level. Open MPI 5 has no pt2pt, and a job that names
a missing component never leaves MPI_Init: it dies there, or (2 of 6 times, 5.0.11) hangs.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mpi4py import MPI

PROGRAM = Path(__file__).with_name("first_import.py")
JOB_LIMIT_S = 30.0
FOREIGN = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "MPI4PY_", "SLURM_")
AS_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT")
LEVELS = {"": MPI.THREAD_MULTIPLE} | {
    name: getattr(MPI, f"THREAD_{name.upper()}") for name in ("funneled", "serialized", "multiple")
}
VENDOR, VERSION = MPI.get_vendor()

pytestmark = [
    pytest.mark.ranks(1),
    pytest.mark.timeout(JOB_LIMIT_S + 30),
    pytest.mark.skipif(VENDOR != "Open MPI", reason=f"{VENDOR} chooses no components by name"),
]


def environment(**settings: str) -> dict[str, str]:
    """This process's environment without any trace of the job it runs in, plus `settings`."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    allowed = {name + end: "1" for name in AS_ROOT for end in ("", "_CONFIRM")}
    return ours | allowed | settings


def mpirun() -> str:
    """The launcher beside the interpreter (embedded MPI), else the one on PATH."""
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    assert found, "no mpirun beside the interpreter and none on PATH"
    return found


def two_ranks(limit_s: float = JOB_LIMIT_S, **settings: str) -> tuple[int | None, str]:
    """Exit status, None after limit_s, and stdout of PROGRAM on 2 ranks."""
    command = [mpirun(), "--oversubscribe", "-n", "2", sys.executable, str(PROGRAM)]
    job = subprocess.Popen(
        command,
        env=environment(**settings),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        stdout, _ = job.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        job.terminate()  # not kill: mpirun then ends its ranks and removes their segments
        try:
            stdout, _ = job.communicate(timeout=5.0)
        except subprocess.TimeoutExpired:
            job.kill()  # it hangs after the end of its ranks
            stdout, _ = job.communicate()
        return None, stdout
    return job.returncode, stdout


def ask(level: str, **settings: str) -> dict:
    if level:
        settings["MPI4PY_RC_THREAD_LEVEL"] = level
    status, stdout = two_ranks(**settings)
    assert status == 0, "None: it had not ended in time"
    return json.loads(stdout)


@pytest.mark.parametrize("level", LEVELS)
def test_default_components_work_at_every_level(comm, level):
    both = ["ok", "ok"]
    assert ask(level) == {"level": LEVELS[level], "allocate": both, "shared": both}


@pytest.mark.skipif(VERSION >= (5,), reason="pt2pt is gone from Open MPI 5")
def test_two_sided_windows_refuse_multiple(comm):
    assert ask("", OMPI_MCA_osc="pt2pt")["allocate"] == ["ERR_WIN"] * 2


@pytest.mark.skipif(VERSION >= (5,), reason="pt2pt is gone from Open MPI 5")
def test_two_sided_windows_work_below_multiple(comm):
    found = ask("serialized", OMPI_MCA_osc="pt2pt")
    assert found["allocate"] == ["ok"] * 2
    assert found["shared"] == ["ERR_INTERN"] * 2
    assert ask("serialized", OMPI_MCA_osc="sm,pt2pt")["shared"] == ["ok"] * 2


@pytest.mark.skipif(VERSION < (5,), reason="Open MPI 4 has pt2pt")
def test_with_a_missing_component_there_is_no_job(comm):
    status, stdout = two_ranks(limit_s=10.0, OMPI_MCA_osc="sm,pt2pt")
    assert status != 0
    assert stdout == ""
