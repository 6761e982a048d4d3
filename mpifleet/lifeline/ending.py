"""How a process of a failing job ends: last words, no shared memory left behind, no MPI call."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from mpifleet.lifeline.segments import mapped_segments, unlink_segments
from mpifleet.lifeline.wire import place

FLUSH_S = 0.3


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

    def say_last(self, text: str) -> None:
        """Write one line, after which nothing of this process comes to where it was shown.

        Open MPI 4 explains at length that a peer has gone, from the thread that waits for it.
        """
        with contextlib.suppress(OSError):
            self.shown = tuple(os.dup(fd) for fd in self.shown)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        self.say(text)

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


def obey(end: dict[str, Any], voice: Voice, wait_s: float) -> NoReturn:
    """End this process as the hub's message `end` says.

    wait_s: before that; the hub in this process, where it is, speaks last and ends it.
    """
    voice.say(end["text"], show=False)
    if end["stall"]:
        voice.dump_stacks()
    here = place()
    kill(pid for its_place, pid in end["kill"] if its_place == here)
    time.sleep(wait_s)
    end_process(end["status"], voice)


def kill(pids: Iterable[int]) -> None:
    """SIGKILL each process that is not this one; one that is gone already is no error."""
    for pid in pids:
        if pid > 1 and pid != os.getpid():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
