"""A benchmark as a program: under a launcher it measures, as a plain process it starts its job."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from benchmarks.launch import is_launched, run_job
from benchmarks.report import missed

if TYPE_CHECKING:
    from mpifleet.roles import Roles


def join(program: str, num_ranks: int | None = None) -> tuple[ModuleType, Roles]:
    """mpi4py.MPI and the roles of a job with one server; torch has one thread. Collective.

    num_ranks: how many ranks `program` needs; None where it runs on any number.
    """
    import torch

    from mpifleet.mpi import load_mpi
    from mpifleet.roles import Roles

    torch.set_num_threads(1)
    mpi = load_mpi()
    size = mpi.COMM_WORLD.size
    if num_ranks is not None and size != num_ranks:
        raise SystemExit(f"{program} runs on {num_ranks} ranks, not on {size}")
    return mpi, Roles.assign(mpi, mpi.COMM_WORLD, num_servers=1)


def run_program(
    program: str,
    about: str | None,
    quick_means: str,
    measure: Callable[[bool], None],
    num_ranks: int,
    quick_ranks: int | None = None,
    argv: Sequence[str] | None = None,
) -> int:
    """The exit status: measure(quick) as one rank of a job, else run that job on this node.

    about: help of the program; quick_means: help of --quick, with which the job has `quick_ranks`
    ranks where given.  A started job has status 1 when a goal was missed.
    """
    module = f"benchmarks.{program}"
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    parser.add_argument("--quick", action="store_true", help=quick_means)
    quick = parser.parse_args(argv).quick
    if is_launched():
        measure(quick)
        return 0
    ranks = quick_ranks if quick and quick_ranks is not None else num_ranks
    status, lines = run_job(module, ranks, ["--quick"] if quick else [])
    return status or int(bool(missed(lines)))
