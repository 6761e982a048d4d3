"""What a save takes of the servers' memory: sampled while it runs, from outside."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.process_memory import private_of

PERIOD_S = 0.002
MIB = 1 << 20


def other_ranks() -> list[int]:
    """Process ids of this job's other ranks: who runs the same command under the same launcher."""
    mine = _command(os.getpid())
    siblings = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [
        pid
        for pid in siblings
        if pid != os.getpid() and _command(pid) == mine and _parent(pid) == os.getppid()
    ]


def extra_bytes(call: Callable[[], None]) -> int:
    """How far the private memory of the other ranks, added up, rose above where it began."""
    pids = other_ranks()
    most = begin = _private(pids)
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.is_set():
            most = max(most, _private(pids))
            time.sleep(PERIOD_S)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        call()
    finally:
        done.set()
        watcher.join()
    return most - begin


def _private(pids: list[int]) -> int:
    return sum(private_of(Path(f"/proc/{pid}/status").read_text()) for pid in pids)


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError, ValueError):
        # The name in parentheses may hold anything; the parent is the second word after it.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0
