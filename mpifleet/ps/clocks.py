"""How far each worker is, so that none gets too far ahead of the slowest (SSP).

Ho et al. 2013, More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

NEVER = int(np.iinfo(np.int64).max)
"""The clock of a worker that nobody waits for."""


class _Servers(Protocol):
    def wait_slowest(self, clock: int) -> int: ...


class StalenessBound:
    """A worker's side: it begins a step when the slowest active worker is near enough.

    Before its step c, counted from 0, all active workers have made at least c - staleness steps,
    applied on every server.  The least clock seen last is remembered: as long as it is enough,
    nothing is read.
    """

    def __init__(self, servers: _Servers, staleness: int) -> None:
        self._servers = servers
        self._staleness = staleness
        self._clock = 0
        self._slowest = 0

    def wait_for_turn(self) -> None:
        """One more step was handed over: return when the next one may begin. Raises StallError."""
        self._clock += 1
        least = self._clock - self._staleness
        if self._slowest < least:
            self._slowest = self._servers.wait_slowest(least)

    def resume(self) -> None:
        """Count on from the clock that the servers give to all workers that resume."""
        self._clock = self._slowest = self._servers.wait_slowest(0)


class Clocks:
    """A server's count of each worker's steps that are applied, and the least of these counts.

    lanes: those in which the job pushes: a step is applied when it is in all of them.  staleness:
    by how many steps the fastest may be ahead.  publish: called with the least count when it has
    changed.  The server counts, not the worker: so a clock says what is in the tables, and a worker
    that asks reads one word of each server however many workers there are.
    """

    def __init__(
        self,
        lanes: Sequence[int],
        num_workers: int,
        staleness: int,
        publish: Callable[[int], None],
    ) -> None:
        self._row = {lane: row for row, lane in enumerate(lanes)}
        self._counts = np.zeros((len(lanes), num_workers), np.int64)
        self._staleness = staleness
        self._publish = publish
        self._furthest = 0
        self._slowest = 0

    def tick(self, lane: int, worker: int) -> None:
        """One more step of the worker is applied in this lane."""
        count = int(self._counts[self._row[lane], worker]) + 1
        self._furthest = max(self._furthest, count)
        self._set(lane, worker, count)

    def rest(self, lane: int, worker: int) -> None:
        """The worker has stopped or pauses: nobody waits for it."""
        self._set(lane, worker, NEVER)

    def resume(self, lane: int, worker: int) -> None:
        """The worker takes part again, level with the furthest.

        All workers pause before any resumes, and all resume before any makes a step: after that
        their clocks are equal, whatever numbers of steps they had made.
        """
        self._set(lane, worker, self._furthest)

    def _set(self, lane: int, worker: int, count: int) -> None:
        row = self._row[lane]
        was_slowest = int(self._counts[row, worker]) == self._slowest
        self._counts[row, worker] = count
        if was_slowest or count < self._slowest:
            slowest = int(self._counts.min())
            if slowest != self._slowest:
                self._slowest = slowest
                self._publish(slowest)

    @property
    def awaited(self) -> int | None:
        """The slowest worker where another waits for it, else None."""
        counts = self._counts.min(axis=0)
        active = counts[counts != NEVER]
        if not active.size or active.max() - active.min() <= self._staleness:
            return None
        return int(counts.argmin())
