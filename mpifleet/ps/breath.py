"""What a server does between slices of long work, so that others are never kept for long."""

import time
from collections.abc import Callable

LOOK_S = 0.5e-3
"""Slices are finer than others need: a look at MPI costs some microseconds, the time of day none.
With slices of at most a few milliseconds no two looks are 5 ms apart."""


class Breath:
    """Called between slices; looks at MPI when the last look was LOOK_S ago.

    beat: shows workers that this server lives; progress: lets MPI move what others started.
    """

    def __init__(
        self,
        beat: Callable[[], None],
        progress: Callable[[], None],
        now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._beat = beat
        self._progress = progress
        self._now_s = now_s
        self._looked_s = now_s()

    def __call__(self) -> None:
        """One breath."""
        now_s = self._now_s()
        if now_s - self._looked_s >= LOOK_S:
            self._beat()
            self._progress()
            self._looked_s = now_s
