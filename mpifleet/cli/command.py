"""The one command line that starts a job, and the environment it needs: pure functions."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from mpifleet.errors import ConfigError
from mpifleet.launchenv import (
    LOG_DIR,
    SERVER_NUM,
    WORKER_NUM,
    LaunchEnv,
    per_node_counts,
    transport_defaults,
)


@dataclass(frozen=True)
class Launcher:
    """A program that starts ranks.

    kind: "openmpi", "mpich" or "srun".  path: as to be called.  version: e.g. "4.1.4", "" if
    unknown.  embedded: it belongs to the Python environment (an MPI installed by pip).
    """

    kind: str
    path: str
    version: str = ""
    embedded: bool = False

    @property
    def major(self) -> int:
        """Major version, 0 if unknown."""
        found = re.match(r"\d+", self.version)
        return int(found.group()) if found else 0


@dataclass(frozen=True)
class Job:
    """What is to be run: counts of ranks, nodes of the allocation, cores of one node, and words.

    cpus: of each node of a Slurm allocation, empty when it does not say.
    """

    server_num: int
    worker_num: int
    program: tuple[str, ...]
    log_dir: str | None = None
    nodes: int = 1
    cores: int = 1
    cpus: tuple[int, ...] = ()
    root: bool = False

    def __post_init__(self) -> None:
        if self.server_num < 0:
            raise ConfigError(
                f"--server_num {self.server_num}: use 1 or more servers, or 0 with 1 worker"
            )
        if self.worker_num < 1:
            raise ConfigError(
                f"--worker_num {self.worker_num} leaves no worker beside {self.server_num} "
                "servers; use 1 or more workers"
            )
        if self.server_num == 0 and self.worker_num > 1:
            raise ConfigError(
                f"--server_num 0 with --worker_num {self.worker_num}: without a server there is "
                "one worker, which holds the tables itself; use 1 or more servers, or 1 worker"
            )

    @property
    def ranks(self) -> int:
        """Servers and workers together."""
        return self.server_num + self.worker_num

    @property
    def ranks_per_node(self) -> int:
        """Ranks on the fullest node."""
        return -(-self.ranks // self.nodes)


def parse_version(text: str) -> tuple[str, str] | None:
    """(kind, version) from what `mpiexec --version` prints; None when it is neither MPI."""
    found = re.search(r"\(Open MPI\)\s+(\d[\w.]*)", text)
    if found:
        return "openmpi", found.group(1)
    if "HYDRA" in text:
        found = re.search(r"Version:\s*(\d[\w.]*)", text)
        return "mpich", found.group(1) if found else ""
    return None


def command_line(launcher: Launcher, job: Job, exported: Sequence[str]) -> list[str]:
    """The words that start `job`; exported: environment variables that other nodes need too."""
    count = str(job.ranks)
    if launcher.kind == "srun":
        nodes = str(min(job.nodes, job.ranks))
        words = [launcher.path, "-N", nodes, "-n", count, "--mpi=pmix", "--kill-on-bad-exit=1"]
        words.append("--cpu-bind=none")
        if job.cpus and job.ranks > sum(job.cpus):
            words.append("--overcommit")
        elif job.cpus and job.ranks % job.nodes == 0 and min(job.cpus) >= job.ranks_per_node:
            # The same number on every node: Slurm alone would fill the first ones.
            words.append(f"--ntasks-per-node={job.ranks_per_node}")
    elif launcher.kind == "openmpi":
        words = [launcher.path, "-n", count, "--bind-to", "none"]
        words += ["--oversubscribe"] if launcher.major < 5 else ["--map-by", ":OVERSUBSCRIBE"]
        for name in exported:
            # mpirun passes OMPI_ variables on by itself, and warns when told to.
            if not name.startswith("OMPI_"):
                words += ["-x", name]
    else:
        words = [launcher.path, "-n", count]
    return [*words, *job.program]


def job_environment(launcher: Launcher, job: Job, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables to add to `environ` for the job; what the user has set already stays as it is.

    OMP_NUM_THREADS shares the cores of a node among its ranks.  MPI4PY_RC_THREAD_LEVEL is the
    level at which windows work between nodes.  The rest: see launchenv.transport_defaults.
    """
    defaults = {
        "OMP_NUM_THREADS": str(max(1, job.cores // job.ranks_per_node)),
        "MPI4PY_RC_THREAD_LEVEL": "serialized",
    }
    if launcher.kind == "openmpi":
        env = LaunchEnv(
            "mpirun-openmpi",
            size=job.ranks,
            local_size=job.ranks_per_node,
            num_nodes=job.nodes,
            mpi_version=launcher.version or None,
        )
        defaults.update(transport_defaults(env, cores=job.cores))
        if job.root:
            defaults["OMPI_ALLOW_RUN_AS_ROOT"] = "1"
            defaults["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    elif launcher.kind == "mpich" and launcher.embedded:
        # The wheel is built with ofi and ucx; see transport_defaults for why not ucx.
        defaults["MPIR_CVAR_CH4_NETMOD"] = "ofi"
    added = {name: value for name, value in defaults.items() if name not in environ}
    added[SERVER_NUM] = str(job.server_num)
    added[WORKER_NUM] = str(job.worker_num)
    if job.log_dir is not None:
        added[LOG_DIR] = job.log_dir
    return added


def shown(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Environment and command as one line that a shell would take."""
    assignments = [f"{name}={shlex.quote(environment[name])}" for name in sorted(environment)]
    return " ".join([*assignments, shlex.join(command)])


def brief(launcher: Launcher, job: Job) -> str:
    """The command in short, for a person: no environment, programs without their folders."""
    words = command_line(launcher, job, [])
    for position in (0, len(words) - len(job.program)):
        words[position] = PurePath(words[position]).name
    return shlex.join(words)


def cpus_of_allocation(environ: Mapping[str, str]) -> tuple[int, ...]:
    """CPUs of each node of a Slurm allocation; empty when SLURM_JOB_CPUS_PER_NODE does not say."""
    return tuple(per_node_counts(environ.get("SLURM_JOB_CPUS_PER_NODE", "")) or ())
