"""A moving line on the terminal while a checkpoint is read or written, once that takes long."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

QUIET_S = 1.0
"""What takes no longer shows nothing."""


class BytesRead:
    """Counts bytes and shows them on stderr, if that is a terminal; a context manager.

    title: what the line begins with.  total: bytes to read or write.  The line is gone at the end.
    """

    def __init__(self, title: str, total: int) -> None:
        self._title, self._total, self._done = title, total, 0
        self._console = Console(stderr=True)
        self._begin_s = time.monotonic()
        self._shown: Progress | None = None

    def __enter__(self) -> BytesRead:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._shown is not None:
            self._shown.stop()

    def add(self, num_bytes: int) -> None:
        """So many more have been read or written."""
        self._done += num_bytes
        if self._shown is None:
            if not self._console.is_terminal or time.monotonic() - self._begin_s < QUIET_S:
                return
            self._shown = self._begin()
        self._shown.update(self._shown.task_ids[0], completed=self._done)

    def _begin(self) -> Progress:
        shown = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(20),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        shown.add_task(self._title, total=self._total)
        shown.start()
        return shown
