"""How a process of a failing job ends: last words, no shared memory left behind, no MPI call."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

FLUSH_S = 0.3
# Files that Open MPI 4 and 5, MPICH and Intel MPI keep in /dev/shm, by the start of their names.
MPI_SEGMENT = re.compile(
    r"(vader_segment|sm_segment|osc_sm|osc_rdma|open_mpi|ompi|mpich|MPICH|Intel_MPI|shm_col)"
)


class Voice:
    """Where a rank's last words go.

    shown: file descriptors that a person or the launcher reads.  logged: the rank's own log when
    that is another file.  drain: called before the end, lets threads that copy output finish.
    """

    def __init__(
        self,
        shown: Iterable[int] = (2,),
        logged: Iterable[int] = (),
        drain: Callable[[], None] | None = None,
    ) -> None:
        self.shown = tuple(shown)
        self.logged = tuple(logged)
        self._drain = drain

    def say(self, text: str, show: bool = True) -> None:
        """Write one line at once, past Python's buffers; a closed terminal is no error."""
        line = f"mpifleet: {text}\n".encode(errors="replace")
        for fd in (*(self.shown if show else ()), *self.logged):
            with contextlib.suppress(OSError):
                os.write(fd, line)

    def dump_stacks(self) -> None:
        """Write the stack of every thread of this process."""
        for fd in self.logged or self.shown:
            with contextlib.suppress(OSError, ValueError):
                faulthandler.dump_traceback(fd, all_threads=True)

    def flush(self) -> None:
        """Flush Python's own output, giving up after FLUSH_S.

        In a thread: another one may sit in a blocked write and hold the lock of the stream.
        """

        def flush_all() -> None:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            if self._drain is not None:
                self._drain()

        flusher = threading.Thread(target=flush_all, name="mpifleet-flush", daemon=True)
        try:
            flusher.start()
        except RuntimeError:  # the interpreter is already shutting down
            return
        flusher.join(FLUSH_S)


def end_process(status: int, voice: Voice) -> NoReturn:
    """End this process now with `status`, from any thread, whatever the main thread waits for."""
    try:
        voice.flush()
        unlink_segments(mapped_segments())
    finally:
        os._exit(status or 1)


def kill(pids: Iterable[int]) -> None:
    """SIGKILL each process that is not this one; one that is gone already is no error."""
    for pid in pids:
        if pid > 1 and pid != os.getpid():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def mapped_segments(pid: str = "self") -> set[str]:
    """Paths of the MPI segments in /dev/shm that process `pid` maps; none where /proc is absent."""
    paths = set()
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
            for line in maps:
                fields = line.rstrip("\n").split(None, 5)
                if len(fields) == 6 and is_segment(fields[5]):
                    paths.add(fields[5])
    except OSError:
        pass
    return paths


def is_segment(path: str) -> bool:
    """Whether `path` is a file that an MPI library keeps in /dev/shm, judged by its name."""
    folder, name = os.path.split(path)
    return folder == "/dev/shm" and MPI_SEGMENT.match(name) is not None


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
