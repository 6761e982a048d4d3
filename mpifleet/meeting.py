"""A barrier for ranks that come at different times: those that wait leave their cores to others."""

import time
from collections.abc import Callable
from typing import Any

from mpifleet.errors import StallError
from mpifleet.log import get_logger
from mpifleet.mpi import serial
from mpifleet.patience import Doze

LAST_MESSAGE_S = 2.0


def wait_for_all(comm: Any, gone: Callable[[], str] = str, report_s: float = float("inf")) -> None:
    """A barrier that sleeps while it waits. Collective.

    report_s: after how long, and how often, the log says that this rank still waits.
    gone: who cannot come any more, in words, "" for nobody.  Raises StallError with these words.
    """
    with serial:
        request = comm.Ibarrier()
    doze = Doze()
    give_up_s = float("inf")
    reported_s = time.monotonic()
    while True:
        with serial:
            if request.Test():
                return
        missing = gone()
        if missing:
            # It may have come before it went: the barrier's last message is then on its way.
            give_up_s = min(give_up_s, time.monotonic() + LAST_MESSAGE_S)
            if time.monotonic() > give_up_s:
                raise StallError(f"waiting for all in a collective call, but {missing}")
        if time.monotonic() - reported_s > report_s:
            reported_s = time.monotonic()
            get_logger().warning("still waiting for all in a collective call")
        doze.pause()
