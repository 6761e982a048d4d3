"""Sends what a rank prints, from Python or C, to its own log file."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import selectors
import sys
import termios
import threading
import time
from pathlib import Path

from mpifleet.lifeline.ending import Voice

DRAIN_S = 0.3


def redirect(role: str, index: int, rank: int, log_dir: str | Path) -> Voice:
    """Send file descriptors 1 and 2 to log_dir/<role>log.<index>; call once, early in the job.

    role: "server" or "worker"; index: among the ranks of that role.  Rank 0 stays on the
    terminal as well.  The file is begun anew.  Returns the voice for this rank's last words: they
    go to the log and to the stderr that the launcher gave us.

    Raises OSError when the file cannot be made.
    """
    folder = Path(log_dir)
    folder.mkdir(parents=True, exist_ok=True)
    _flush()
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    log_fd = os.open(folder / f"{role}log.{index}", flags, 0o666)
    terminal = (_keep(1), _keep(2))
    if rank != 0:
        os.dup2(log_fd, 1)
        os.dup2(log_fd, 2)
        return Voice(shown=(terminal[1],), logged=(log_fd,))
    tee = _Tee(log_fd, terminal)
    atexit.register(tee.close)
    return Voice(shown=(terminal[1],), logged=(log_fd,), drain=tee.drain)


class _Tee:
    """Copies what comes through descriptors 1 and 2 to the terminal's own and to the log."""

    def __init__(self, log_fd: int, terminal: tuple[int, int]) -> None:
        self._log_fd = log_fd
        self._terminal = terminal
        self._sources: dict[int, int] = {}
        for fd, target in zip((1, 2), terminal, strict=True):
            read_fd, write_fd = os.pipe()
            os.dup2(write_fd, fd)
            os.close(write_fd)
            self._sources[read_fd] = target
        self._busy = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="mpifleet-log", daemon=True)
        self._thread.start()

    def drain(self) -> None:
        """Wait until everything printed so far is copied, at most DRAIN_S."""
        until_s = time.monotonic() + DRAIN_S
        while time.monotonic() < until_s:
            with self._busy:
                if not any(_waiting_bytes(fd) for fd in self._sources):
                    return
            time.sleep(0.005)

    def close(self) -> None:
        """Give the terminal back to descriptors 1 and 2."""
        _flush()
        self.drain()
        for fd, target in zip((1, 2), self._terminal, strict=True):
            os.dup2(target, fd)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for fd in self._sources:
                selector.register(fd, selectors.EVENT_READ)
            while selector.get_map():
                for key, _ in selector.select():
                    if not self._copy(key.fd):
                        selector.unregister(key.fd)

    def _copy(self, fd: int) -> bool:
        with self._busy:
            chunk = os.read(fd, 65536)
            for target in (self._sources[fd], self._log_fd):
                with contextlib.suppress(OSError):
                    rest = chunk
                    while rest:
                        rest = rest[os.write(target, rest) :]
        return bool(chunk)


def _keep(fd: int) -> int:
    """A copy of `fd` above the numbers that programs expect to be standard streams."""
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)


def _waiting_bytes(fd: int) -> int:
    counted = fcntl.ioctl(fd, termios.FIONREAD, b"\0" * 4)
    return int.from_bytes(counted, sys.byteorder)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
