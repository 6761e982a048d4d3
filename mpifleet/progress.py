"""Where training stands: a moving line on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from mpifleet.step_clock import StepClock

__all__ = ["PLAIN_EVERY_S", "TrainProgress"]

PLAIN_EVERY_S = 5.0

Batch = TypeVar("Batch")


class TrainProgress:
    """Counts the samples of a pass over batches and shows them, with their rate and the loss.

    title: what the line begins with, for instance "epoch 0".  total: samples of all workers, None
    if unknown.  num_workers: each is taken to be as far as this one.  visible: whether to show
    anything at all; one worker's line is enough.  clock: the optimizer's, for where a step's time
    goes.  Written to stderr.
    """

    def __init__(
        self,
        title: str,
        total: int | None = None,
        num_workers: int = 1,
        visible: bool = True,
        clock: StepClock | None = None,
    ) -> None:
        self.loss = float("nan")
        """The loss to show, set by the training loop whenever it looks at one."""
        self._title, self._total, self._num_workers = title, total, num_workers
        self._visible = visible
        self._clock = clock
        self._first_split = clock.split() if clock else None
        self._start_s = time.monotonic()
        self._said_s = self._start_s
        self._done = 0

    def over(self, batches: Iterable[Batch], size: Callable[[Any], int] = len) -> Iterator[Batch]:
        """The same batches, counted when the next one is asked for; size: samples in a batch."""
        console = Console(stderr=True)
        moving = self._visible and console.is_terminal
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console, disable=not moving) as bar:
            task = bar.add_task(self._title, total=self._total, text="")
            for batch in batches:
                yield batch
                self._done += size(batch) * self._num_workers
                bar.update(task, completed=self._done, text=self._rate_text())
                if time.monotonic() - self._said_s > PLAIN_EVERY_S and not moving:
                    self._say(self._left_text())
        if self._clock is not None and self._first_split is not None and self._visible:
            split = self._clock.split().since(self._first_split)
            print(f"{self._title}: {split.text()}", file=sys.stderr, flush=True)
        if not moving:
            self._say(f", done in {time.monotonic() - self._start_s:.1f} s")

    def _rate(self) -> float:
        return self._done / max(time.monotonic() - self._start_s, 1e-9)

    def _rate_text(self) -> str:
        text = f"{self._done:,} samples, {self._rate():,.0f} samples/s, loss {self.loss:.4f}"
        return text + self._step_text()

    def _step_text(self) -> str:
        """How long a step takes and the two phases that take most of it."""
        if self._clock is None or self._first_split is None:
            return ""
        return f", {self._clock.split().since(self._first_split).text(most=2)}"

    def _left_text(self) -> str:
        if self._total is None or not self._done:
            return ""
        return f", {max(self._total - self._done, 0) / self._rate():.0f} s left"

    def _say(self, end: str) -> None:
        self._said_s = time.monotonic()
        if self._visible:
            print(f"{self._title}: {self._rate_text()}{end}", file=sys.stderr, flush=True)
