"""Waiting for another rank: back off quickly, report after a while, give up in the end."""

import ctypes
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from mpifleet.errors import StallError
from mpifleet.log import get_logger

_PR_SET_TIMERSLACK = 29
_SPINS = 50
_POLLS = 1000
SHORT_SLEEP_S = 20e-6


def sharpen_sleep() -> None:
    """Make short sleeps of the calling thread real: 1 us of timer slack instead of 50 us."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1000), 0, 0, 0)


class Backoff:
    """Sleeps between empty polls: first none, then 20 us, then `long_sleep_s`, then four of them.

    spins: polls without sleep; 1000 polls each at 20 us and at long_sleep_s follow.
    """

    def __init__(self, long_sleep_s: float, spins: int = 0) -> None:
        self._stages = (
            (spins, 0.0),
            (spins + _POLLS, SHORT_SLEEP_S),
            (spins + 2 * _POLLS, long_sleep_s),
        )
        self._last_sleep_s = 4 * long_sleep_s
        self._polls = 0

    def reset(self) -> None:
        """Something happened: be quick again."""
        self._polls = 0

    @property
    def is_spinning(self) -> bool:
        """Whether the next pause is no sleep at all."""
        return self._polls < self._stages[0][0]

    def pause(self) -> None:
        """Nothing happened: sleep as long as the number of empty polls since suggests."""
        self._polls += 1
        stage = (sleep_s for last, sleep_s in self._stages if self._polls <= last)
        sleep_s = next(stage, self._last_sleep_s)
        if sleep_s:
            time.sleep(sleep_s)
        else:
            # With more ranks than cores the one waited for may need this core.
            os.sched_yield()


@dataclass(frozen=True)
class Patience:
    """How long a rank waits for another: a log line each report_s, StallError after end_s."""

    report_s: float = 60.0
    end_s: float = 600.0

    def wait(
        self,
        is_ready: Callable[[], bool],
        describe: Callable[[], str],
        pulse: Callable[[], int] = lambda: 0,
    ) -> None:
        """Return as soon as `is_ready`; `describe` says in words what is missing.

        pulse: a number that changes while the other rank works on something long.
        Raises StallError after end_s without a pulse.
        """
        backoff = Backoff(long_sleep_s=200e-6, spins=_SPINS)
        started_s = reported_s = alive_s = 0.0
        beat = 0
        while not is_ready():
            backoff.pause()
            if backoff.is_spinning:
                continue
            now_s = time.monotonic()
            if not started_s:
                started_s = reported_s = alive_s = now_s
                beat = pulse()
            if now_s - alive_s > self.end_s:
                last, beat = beat, pulse()
                if beat == last:
                    raise StallError(
                        f"gave up after {self.end_s:.0f} s (strategy.stall_end_s): {describe()}"
                    )
                alive_s = now_s
            if now_s - reported_s > self.report_s:
                reported_s = now_s
                get_logger().warning("%.0f s without: %s", now_s - started_s, describe())
