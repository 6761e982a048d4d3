"""An uncaught exception or a non-zero sys.exit on one rank ends the job."""

from __future__ import annotations

import atexit
import sys
import threading
from types import TracebackType
from typing import Any, NoReturn

from mpifleet.launchenv import PREEMPTED
from mpifleet.lifeline.line import Lifeline
from mpifleet.lifeline.stopping import agreed_here


def install_excepthook(line: Lifeline) -> None:
    """End the job through `line` when this rank fails; a second call does nothing.

    The earlier sys.excepthook and threading.excepthook run first, so the traceback is printed
    as the user arranged; the line that names rank and role comes after it.  sys.exit is wrapped
    to remember a non-zero status, on which the job ends at exit.  A process forked from the rank
    keeps the earlier behaviour: its end is not the rank's.
    """
    if getattr(sys.excepthook, "of_mpifleet", False):
        return
    _hook_main(line)
    _hook_threads(line)
    _hook_exit(line)


def describe(kind: type[BaseException], error: BaseException | None) -> str:
    """The exception in one line: its class and the first line of its message."""
    lines = str(error).strip().splitlines() if error is not None else []
    return f"{kind.__name__}: {lines[0][:500]}" if lines else kind.__name__


def _hook_main(line: Lifeline) -> None:
    earlier = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        try:
            earlier(kind, error, traceback)
        finally:
            if not line.in_forked_child:
                status = 130 if issubclass(kind, KeyboardInterrupt) else 1
                line.fail(status, f"failed: {describe(kind, error)}")

    hook.of_mpifleet = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _hook_threads(line: Lifeline) -> None:
    earlier = threading.excepthook

    def hook(args: Any) -> None:
        if issubclass(args.exc_type, SystemExit):
            return
        try:
            earlier(args)
        finally:
            if not line.in_forked_child:
                thread = args.thread.name if args.thread is not None else "a thread"
                line.fail(1, f"failed in {thread}: {describe(args.exc_type, args.exc_value)}")

    threading.excepthook = hook


def _hook_exit(line: Lifeline) -> None:
    earlier = sys.exit
    asked: list[Any] = []

    def remembering_exit(status: Any = None, /) -> NoReturn:
        asked[:] = [status]
        earlier(status)

    def end_if_asked() -> None:
        status = asked[0] if asked else None
        if status is None or status == 0 or line.said_goodbye or line.in_forked_child:
            return
        if status == PREEMPTED and agreed_here.is_set():
            return  # all workers leave so, and end in order
        number = status & 0xFF if isinstance(status, int) else 1
        reason = "" if isinstance(status, int) else f": {str(status)[:500]}"
        line.fail(number, f"left with exit status {number}{reason}")

    sys.exit = remembering_exit
    atexit.register(end_if_asked)
