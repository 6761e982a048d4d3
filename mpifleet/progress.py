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
_MOVE_EVERY_S = 0.1
_LEAST_BAR, _MOST_BAR = 10, 40  # characters
_LEFT = 7  # characters of the time left, as rich shows it

Batch = TypeVar("Batch")


class TrainProgress:
    """Counts the samples of a pass over batches and shows them, with their rate and the loss.

    title: what the line begins with, for instance "epoch 0".  total: samples of all workers, None
    if unknown.  num_workers: each is taken to be as far as this one.  visible: whether to show
    anything at all; one worker's line is enough.  clock: the optimizer's, for where a step's time
    goes.  at_most: the count never passes it, where workers have unequal shares.  Written to
    stderr; the end leaves one line, the same on a terminal as elsewhere.
    """

    def __init__(
        self,
        title: str,
        total: int | None = None,
        num_workers: int = 1,
        visible: bool = True,
        clock: StepClock | None = None,
        at_most: int | None = None,
    ) -> None:
        self.loss = float("nan")
        """The loss to show, set by the training loop whenever it looks at one."""
        self._title, self._total, self._num_workers = title, total, num_workers
        self._visible = visible
        self._clock = clock
        self._at_most = sys.maxsize if at_most is None else at_most
        self._first_split = clock.split() if clock else None
        self._start_s = time.monotonic()
        self._said_s = self._start_s
        self._done = 0

    def over(self, batches: Iterable[Batch], size: Callable[[Any], int] = len) -> Iterator[Batch]:
        """The same batches, counted when the next one is asked for; size: samples in a batch."""
        console = Console(stderr=True)
        if self._visible and console.is_terminal:
            yield from self._moving(batches, size, console)
        else:
            for batch in batches:
                yield batch
                self._count(size(batch))
                if time.monotonic() - self._said_s > PLAIN_EVERY_S:
                    self._say(self._left_text())
        self._say(f", done in {time.monotonic() - self._start_s:.1f} s")

    def _moving(
        self, batches: Iterable[Batch], size: Callable[[Any], int], console: Console
    ) -> Iterator[Batch]:
        """The batches under a moving line, which is gone after the last."""
        bar = BarColumn()
        columns = (
            TextColumn("{task.description}"),
            bar,
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console, transient=True) as shown:
            task = shown.add_task(self._title, total=self._total, text="")
            for batch in batches:
                yield batch
                self._count(size(batch))
                if time.monotonic() - self._said_s > _MOVE_EVERY_S:
                    self._said_s = time.monotonic()
                    room = console.width - len(self._title) - _LEFT - 3  # a blank between columns
                    text = self._fitting_text(room - _LEAST_BAR)
                    bar.bar_width = max(min(room - len(text), _MOST_BAR), 1)
                    shown.update(task, completed=self._done, text=text)

    def _count(self, num_samples: int) -> None:
        self._done = min(self._done + num_samples * self._num_workers, self._at_most)

    def _rate(self) -> float:
        return self._done / max(time.monotonic() - self._start_s, 1e-9)

    def _texts(self) -> list[str]:
        """Samples, rate and loss."""
        rate = f"{self._rate():,.0f} samples/s"
        return [f"{self._done:,} samples", rate, f"loss {self.loss:.4f}"]

    def _fitting_text(self, width: int) -> str:
        """What fits into `width` characters: the rate always, the phases of a step last."""
        samples, rate, loss = self._texts()
        step = self._step_text()
        fullest_first = (
            [samples, rate, loss, step] if step else [samples, rate, loss],
            [samples, rate, loss],
            [rate, loss],
        )
        texts = (", ".join(parts) for parts in fullest_first)
        return next((text for text in texts if len(text) <= width), rate)

    def _step_text(self) -> str:
        """How long a step takes and the two phases that take most of it; "" before the first."""
        if self._clock is None or self._first_split is None:
            return ""
        split = self._clock.split().since(self._first_split)
        return split.text(most=2) if split.steps else ""

    def _left_text(self) -> str:
        if self._total is None or not self._done:
            return ""
        return f", {max(self._total - self._done, 0) / self._rate():.0f} s left"

    def _say(self, end: str) -> None:
        self._said_s = time.monotonic()
        if not self._visible:
            return
        step = self._step_text()
        line = f"{self._title}: {', '.join(self._texts())}{end}" + (f"; {step}" if step else "")
        print(line, file=sys.stderr, flush=True)
