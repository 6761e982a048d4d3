"""Stopping at a step boundary because the scheduler wants the machine back."""

import time
from collections.abc import Callable

from mpifleet.current import current
from mpifleet.errors import ConfigError, StallError
from mpifleet.log import get_logger
from mpifleet.session import Session


def preempted() -> bool:
    """Whether to save and leave now, because SIGTERM or SIGUSR2 has come to some rank.

    Called by every worker at the same step boundaries, with strategy.preemptible = True: all get
    the same answer, in sync and hybrid mode after the same step, else each after its next one.
    True is for good: then call save_checkpoint, stop_worker, and sys.exit(fleet.PREEMPTED).
    Where a worker waits for the others in a collective call, they come there first.  Without a
    signal it costs a microsecond and no message; else workers wait here for each other.
    Raises ConfigError without strategy.preemptible, StallError when another worker never answers.
    """
    session = current()
    exchange, stopping = session.connected(), session.stopping
    if stopping is None:
        raise ConfigError("fleet.preempted() needs strategy.preemptible = True")
    steps = exchange.clock.steps if exchange.waits_for_others else None
    return stopping.is_due(steps, _complaint(session))


def _complaint(session: Session) -> Callable[[], None]:
    """What complains each second about workers that do not come to a step boundary."""
    strategy = session.strategy
    since_s = reported_s = time.monotonic()

    def look() -> None:
        nonlocal reported_s
        now_s = time.monotonic()
        if gone := session.gone("worker"):
            raise StallError(f"waiting for all workers to stop, but {gone}")
        if now_s - since_s >= strategy.stall_end_s:
            raise StallError(
                f"{now_s - since_s:.0f} s for all workers to call fleet.preempted(): every one "
                "must, at the same step boundaries"
            )
        if now_s - reported_s >= strategy.stall_report_s:
            reported_s = now_s
            get_logger().warning("still waiting for all workers to come to a step boundary")

    return look
