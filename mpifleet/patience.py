"""Waiting for another rank: back off quickly, report after a while, give up in the end."""

import ctypes
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from mpifleet.errors import StallError
from mpifleet.log import get_logger

_PR_SET_TIMERSLACK = 29
_SPINS = 10
_POLLS = 1000
SHORT_SLEEP_S = 20e-6
_LONGEST_DOZE_S = 200e-6
_LONG_WAIT_S = 1.0


def sharpen_sleep() -> None:
    """Make short sleeps of the calling thread real: 1 us of timer slack instead of 50 us."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1000), 0, 0, 0)


class Backoff:
    """A server's sleeps between empty polls: 1000 of 20 us, then 1000 of `long_sleep_s`, then four
    of them each time.
    """

    def __init__(self, long_sleep_s: float) -> None:
        self._stages = ((_POLLS, SHORT_SLEEP_S), (2 * _POLLS, long_sleep_s))
        self._last_sleep_s = 4 * long_sleep_s
        self._polls = 0

    def reset(self) -> None:
        """Something happened: be quick again."""
        self._polls = 0

    def pause(self) -> None:
        """Nothing happened: sleep as long as the number of empty polls since suggests."""
        self._polls += 1
        stage = (sleep_s for last, sleep_s in self._stages if self._polls <= last)
        time.sleep(next(stage, self._last_sleep_s))


class Doze:
    """Sleeps between the looks of one wait: a quarter of the time waited so far, at most 200 us;
    four times that after a second.

    So a wait ends at most a quarter late, and a long one hardly costs a core: with as many ranks as
    cores, looks every 20 us took a third of the rate of the click-through job from those that
    computed.  The first few looks are without sleep.
    """

    def __init__(self) -> None:
        self.waited_s = 0.0
        self._spins = 0
        self._since_s = 0.0

    def pause(self) -> None:
        """Not yet: sleep."""
        self._spins += 1
        if self._spins <= _SPINS:
            # With more ranks than cores the one waited for may need this core.
            os.sched_yield()
            return
        now_s = time.monotonic()
        self._since_s = self._since_s or now_s
        self.waited_s = now_s - self._since_s
        longest_s = _LONGEST_DOZE_S if self.waited_s < _LONG_WAIT_S else 4 * _LONGEST_DOZE_S
        time.sleep(min(max(SHORT_SLEEP_S, self.waited_s / 4), longest_s))


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
        Raises StallError after end_s without a pulse, at the latest after twice as long.
        """
        doze = Doze()
        reported_s = alive_s = 0.0
        beat: int | None = None
        while not is_ready():
            doze.pause()
            now_s = doze.waited_s
            if not now_s:
                continue
            if beat is None:
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
                get_logger().warning("%.0f s without: %s", now_s, describe())
