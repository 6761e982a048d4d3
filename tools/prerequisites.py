"""What the tests need from the operating system, and its installation where that is possible."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tools.parallel_h5py import PACKAGE as HDF5
from tools.parallel_h5py import PARALLEL
from tools.processes import environment, run
from tools.venvs import ROOT, is_ready

PACKAGES = ("openmpi-bin", "libopenmpi-dev", HDF5, "slurm-wlm", "munge")
OPEN_MPI = ("mpirun", "ompi_info")
SLURM = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
HDF5_HEADERS = Path("/usr/include/hdf5/openmpi/hdf5.h")
APT_LIMIT_S = 600.0


def missing(programs: tuple[str, ...]) -> list[str]:
    """The programs that are not installed."""
    path = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
    return [program for program in programs if shutil.which(program, path=path) is None]


def install_system_packages() -> None:
    """Installs Open MPI with HDF5, Slurm and munge through apt, where one is missing, as root."""
    if not missing(OPEN_MPI + SLURM) and HDF5_HEADERS.exists():
        return
    if (
        os.geteuid() != 0
        or shutil.which("apt-get") is None
        or not Path("/etc/debian_version").exists()
    ):
        return
    print(f"installing {' '.join(PACKAGES)}", flush=True)
    # RUNLEVEL=1 keeps the packages from starting daemons: the tests start their own.
    env = environment(extra={"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"})
    for command in (
        ["apt-get", "update", "-q"],
        ["apt-get", "install", "-q", "-y", "--no-install-recommends", *PACKAGES],
    ):
        ended = run(command, env=env, limit_s=APT_LIMIT_S, cwd=ROOT, quiet=True)
        if ended.status != 0:
            print(f"{' '.join(command)} failed:\n{ended.output}", flush=True)
            return


def obstacle(kind: str, mpi: str) -> str:
    """Why parts of this kind cannot run with this MPI, with the remedy; empty when they can."""
    needed: tuple[str, ...] = ()
    if mpi != "wheel" and kind in ("mpi", "hdf5", "launch", "cluster"):
        needed += OPEN_MPI
    if kind == "cluster":
        needed += SLURM
    if absent := missing(needed):
        return (
            f"missing: {', '.join(absent)} (Debian, Ubuntu: apt-get install {' '.join(PACKAGES)})"
        )
    if kind == "cluster" and os.geteuid() != 0:
        return "a private two-node Slurm needs root"
    return ""


def unbuilt(mpi: str) -> str:
    """Why parts with this MPI could not run, once its build was tried; empty when they could."""
    if mpi != PARALLEL or is_ready(PARALLEL):
        return ""
    return f"h5py was not built with MPI, see its build above (Debian, Ubuntu: it needs {HDF5})"
