"""Stopping at a step boundary after a signal: one rank's part, and what its main thread asks."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from mpifleet.lifeline.signals import SignalPipe
from mpifleet.lifeline.stop_agreement import AGREED_TEXT, LAST_REGION

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)
STOPS_TEXT = "SIGTERM and SIGUSR2 stop this job at a step boundary"
agreed_here = threading.Event()
"""Set where this process takes part in a stop that was agreed on."""


def end_undisturbed() -> None:
    """At the end of a script that was stopped: let no launcher's signal spoil its exit status.

    srun and mpirun end the other ranks with SIGTERM as soon as the first has left with a status
    that is not 0, and Python's own handlers are gone before the process is.  In the main thread.
    """
    if agreed_here.is_set():
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)


class Stopping:
    """Whether this rank is to stop at the step boundary it is at.

    send: tells the hub, and may be called from any thread; None in a single process.
    num_workers: of the job.  is_worker: servers only pass a signal on.
    See StopAgreement for the terms.
    """

    def __init__(
        self,
        send: Callable[[dict[str, Any]], None] | None,
        num_workers: int = 1,
        is_worker: bool = True,
    ) -> None:
        self._send, self._num_workers, self._is_worker = send, num_workers, is_worker
        self._change = threading.Condition()
        self._is_asked = self._is_agreed = self._waits = False
        self._begin: tuple[int, int] | None = None
        self._region, self._steps, self._steps_before = 0, 0, 0
        self._refused = -1
        self._is_open = False

    # -- the main thread --------------------------------------------------------------------------

    def is_due(self, steps: int | None, alive: Callable[[], None] = lambda: None) -> bool:
        """Whether to stop here, at a step boundary: the same answer for all workers.

        steps: this worker has made so far; None where workers' steps do not wait for one another.
        Waits for the others once a signal has come.  alive: called each second meanwhile; raises
        where waiting has become useless.
        """
        with self._change:
            self._steps = 0 if steps is None else steps - self._steps_before
            if not self._is_asked or self._is_agreed:
                return self._is_agreed
            self._wait(lambda: self._begin is not None, alive)
            assert self._begin is not None
            if self._region < self._begin[0] or self._region <= self._refused:
                return False
            if steps is not None and (self._region, self._steps) < self._begin:
                return False
            self._tell("stop_vote", region=self._region)
            self._wait(lambda: self._is_agreed or self._refused >= self._region, alive)
            return self._is_agreed

    @contextlib.contextmanager
    def meeting(self, steps: Callable[[], int]) -> Iterator[None]:
        """Around a meeting of all workers. steps: made so far."""
        self._arrive(self._region)
        yield
        with self._change:
            self._region, self._waits = self._region + 1, False
            self._steps, self._steps_before = 0, steps()

    def finish(self) -> None:
        """This worker makes no more steps."""
        self._arrive(LAST_REGION)

    def _arrive(self, region: int) -> None:
        with self._change:
            self._region, self._waits = region, True
            if self._is_asked and not self._is_agreed and self._is_worker:
                self._tell("stop_arrived", region=region)

    def _wait(self, is_there: Callable[[], bool], alive: Callable[[], None]) -> None:
        while not self._change.wait_for(is_there, 1.0):
            alive()

    def _tell(self, kind: str, **facts: Any) -> None:
        if self._send is not None:
            self._send({"kind": kind, **facts})

    # -- any thread -------------------------------------------------------------------------------

    def takes(self, number: int, rank: str) -> bool:
        """Whether this signal asks to stop; it then does. rank: to whom it came."""
        is_taken = self._is_open and number in STOP_SIGNALS
        if is_taken:
            self.ask(f"{signal.Signals(number).name} came to {rank}")
        return is_taken

    def ask(self, text: str) -> None:
        """A signal has come to this rank; text: which."""
        if self._send is None:
            self._is_asked = self._is_agreed = True
            agreed_here.set()
            os.write(2, f"mpifleet: {AGREED_TEXT.format(text)}\n".encode())
        else:
            self._tell("stop_asked", text=text, workers=self._num_workers)

    def hear(self, message: dict[str, Any]) -> None:
        """What the hub tells. Raises KeyError or TypeError for what is no message."""
        kind = message["kind"]
        with self._change:
            if kind == "stop_asked":
                self._is_asked = True
                if self._is_worker:
                    place = {"region": self._region, "steps": self._steps, "waits": self._waits}
                    self._tell("stop_place", **place)
            elif kind == "stop_from":
                self._begin = message["region"], message["steps"]
            elif kind == "stop_refused":
                self._refused = message["region"]
            elif kind == "stop_agreed":
                self._is_agreed = True
                agreed_here.set()
            self._change.notify_all()

    def heed(self, signals: SignalPipe) -> None:
        """From now on signals count; not before every rank has its part."""
        signals.watch(signal.SIGUSR2)
        self._is_open = True

    def heed_alone(self) -> None:
        """In a single process: let the signals ask, unless the script has handlers of its own."""
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                before = signal.getsignal(number)
                is_ours = isinstance(getattr(before, "__self__", None), SignalPipe)
                if before is signal.SIG_DFL or is_ours:
                    signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.ask(f"{signal.Signals(number).name} came")
