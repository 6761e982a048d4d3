"""The parts of the whole test run, as commands."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tools.parallel_h5py import PARALLEL

MPI_FOLDERS = ("tests/mpi", "tests/probes")
RANK_COUNTS = (1, 2, 3, 4)
KINDS = ("lint", "unit", "mpi", "hdf5", "launch", "cluster")
MPIS = ("system", "wheel")
# What an h5py with MPI may change: the rest calls no HDF5, or the same as these. Left out are tests
# that take long and are about pushes and times.
CHECKPOINTS = ("tests/mpi/test_checkpoints.py", "tests/mpi/test_compressed.py")
NOT_OF_HDF5 = (
    "test_a_save_among_async_pushes_has_every_flushed_one",
    "test_a_save_has_every_push_that_was_delivered_before_it",
    "test_busy_is_refused_where_asked_and_old_ones_go",
    "test_loading_drops_what_was_pushed_before",
)
# How jobs end depends on the MPI; what scripts compute and print does not.
ENDS = tuple(f"tests/launch/test_{name}.py" for name in ("failures", "kill", "signals"))
OTHERS = ("tests/launch", *(f"--ignore={name}" for name in ENDS))
LAUNCH = {"system": (OTHERS, ENDS), "wheel": (ENDS,)}
KILL_RUNS = {"system": "4", "wheel": "4"}
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
SOURCES = ("mpifleet", "tools", "tests", "examples", "benchmarks")


@dataclass(frozen=True)
class Part:
    """One command of the test run.

    mpi: the virtual environment it runs in.  limit_s: it is ended, and has failed, after that.
    after: title of the part that must have ended well before.
    """

    kind: str
    name: str
    mpi: str
    command: list[str]
    limit_s: float
    ranks: int = 0
    env: dict[str, str] = field(default_factory=dict)
    after: str = ""

    @property
    def title(self) -> str:
        """What it runs, on which MPI and number of ranks."""
        ranks = f", {self.ranks} ranks" if self.ranks else ""
        return f"{self.name} ({self.mpi}{ranks})"

    @property
    def is_pytest(self) -> bool:
        """Whether its outcomes are counted test by test."""
        return "pytest" in self.command


def all_parts(root: Path, venvs: Path) -> Iterator[Part]:
    """Every part: first what fails fast, then what waits for jobs; at the end what computes.

    The run takes them from both ends, so that a part that waits has one that computes beside it,
    and comes last to the shortest, in the middle.
    """
    python = str(venvs / "system" / "bin" / "python")
    yield from _lint_parts(root, venvs)
    build = [sys.executable, "-m", "tools.set_up", PARALLEL]
    yield (built := Part("hdf5", "build of h5py with MPI", PARALLEL, build, 1200))
    # One process, and long: begun last it would end alone.  One thread: small tensors, and the
    # cores are shared with the processes that tests start.
    yield Part("unit", "tests/unit", "system", _pytest(python, "tests/unit"), 600, env=ONE_THREAD)
    yield from _launch_parts(venvs, "system")
    yield Part("cluster", "tests/cluster", "system", _pytest(python, "tests/cluster"), 900)
    yield from _launch_parts(venvs, "wheel")
    yield from (mpi_part(venvs, mpi, 1) for mpi in MPIS)
    yield from (hdf5_part(venvs, ranks, built.title) for ranks in RANK_COUNTS)
    for ranks in RANK_COUNTS[1:]:
        yield from (mpi_part(venvs, mpi, ranks) for mpi in MPIS)


def _lint_parts(root: Path, venvs: Path) -> Iterator[Part]:
    sources = [name for name in SOURCES if (root / name).is_dir()]
    folder = venvs / "system" / "bin"
    ruff = str(folder / "ruff")
    yield Part("lint", "ruff check", "system", [ruff, "check", *sources], 60)
    yield Part("lint", "ruff format", "system", [ruff, "format", "--check", *sources], 60)
    yield Part("lint", "mypy", "system", [str(folder / "python"), "-m", "mypy"], 300)


def _launch_parts(venvs: Path, mpi: str) -> Iterator[Part]:
    python = str(venvs / mpi / "bin" / "python")
    env = {"MPIFLEET_KILL_RUNS": KILL_RUNS[mpi]}
    for which in LAUNCH[mpi]:
        name = "launch: ends" if which is ENDS else "launch: others"
        yield Part("launch", name, mpi, _pytest(python, *which), 1200, env=env)


def mpi_part(venvs: Path, mpi: str, ranks: int) -> Part:
    """The MPI suite at one world size on one MPI."""
    # What a model learns does not depend on the MPI; how it trains there is tested by the rest.
    left_out = ["--ignore=tests/mpi/test_auc.py"] if mpi == "wheel" else []
    name, tests = " ".join(MPI_FOLDERS), [*MPI_FOLDERS, *left_out]
    return Part("mpi", name, mpi, *_on_ranks(venvs, mpi, ranks, tests))


def hdf5_part(venvs: Path, ranks: int, after: str) -> Part:
    """The checkpoints of the MPI suite at one world size, with an h5py that has MPI."""
    left_out = [f"--deselect={CHECKPOINTS[0]}::{name}" for name in NOT_OF_HDF5]
    command = _on_ranks(venvs, PARALLEL, ranks, [*CHECKPOINTS, *left_out])
    return Part("hdf5", "checkpoints, h5py with MPI", PARALLEL, *command, after=after)


def _on_ranks(
    venvs: Path, mpi: str, ranks: int, tests: list[str]
) -> tuple[list[str], float, int, dict[str, str]]:
    """(command, limit_s, ranks, env) of a part of the MPI suite."""
    folder = venvs / mpi / "bin"
    mpirun = str(folder / "mpirun") if mpi == "wheel" else "mpirun"
    options = ["--oversubscribe", "--bind-to", "none", "-n", str(ranks)]
    command = [mpirun, *options, *_pytest(str(folder / "python"), *tests)]
    return command, 480, ranks, {"MPIFLEET_TEST_RANKS": str(ranks), **ONE_THREAD}


def _pytest(python: str, *folders: str) -> list[str]:
    return [python, "-m", "pytest", "-p", "tests.tally", *folders]
