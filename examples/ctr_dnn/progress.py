"""Where training stands: a moving line on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from mpifleet.data.samples import Samples

PLAIN_EVERY_S = 5.0


class TrainProgress:
    """Counts the samples of one epoch; shows them if `visible`."""

    def __init__(self, epoch: int, total: int | None, num_workers: int, visible: bool) -> None:
        """total: samples of all workers, None if unknown.  This worker's are taken as 1 of each."""
        self.loss = float("nan")
        self._epoch, self._total, self._num_workers = epoch, total, num_workers
        self._visible = visible
        self._start_s = time.monotonic()
        self._said_s = self._start_s
        self._done = 0

    def over(self, batches: Iterator[Samples]) -> Iterator[Samples]:
        """The same batches, counted when the next one is asked for."""
        console = Console(stderr=True)
        moving = self._visible and console.is_terminal
        columns = (
            TextColumn("epoch {task.description}"),
            BarColumn(),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console, disable=not moving) as bar:
            task = bar.add_task(str(self._epoch), total=self._total, text="")
            for batch in batches:
                yield batch
                self._done += batch.num_samples * self._num_workers
                bar.update(task, completed=self._done, text=self._rate_text())
                if time.monotonic() - self._said_s > PLAIN_EVERY_S and not moving:
                    self._say(self._left_text())
        if not moving:
            self._say(f", done in {time.monotonic() - self._start_s:.1f} s")

    def _rate(self) -> float:
        return self._done / max(time.monotonic() - self._start_s, 1e-9)

    def _rate_text(self) -> str:
        return f"{self._done:,} samples, {self._rate():,.0f} samples/s, loss {self.loss:.4f}"

    def _left_text(self) -> str:
        if self._total is None or not self._done:
            return ""
        return f", {max(self._total - self._done, 0) / self._rate():.0f} s left"

    def _say(self, end: str) -> None:
        self._said_s = time.monotonic()
        if self._visible:
            print(f"epoch {self._epoch}: {self._rate_text()}{end}", file=sys.stderr, flush=True)
