"""Sees which of the ranks that a launcher started on this node ends first.

For a rank that dies before the lifeline watches it, and a launcher that says nothing of it: Open
MPI 5's is silent about a rank that is killed while the ranks join each other in MPI_Init.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from mpifleet.cli.processes import processes

RANK_VARIABLES = (b"OMPI_COMM_WORLD_RANK", b"PMI_RANK")


class RankProcesses:
    """The ranks among the children of a launcher, known by their environment.

    Needs Linux 5.3 for file descriptors of processes; without them nobody is ever seen.
    """

    def __init__(self, launcher: int, count: int) -> None:
        self.first_gone: list[int] = []
        self._launcher = launcher
        self._missing = count
        self._ranks: dict[int, int] = {}  # rank by descriptor

    @property
    def descriptors(self) -> list[int]:
        """What to wait for beside other things; readable once a rank's process has ended."""
        return [] if self.first_gone else list(self._ranks)

    def look(self) -> None:
        """Find ranks that have come since the last look; does nothing once all are known."""
        if not self._missing or self.first_gone:
            return
        known = set(self._ranks.values())
        children = [p.pid for p in processes() if p.parent == self._launcher]
        for pid in children:
            with contextlib.suppress(OSError, ValueError):
                rank = _rank_of(pid)
                if rank is not None and rank not in known:
                    self._ranks[os.pidfd_open(pid)] = rank
                    self._missing -= 1

    def note(self, readable: list[int]) -> None:
        """Remember who ended first; readable: those of `descriptors` that are."""
        if not self.first_gone:
            self.first_gone = sorted(self._ranks[fd] for fd in readable if fd in self._ranks)

    def close(self) -> None:
        """Close the descriptors."""
        for fd in self._ranks:
            os.close(fd)
        self._ranks.clear()


def _rank_of(pid: int) -> int | None:
    for setting in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        name, _, value = setting.partition(b"=")
        if name in RANK_VARIABLES:
            return int(value)
    return None
