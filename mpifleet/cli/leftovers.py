"""What a job may leave behind: processes of its session and MPI's files in /dev/shm."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from mpifleet.cli.processes import processes
from mpifleet.lifeline.segments import is_segment, mapped_segments, unlink_segments


def kill_session(session: int, but: int = 0) -> list[int]:
    """SIGKILL every process of the session that the launcher led; returns their ids.

    but: the id of one that is spared.
    """
    killed = []
    for process in processes():
        ours = process.session == session and process.state != "Z"
        if ours and process.pid not in (os.getpid(), but):
            with contextlib.suppress(OSError):
                os.kill(process.pid, signal.SIGKILL)
                killed.append(process.pid)
    return killed


def remove_leftovers(since_s: float) -> list[str]:
    """Remove MPI's files in /dev/shm made since `since_s` that no living process maps.

    Looked at twice: a job that is just starting maps its file a moment after making it.
    """
    unmapped = _unmapped(since_s)
    if unmapped:
        time.sleep(0.3)
        unmapped &= _unmapped(since_s)
    return unlink_segments(unmapped)


def _unmapped(since_s: float) -> set[str]:
    candidates = set()
    for path in Path("/dev/shm").rglob("*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if status.st_uid == os.geteuid() and status.st_mtime >= since_s - 1.0:
                candidates.add(str(path))
    candidates = {path for path in candidates if is_segment(path)}
    if candidates:
        for process in processes():
            candidates -= mapped_segments(str(process.pid))
    return candidates
