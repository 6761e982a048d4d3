"""What memory a process and its shared windows really take, as Linux counts it.

Pages of shared memory are counted once however many processes map them: each process is charged
its share of a page (PSS), and the shares of all processes add up to the pages.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

_SMAPS, _STATUS = Path("/proc/self/smaps"), Path("/proc/self/status")
_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ (\S{4}) \S+ (\S+) (\d+)")
PERIOD_S = 0.01

File = tuple[str, str]
"""Device and inode of a mapped file, of a file without a name too."""


def shared_of(smaps: str) -> dict[File, int]:
    """This process's share, in bytes, of every file that `smaps` shows as mapped to be shared."""
    found: dict[File, int] = {}
    file: File | None = None
    for line in smaps.splitlines():
        if head := _MAPPING.match(line):
            rights, device, inode = head.groups()
            file = (device, inode) if rights[3] == "s" else None
        elif file is not None and line.startswith("Pss:"):
            found[file] = found.get(file, 0) + int(line.split()[1]) * 1024
    return found


def shared_bytes() -> dict[File, int]:
    """This process's share of every file that it maps to be shared."""
    return shared_of(_SMAPS.read_text())


def new_bytes(before: Mapping[File, int], now: Mapping[File, int]) -> int:
    """Bytes of the files that were not mapped before."""
    return sum(size for file, size in now.items() if file not in before)


def private_of(status: str) -> int:
    """Resident bytes that no file stands behind, from the text of a process's `status`.

    Raises ValueError where it does not tell.
    """
    for line in status.splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise ValueError("no line RssAnon in this process's status: Linux 4.5 or newer tells it")


def private_bytes() -> int:
    """Resident bytes of this process that no file stands behind."""
    return private_of(_STATUS.read_text())


class PrivatePeak:
    """The most private memory that this process has while the context is open.

    peak_bytes: found by looking every PERIOD_S, in a thread that makes no MPI call.
    """

    def __init__(self) -> None:
        self.peak_bytes = private_bytes()
        self._done = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._done.wait(PERIOD_S):
            self.peak_bytes = max(self.peak_bytes, private_bytes())

    def __enter__(self) -> PrivatePeak:
        self._watch.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        self._watch.join()
        self.peak_bytes = max(self.peak_bytes, private_bytes())
