"""Signals seen by a thread, even while the main thread is inside a C call."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType

WATCHED = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class SignalPipe:
    """A pipe whose read end holds one byte, the signal's number, for each signal that came.

    Python's C-level handler writes the byte as the signal arrives; a Python-level handler would
    wait until the main thread comes back from MPI.  Handlers of the user are left alone: theirs
    win, whether installed before or after, and so does a signal that is ignored (nohup).
    """

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        os.set_blocking(self._write_fd, False)
        self._restore: dict[int, object] = {}

    def install(self) -> None:
        """Watch SIGTERM, SIGHUP and SIGINT.  Does nothing outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in WATCHED:
            self.watch(number)
        before_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        if before_fd != -1:
            # An event loop has the wakeup descriptor: leave it, the handlers alone must do.
            signal.set_wakeup_fd(before_fd)

    def watch(self, number: int) -> None:
        """Watch this signal too, unless somebody handles it.  See install."""
        if threading.current_thread() is not threading.main_thread():
            return
        before = signal.getsignal(number)
        if before in (signal.SIG_DFL, signal.default_int_handler):
            self._restore[number] = before
            signal.signal(number, self._handle)

    def arrived(self) -> list[int]:
        """Numbers of the signals that came and are still ours to act on."""
        with contextlib.suppress(BlockingIOError):
            return [n for n in os.read(self.read_fd, 512) if self._is_ours(n)]
        return []

    def forget_in_child(self) -> None:
        """In a forked child: default signals again, and nothing written into the parent's pipe."""
        with contextlib.suppress(ValueError):
            if self._restore:
                signal.set_wakeup_fd(-1)
            for number, before in self._restore.items():
                if self._is_ours(number):
                    signal.signal(number, before)  # type: ignore[arg-type]
        for fd in (self.read_fd, self._write_fd):
            with contextlib.suppress(OSError):
                os.close(fd)

    def wake(self) -> None:
        """Wake the reader without a signal."""
        with contextlib.suppress(OSError):
            os.write(self._write_fd, b"\0")

    def _is_ours(self, number: int) -> bool:
        return number in self._restore and signal.getsignal(number) == self._handle

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        # Also written by the C-level handler when the wakeup descriptor is ours; twice is harmless.
        with contextlib.suppress(OSError):
            os.write(self._write_fd, bytes([number]))
