"""A worker's exchange as each of its training threads sees it: one thread at a time uses it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from mpifleet.errors import ConfigError
from mpifleet.exchange import Exchange, Gradients
from mpifleet.partition import UniqueKeys
from mpifleet.ps.rows_pull import PulledRows
from mpifleet.ps.seat import Seat
from mpifleet.ps.spec import TableSpecs
from mpifleet.step_clock import StepClock
from mpifleet.thread_mean import mean_of


class OtherThreadFailed(BaseException):
    """Ends a training thread where another has failed; no `except Exception` goes on after it."""


class ThreadsRun:
    """Stands where the worker's own exchange stood while its training threads have it.

    Whatever is asked of it raises ConfigError.
    """

    has_straggler = False
    """Whether a thread went on after another had failed: then the exchange never comes back."""

    def __getattr__(self, name: str) -> NoReturn:
        if self.has_straggler:
            raise ConfigError(
                "a training thread of fleet.run_threads(...) had not ended long after another one "
                "failed: this worker cannot use its tables any more"
            )
        raise ConfigError(
            "while fleet.run_threads(...) runs, tables are reached through the model and the "
            "optimizer that each training thread was given (thread.model, thread.optimizer); no "
            f"other call of fleet, model or optimizer may use them ({name!r} was asked for)"
        )


@dataclass(frozen=True)
class _Step:
    """What a thread handed over for a step of all."""

    seat: Seat
    gradients: Gradients
    meanwhile: Callable[[], None]


class Turns:
    """The one exchange that the threads take turns at.

    merges: whether the threads' gradients of a step make one push, their mean, else each pushes
    its own.  num_threads: those that train, until they `leave`.
    """

    def __init__(
        self, exchange: Exchange, specs: TableSpecs, num_threads: int, merges: bool
    ) -> None:
        self.exchange = exchange
        self.merges = merges
        self._specs = specs
        self._active = num_threads
        self.error: BaseException | None = None
        """What went wrong first; nobody uses the exchange after that."""
        self._turn = threading.Condition(threading.RLock())
        self._given: dict[int, _Step] = {}
        self._pushed = 0

    @contextmanager
    def of(self, seat: Seat) -> Iterator[Exchange]:
        """The exchange, for the thread that has this seat. Raises OtherThreadFailed.

        An error inside ends the other threads too, whatever the thread makes of it.
        """
        before = seat.clock.enter("wait")
        with self._turn:
            self._check()
            seat.clock.enter(before)
            own, self.exchange.seat = self.exchange.seat, seat
            try:
                yield self.exchange
            except BaseException as error:
                self._note(error)
                self._turn.notify_all()
                raise
            finally:
                self.exchange.seat = own

    def fail(self, error: BaseException) -> None:
        """End the other threads at their next use of the exchange."""
        self._note(error)
        with self._turn:
            self._turn.notify_all()

    def leave(self, seat: Seat, flats: list[np.ndarray]) -> None:
        """A thread has no more steps: the others do not wait for it."""
        with self._turn:
            self._active -= 1
            if self._given and self.error is None:
                self._push_if_all_are_there(seat, flats)

    def step_together(
        self,
        index: int,
        seat: Seat,
        gradients: Gradients,
        flats: list[np.ndarray],
        meanwhile: Callable[[], None],
    ) -> None:
        """One step of all active threads: returns once their mean is handed over, values read.

        The last to come does it for all, in the order of the threads whoever that is.
        """
        before = seat.clock.enter("wait")
        with self._turn:
            self._check()
            self._given[index] = _Step(seat, gradients, meanwhile)
            number = self._pushed
            seat.clock.enter(before)
            if not self._push_if_all_are_there(seat, flats):
                seat.clock.enter("wait")
                self._turn.wait_for(lambda: self._pushed > number or self.error is not None)
                seat.clock.enter(before)
                self._check()

    def _push_if_all_are_there(self, seat: Seat, flats: list[np.ndarray]) -> bool:
        if len(self._given) < self._active:
            return False
        given = [self._given[index] for index in sorted(self._given)]
        self._given = {}
        with self.of(seat) as exchange:
            for step in given:
                seat.read.add_rows_of(step.seat.read)
            gradients = [step.gradients for step in given]
            mean = mean_of(gradients, self._specs, exchange.num_servers)
            exchange.step(mean, flats, lambda: _call_all([step.meanwhile for step in given]))
        self._pushed += 1
        self._turn.notify_all()
        return True

    def _note(self, error: BaseException) -> None:
        # Without the turn: its holder may be waiting for a server.
        if self.error is None and not isinstance(error, OtherThreadFailed):
            self.error = error

    def _check(self) -> None:
        if self.error is not None:
            raise OtherThreadFailed


def _call_all(functions: list[Callable[[], None]]) -> None:
    for function in functions:
        function()


class ThreadExchange:
    """One training thread's way to the tables; see Exchange."""

    def __init__(self, turns: Turns, index: int) -> None:
        self.num_servers = turns.exchange.num_servers
        self.is_finished = False
        self.waits_for_others = turns.exchange.waits_for_others
        self.seat = turns.exchange.seat.beside()
        self._turns = turns
        self._index = index

    @property
    def clock(self) -> StepClock:
        """Where this thread's time goes."""
        return self.seat.clock

    def pull_rows(self, table: int, unique: UniqueKeys) -> np.ndarray:
        """See Exchange."""
        with self._turns.of(self.seat) as exchange:
            return exchange.pull_rows(table, unique)

    def begin_rows(self, table: int, unique: UniqueKeys) -> PulledRows:
        """See Exchange."""
        with self._turns.of(self.seat) as exchange:
            return _ThreadRows(self._turns, self.seat, exchange.begin_rows(table, unique))

    def pull_dense(self, flats: list[np.ndarray]) -> None:
        """See Exchange."""
        with self._turns.of(self.seat) as exchange:
            exchange.pull_dense(flats)

    def step(
        self,
        gradients: Gradients,
        flats: list[np.ndarray],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """See Exchange."""
        if self._turns.merges:
            self._turns.step_together(self._index, self.seat, gradients, flats, meanwhile)
        else:
            with self._turns.of(self.seat) as exchange:
                exchange.step(gradients, flats, meanwhile)

    def flush(self) -> None:
        """See Exchange."""
        with self._turns.of(self.seat) as exchange:
            exchange.flush()

    def leave(self, flats: list[np.ndarray]) -> None:
        """Make no more steps."""
        self.clock.enter("push")
        self._turns.leave(self.seat, flats)

    def fail(self, error: BaseException) -> None:
        """End the other threads at their next use of the exchange."""
        self._turns.fail(error)

    @property
    def error(self) -> BaseException | None:
        """What went wrong first in any thread."""
        return self._turns.error

    def finish(self) -> None:
        """Raises ConfigError, as the others below do: the worker has one beginning and one end."""
        raise _not_in_a_thread("finish")

    def pause(self) -> None:
        """See finish."""
        raise _not_in_a_thread("pause")

    def resume(self) -> None:
        """See finish."""
        raise _not_in_a_thread("resume")

    def save(self, *_: Any) -> None:
        """See finish."""
        raise _not_in_a_thread("save")

    def states(self) -> NoReturn:
        """See finish."""
        raise _not_in_a_thread("save")

    def check(self, *_: Any) -> None:
        """See finish."""
        raise _not_in_a_thread("check")

    def apply_delivered(self) -> None:
        """See finish."""
        raise _not_in_a_thread("apply_delivered")

    def settle_saves(self) -> None:
        """See finish."""
        raise _not_in_a_thread("settle_saves")

    def load(self, *_: Any) -> None:
        """See finish."""
        raise _not_in_a_thread("load")


def _not_in_a_thread(what: str) -> ConfigError:
    return ConfigError(f"a training thread cannot {what}: that is for after fleet.run_threads(...)")


class _ThreadRows:
    """See PulledRows."""

    def __init__(self, turns: Turns, seat: Seat, rows: PulledRows) -> None:
        self._turns, self._seat, self._rows = turns, seat, rows

    def read_near(self) -> None:
        """See PulledRows."""
        with self._turns.of(self._seat):
            self._rows.read_near()

    def take(self) -> np.ndarray:
        """See PulledRows."""
        with self._turns.of(self._seat):
            return self._rows.take()
