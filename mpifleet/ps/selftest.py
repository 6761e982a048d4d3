"""Which home fits this job's links: asked once at the start, the same answer on every rank.

All ranks on one node: the node home, whose pulls are plain loads. Several nodes: the world home
where an indexed one-sided read of another node's memory is right and completes while its owner is
outside MPI, which takes hardware; else the node home, whose far pulls are served.
Combinations known to be bad are never tried. The trial uses request-based calls under a deadline,
so that it cannot hang the job: on a timeout its window is abandoned.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from mpifleet.mpi import serial
from mpifleet.roles import Role, Roles

DEADLINE_S = 0.05
PATIENCE_S = 2.0
_ROWS, _DIM, _PICK = 256, 16, 64


@dataclass(frozen=True)
class KnownBad:
    """An MPI on which indexed reads between nodes must not even be tried."""

    vendor: str
    versions: tuple[int, ...]
    reason: str


KNOWN_BAD = (
    KnownBad("Open MPI", (4,), "its one-sided calls between nodes need the target inside MPI"),
    KnownBad("Open MPI", (5,), "osc/rdma over TCP moves every row of an indexed read alone"),
)
"""Only without a fabric of their own: see `_has_fabric`."""


def choose_home(mpi: ModuleType, roles: Roles, wanted: str) -> tuple[str, str]:
    """(home, reason). Collective.

    wanted: "node", "world", or "auto" to decide here.
    """
    if wanted != "auto":
        return wanted, "set by strategy.table_home"
    if roles.one_node:
        return "node", "all ranks share one node's memory"
    bad = known_bad(mpi)
    if bad:
        return "node", bad
    if _reads_are_one_sided(mpi, roles):
        return "world", "reads between nodes complete without their owner"
    return "node", "reads between nodes need their owner inside MPI"


def known_bad(mpi: ModuleType) -> str:
    """Why this MPI's indexed reads between nodes are not even tried; "" when they are."""
    vendor, version = mpi.get_vendor()
    for entry in KNOWN_BAD:
        if entry.vendor == vendor and version[: len(entry.versions)] == entry.versions:
            return (
                "" if _has_fabric() else f"{vendor} {version[0]} without a fabric: {entry.reason}"
            )
    return ""


def _has_fabric() -> bool:
    """Whether this node has an RDMA device (InfiniBand, RoCE, Slingshot, Omni-Path)."""
    classes = [Path("/sys/class") / kind for kind in ("infiniband", "cxi", "hfi1")]
    return any(folder.is_dir() and any(folder.iterdir()) for folder in classes)


def _reads_are_one_sided(mpi: ModuleType, roles: Roles) -> bool:
    with serial:
        window = mpi.Win.Allocate(_ROWS * _DIM * 4, 4, comm=roles.world)
        memory = np.frombuffer(window.tomemory(), np.float32)
        memory[:] = _pattern(roles.world.rank)
        window.Lock_all()
        roles.world.Barrier()
        target = _far_server(roles)
        out = np.zeros((_PICK, _DIM), np.float32)
        request = _read(mpi, window, target, out) if target is not None else None
        good = _completes(request, DEADLINE_S)
        if roles.role is Role.SERVER:
            time.sleep(2 * DEADLINE_S)  # outside MPI: whoever reads must manage alone
        finished = _completes(request, PATIENCE_S)
        roles.world.Barrier()  # the owners are inside MPI meanwhile and move what needs them
        if target is not None and finished:
            picked = _pattern(target).reshape(_ROWS, _DIM)[_picked_rows()]
            good = good and bool((out == picked).all())
        verdict = np.array([good, finished], np.int32)
        roles.world.Allreduce(mpi.IN_PLACE, verdict, op=mpi.MIN)
        if verdict[1]:  # else the window is abandoned: freeing it would wait for what never ends
            del memory
            window.Unlock_all()
            window.Free()
    return bool(verdict[0])


def _pattern(rank: int) -> np.ndarray:
    return np.arange(_ROWS * _DIM, dtype=np.float32) + 1000 * rank


def _picked_rows() -> np.ndarray:
    return np.arange(_PICK, dtype=np.int32) * 3 + 1


def _far_server(roles: Roles) -> int | None:
    if roles.role is Role.SERVER:
        return None
    far = [r for r in roles.server_ranks if roles.nodes[r] != roles.nodes[roles.world.rank]]
    return far[roles.index % len(far)] if far else None


def _read(mpi: ModuleType, window: Any, target: int, out: np.ndarray) -> Any:
    row = mpi.FLOAT.Create_contiguous(_DIM).Commit()
    rows = row.Create_indexed_block(1, _picked_rows()).Commit()
    request = window.Rget([out, mpi.FLOAT], target, (0, 1, rows))
    rows.Free()
    row.Free()
    return request


def _completes(request: Any, within_s: float) -> bool:
    if request is None:
        return True
    end_s = time.monotonic() + within_s
    while not request.Test():
        if time.monotonic() > end_s:
            return False
        time.sleep(1e-4)
    return True
