"""Which home fits this job's links: asked once at the start, the same answer on every rank.

All ranks on one node: the node home, whose pulls are plain loads. Several nodes: the world home
where an indexed one-sided read of another node's memory is right, sums from all workers are exact,
and both complete within 50 ms while the owner is outside MPI, which takes hardware; else the node
home, whose far pulls are served. The lock's fairness is not left to MPI at all: see ps.homes.
Combinations known to be bad are never tried. The trial uses request-based calls under a deadline,
so that it cannot hang the job: on a timeout its window is abandoned.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from mpifleet.mpi import gather_json, serial
from mpifleet.roles import Role, Roles

DEADLINE_S = 0.05
PATIENCE_S = 2.0
_ROWS, _DIM, _PICK, _ADDS = 256, 16, 64, 16
_TABLE_BYTES = _ROWS * _DIM * 4
_NUM_BYTES = _TABLE_BYTES + 64
_ABANDONED: list[Any] = []


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
        return "node", "all ranks are on one node"
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
    """Whether an indexed read of another node is right, quick and alone; and sums are atomic."""
    with serial:
        try:
            window = mpi.Win.Allocate(_NUM_BYTES, 1, comm=roles.world)
        except mpi.Exception:
            return False
        return Trial(mpi, roles, window, _far_server(roles)).run()


class Trial:
    """One trial of the links between nodes over a window of its own. `run` is collective.

    target: the server whose memory this rank reads, None for one that reads none.
    """

    def __init__(self, mpi: ModuleType, roles: Roles, window: Any, target: int | None) -> None:
        self._mpi = mpi
        self._roles = roles
        self._window = window
        self._memory = np.frombuffer(window.tomemory(), np.uint8)[:_NUM_BYTES]
        self._target = target
        self._out = np.zeros((_PICK, _DIM), np.float32)
        self._one = np.ones(1, np.int64)

    def run(self) -> bool:
        """What all ranks found, together."""
        roles, window = self._roles, self._window
        self._memory[:_TABLE_BYTES] = _pattern(roles.world.rank).view(np.uint8)
        self._memory[_TABLE_BYTES:] = 0
        window.Lock_all()
        window.Sync()
        roles.world.Barrier()
        requests = self._start()
        good = _completes(requests, DEADLINE_S)
        if roles.role is Role.SERVER:
            time.sleep(2 * DEADLINE_S)  # outside MPI: whoever reads must manage alone
        finished = _completes(requests, PATIENCE_S)
        if finished:
            window.Flush_all()
        # The owners are inside MPI meanwhile and move what needs them.
        roles.world.Barrier()
        good = self._is_right() and good and finished
        verdict = np.array([good, finished], np.int32)
        roles.world.Allreduce(self._mpi.IN_PLACE, verdict, op=self._mpi.MIN)
        if verdict[1]:
            del self._memory
            window.Unlock_all()
            window.Free()
        else:
            # Freeing it would wait for what never ends, and what may still come needs its buffers.
            _ABANDONED.append((self, requests))
        return bool(verdict[0])

    def _start(self) -> list[Any]:
        if self._target is None:
            return []
        mpi, window = self._mpi, self._window
        row = mpi.FLOAT.Create_contiguous(_DIM).Commit()
        rows = row.Create_indexed_block(1, _picked_rows().tolist()).Commit()
        requests = [window.Rget([self._out, mpi.FLOAT], self._target, (0, 1, rows))]
        rows.Free()
        row.Free()
        first = self._roles.server_ranks[0]
        for _ in range(_ADDS):
            target = (_TABLE_BYTES, 1, mpi.INT64_T)
            requests.append(window.Raccumulate([self._one, mpi.INT64_T], first, target, mpi.SUM))
        return requests

    def _is_right(self) -> bool:
        self._window.Sync()
        adders = sum(gather_json(self._roles.world, self._target is not None))
        if self._target is not None:
            rows = _pattern(self._target).reshape(_ROWS, _DIM)[_picked_rows()]
            return bool((self._out == rows).all())
        if self._roles.world.rank == self._roles.server_ranks[0]:
            total = self._memory[_TABLE_BYTES : _TABLE_BYTES + 8].view(np.int64)[0]
            return int(total) == adders * _ADDS
        return True


def _pattern(rank: int) -> np.ndarray:
    return np.arange(_ROWS * _DIM, dtype=np.float32) + 1000 * rank


def _picked_rows() -> np.ndarray:
    return np.arange(_PICK, dtype=np.int32) * 3 + 1


def _far_server(roles: Roles) -> int | None:
    if roles.role is Role.SERVER:
        return None
    far = [r for r in roles.server_ranks if roles.nodes[r] != roles.nodes[roles.world.rank]]
    return far[roles.index % len(far)] if far else None


def _completes(requests: list[Any], within_s: float) -> bool:
    end_s = time.monotonic() + within_s
    while not all(request.Test() for request in requests):
        if time.monotonic() > end_s:
            return False
        time.sleep(1e-4)
    return True
