"""Light modules load neither MPI nor torch, and cost little more than numpy."""

import pytest

from tests.python_process import ROOT, run_python

LIGHT = [
    "mpifleet",
    "mpifleet.errors",
    "mpifleet.log",
    "mpifleet.strategy",
    "mpifleet.launchenv",
    "mpifleet.partition",
    "mpifleet.lifeline",
    "mpifleet.cli.main",
    "mpifleet.cli.run",
    "mpifleet.cli.inspect",
    "mpifleet.cli.export",
    "mpifleet.cli.import_files",
]
LANES = ["mpifleet.ps.mailbox", "mpifleet.ps.assembler", "mpifleet.ps.server_advice"]
HEAVY = ["mpi4py.MPI", "torch", "h5py", "horovod", "sklearn", "rich"]
ROUNDS = 5
MORE_THAN_NUMPY_S = 0.050
LIMIT_S = 60
TIMED = (
    "import numpy, time; begin_s = time.process_time(); import {}; "
    "print(time.process_time() - begin_s)"
)


def python(*arguments: str) -> str:
    """What a fresh interpreter prints, as users have it, its numpy on one thread."""
    environment = {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    return run_python(*arguments, limit_s=LIMIT_S, **environment)


@pytest.mark.parametrize("module", LIGHT + LANES)
def test_light_modules_load_nothing_heavy(module):
    code = f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])"
    assert python("-c", code).strip() == "[]"


def test_the_check_sees_a_heavy_module():
    code = f"import sys, h5py; print([name for name in {HEAVY} if name in sys.modules])"
    assert python("-c", code).strip() == "['h5py']"


@pytest.mark.parametrize("module", ["mpifleet.inference", "mpifleet.fleet"])
def test_a_host_without_mpi_can_import(module):
    code = f"import sys; sys.modules['mpi4py'] = None; import {module}"
    assert python("-c", code) == ""


@pytest.mark.parametrize(
    "words", [["--help"], ["inspect", "--help"], ["export", "--help"], ["import", "--help"]]
)
def test_help_loads_nothing_heavy(words):
    code = (
        "import sys\nfrom mpifleet.cli.main import main\n"
        f"try:\n    main({words})\nexcept SystemExit as end:\n    assert not end.code\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    out = python("-c", code)
    assert out.splitlines()[-1] == "[]"
    assert "usage: mpifleet" in out


@pytest.mark.parametrize("module", LIGHT)
def test_importing_costs_little_more_than_numpy(module):
    """CPU time of the import where numpy is there already; a busy machine gets other chances."""
    spent_s: list[float] = []
    while len(spent_s) < ROUNDS and min(spent_s, default=1.0) > MORE_THAN_NUMPY_S:
        spent_s.append(float(python("-c", TIMED.format(module))))
    assert min(spent_s) <= MORE_THAN_NUMPY_S, spent_s
