"""What a server does with one kind of gradient lane, in async and in sync mode."""

from bisect import insort
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from mpifleet.ps.assembler import Assembler
from mpifleet.ps.clocks import Clocks
from mpifleet.ps.finite import FiniteGuard
from mpifleet.ps.lag import LagCount
from mpifleet.ps.mailbox import Lane, ServerMailbox
from mpifleet.ps.merge import DenseMerger, RowsMerger
from mpifleet.ps.message import NO_VERSION, Header, Kind, Word, decode_dense, decode_rows
from mpifleet.ps.server_load import ServerLoad
from mpifleet.ps.shard import Shard


class Part(Protocol):
    """One kind of gradient lane, DENSE or ROWS, and what is done with what arrives in it."""

    members: set[int]

    @property
    def awaited(self) -> int | None:
        """The worker for which others wait; None for nobody."""
        ...

    def serve(self, flags: np.ndarray) -> bool:
        """Deal with what has arrived; whether there was anything."""
        ...


class Gradients:
    """What both modes need of one kind of lane: decode, check, apply.

    clocks: told of every worker's steps, None where workers do not wait for them.  stamp: called
    with lane and version once readers find that many updates in the tables.
    lag: of the pushes so far.
    """

    def __init__(
        self,
        shard: Shard,
        mailbox: ServerMailbox,
        lane: Lane,
        skip_nonfinite: bool,
        load: ServerLoad,
        clocks: Clocks | None = None,
        stamp: Callable[[int, int], None] = lambda *_: None,
    ) -> None:
        self.lane = lane
        self.mailbox = mailbox
        self.clocks = clocks
        self.lag = LagCount()
        self._stamp = stamp
        self.assembler = Assembler(mailbox, lane, shard.breathe)
        self._shard = shard
        self._guard = FiniteGuard(skip_nonfinite)
        self._load = load
        self._version = 0

    def decode(self, message: np.ndarray) -> list[Any]:
        """The message as one gradient per table."""
        layout = self._shard.layout
        if self.lane is Lane.DENSE:
            self._load.count(dense_pushes=1)
            return list(decode_dense(layout, message))
        gradients = decode_rows(layout.specs, message)
        self._load.count(row_pushes=1, rows=sum(gradient.rows.size for gradient in gradients))
        return list(gradients)

    def are_steps(self) -> np.ndarray:
        """bool [num_workers]: whether a full lane holds a gradient, not STOP, PAUSE or RESUME."""
        return self.mailbox.headers(self.lane)[:, Word.KIND] == Kind.STEP

    def merger(self) -> Any:
        """A merger for this kind."""
        make = DenseMerger if self.lane is Lane.DENSE else RowsMerger
        return make(self._shard.layout, self._shard.breathe)

    def accept(self, worker: int, header: Header) -> bool:
        """Count the push's lag; whether it may be applied. Raises NonFiniteGradient."""
        if header.version != NO_VERSION:
            self.lag.add(self._version - header.version)
        specs = self._shard.layout.specs
        return self._guard.accept(
            header.argument, (*specs.dense, *specs.sparse), worker, header.step
        )

    def apply(self, gradients: Sequence[Any]) -> None:
        """Apply to the tables."""
        if self.lane is Lane.DENSE:
            self._shard.apply_dense(gradients)
        else:
            self._shard.apply_rows(gradients)

    def publish(self) -> None:
        """Raise the version: one more update is applied, or was skipped."""
        self._version += 1
        # Readers that were told of the version by the mailbox must find it in the tables.
        self._stamp(self.lane, self._version)
        self.mailbox.set_version(self.lane, self._version)

    def step_done(self, worker: int) -> None:
        """A step of the worker is applied, or was skipped."""
        if self.clocks is not None:
            self.clocks.tick(self.lane, worker)

    def heard(self, worker: int, kind: Kind) -> None:
        """The worker said STOP, PAUSE or RESUME."""
        if self.clocks is not None:
            say = self.clocks.resume if kind is Kind.RESUME else self.clocks.rest
            say(self.lane, worker)


class AsyncPart:
    """Applies each message as it comes, undivided, one per turn and workers in turn."""

    def __init__(self, gradients: Gradients, num_workers: int) -> None:
        self.members = set(range(num_workers))
        self._gradients = gradients
        self._next = 0

    @property
    def awaited(self) -> int | None:
        """The slowest worker where the bound on staleness keeps another waiting, else None."""
        clocks = self._gradients.clocks
        return clocks.awaited if clocks is not None else None

    def serve(self, flags: np.ndarray) -> bool:
        """Apply at most one worker's message; False too where all must wait to be staged."""
        num_workers = len(flags)
        full = np.flatnonzero(flags[:, self._gradients.lane])
        in_turn = np.roll(full, -int(np.searchsorted(full, self._next)))
        assembler = self._gradients.assembler
        worker = assembler.first(in_turn)
        if worker is None:
            return False
        self._next = (worker + 1) % num_workers
        taken = assembler.take(worker)
        if taken is not None:
            self._deal_with(worker, *taken)
        return True

    def _deal_with(self, worker: int, header: Header, message: np.ndarray) -> None:
        if header.kind is Kind.STEP:
            gradients = self._gradients.decode(message)
            if self._gradients.accept(worker, header):
                self._gradients.apply(gradients)
            self._gradients.publish()
            self._gradients.step_done(worker)
        else:
            self._gradients.heard(worker, header.kind)
        if header.kind is Kind.STOP:
            self.members.remove(worker)
        self._gradients.mailbox.clear(worker, self._gradients.lane)


class SyncPart:
    """Merges one message of every active worker, in worker order, then applies their mean.

    A worker that waits for all others in a collective has said PAUSE and is not waited for until
    it says RESUME. Workers resume together, so who takes part in a step is never a race.
    """

    def __init__(self, gradients: Gradients, num_workers: int) -> None:
        self.members = set(range(num_workers))
        self._gradients = gradients
        self._merger = gradients.merger()
        self._active = list(range(num_workers))
        self._turn = 0

    def serve(self, flags: np.ndarray) -> bool:
        """Merge the message of the worker whose turn it is, if it has arrived."""
        worker = self._next(flags[:, self._gradients.lane])
        if worker is None:
            return False
        self._deal_with(worker)
        if self._turn and self._turn == len(self._active):
            self._turn = 0
            if self._merger.count:
                self._gradients.apply(self._merger.take_mean())
            self._gradients.publish()
            for active in self._active:
                self._gradients.step_done(active)
        return True

    def _next(self, full: np.ndarray) -> int | None:
        """Who is dealt with next: who says no more than STOP, PAUSE or RESUME need not wait."""
        speaks = np.flatnonzero((full != 0) & ~self._gradients.are_steps())
        dealt_with = self._active[: self._turn]  # their next word belongs to the next step
        for worker in speaks.tolist():
            if worker not in dealt_with:
                return int(worker)
        if not self._active or not full[self._active[self._turn]]:
            return None
        return self._active[self._turn]

    @property
    def awaited(self) -> int | None:
        """The worker that keeps a half merged step waiting; None where no step has begun."""
        return self._active[self._turn] if self._turn else None

    def _deal_with(self, worker: int) -> None:
        taken = self._gradients.assembler.take(worker)
        if taken is None:
            return
        header, message = taken
        if header.kind is Kind.STEP:
            gradients = self._gradients.decode(message)
            if self._gradients.accept(worker, header):
                self._merger.add(gradients)
            self._turn += 1
        elif header.kind is Kind.RESUME:
            insort(self._active, worker)
        elif worker in self._active:
            self._active.remove(worker)
        if header.kind is not Kind.STEP:
            self._gradients.heard(worker, header.kind)
        if header.kind is Kind.STOP:
            self.members.remove(worker)
        self._gradients.mailbox.clear(worker, self._gradients.lane)
