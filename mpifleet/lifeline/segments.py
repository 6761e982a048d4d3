"""MPI's own files in /dev/shm: found, removed, and hidden so that no kill leaves them behind."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

# Files that Open MPI 4 and 5, MPICH and Intel MPI keep in /dev/shm, by the start of their names.
_SEGMENT = re.compile(
    r"(vader_segment|sm_segment|osc_sm|osc_rdma|open_mpi|ompi|mpich|MPICH|Intel_MPI|shm_col)"
)
# Open MPI's one file per rank that lives as long as the job; it ends in the rank on the node.
_OF_A_RANK = re.compile(r"/dev/shm/(?:.+/)?(vader|sm)_segment\..*\.(\d+)")
_DELETED = " (deleted)"


class RankSegments:
    """The files, one per rank of this node, through which Open MPI's ranks talk on a node.

    Open MPI removes them in MPI_Finalize, so ranks that are killed leave them.  Once every rank
    of the node maps all of them their names are of no more use: hide() removes the names, and
    whatever ends the job then, the memory goes with its last process.  restore() makes an empty
    file for MPI_Finalize to remove, which complains otherwise.

    Collective over the node, done by the caller: make it after the ranks have met in a node
    barrier, hide() only if complete on all, restore() right before MPI_Finalize.
    """

    def __init__(self, node_size: int) -> None:
        named = [path for path in _mapped_paths("self") if _OF_A_RANK.fullmatch(path)]
        self.paths = tuple(sorted(set(named)))
        self._hidden = False
        self._node_size = node_size

    @property
    def complete(self) -> bool:
        """Whether this rank maps the file of every rank on the node; false without such files."""
        return len(self.paths) == self._node_size

    def hide(self) -> None:
        """Remove the files' names.  To be called only if `complete` holds on the whole node."""
        unlink_segments(self.paths)
        self._hidden = True

    def restore(self, node_rank: int) -> None:
        """Make this rank's file again, empty; nothing happens when hide() was not called."""
        for path in self.paths if self._hidden else ():
            named = _OF_A_RANK.fullmatch(path)
            if named and int(named.group(2)) == node_rank:
                with contextlib.suppress(OSError):
                    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        self._hidden = False


def mapped_segments(pid: str = "self") -> set[str]:
    """Paths of the MPI segments in /dev/shm that process `pid` maps, also those without a name.

    Empty where /proc is absent or the process belongs to someone else.
    """
    paths = {path.removesuffix(_DELETED) for path in _mapped_paths(pid)}
    return {path for path in paths if is_segment(path)}


def is_segment(path: str) -> bool:
    """Whether `path` is a file that an MPI library keeps in /dev/shm or a folder of it.

    Judged by its name alone.
    """
    folder, name = os.path.split(path)
    return f"{folder}/".startswith("/dev/shm/") and _SEGMENT.match(name) is not None


def unlink_segments(paths: Iterable[str]) -> list[str]:
    """Remove those of `paths` that belong to this user; returns the ones removed.

    The memory itself lives until the last process that maps it ends.
    """
    removed = []
    for path in sorted(paths):
        with contextlib.suppress(OSError):
            if Path(path).lstat().st_uid == os.geteuid():
                Path(path).unlink()
                removed.append(path)
    return removed


def _mapped_paths(pid: str) -> list[str]:
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    fields = [line.split(None, 5) for line in maps.splitlines()]
    return [words[5] for words in fields if len(words) == 6]
