"""The server's loop: look at the lanes, merge, apply, answer, until every worker has stopped."""

import time
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from mpifleet.log import get_logger
from mpifleet.patience import Backoff
from mpifleet.ps.assembler import Assembler
from mpifleet.ps.finite import FiniteGuard
from mpifleet.ps.mailbox import Lane, ServerMailbox, lanes_of
from mpifleet.ps.merge import DenseMerger, RowsMerger
from mpifleet.ps.message import Header, Kind, decode_dense, decode_rows
from mpifleet.ps.shard import Shard

IDLE_SLEEP_S = 1e-3


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
    """What both modes need of one kind of lane: decode, check, apply."""

    def __init__(
        self, shard: Shard, mailbox: ServerMailbox, lane: Lane, skip_nonfinite: bool
    ) -> None:
        self.lane = lane
        self.mailbox = mailbox
        self.assembler = Assembler(mailbox, lane)
        self._shard = shard
        self._guard = FiniteGuard(skip_nonfinite, shard.breathe)
        self._version = 0

    def decode(self, message: np.ndarray) -> list[Any]:
        """The message as one gradient per table."""
        layout = self._shard.layout
        if self.lane is Lane.DENSE:
            return list(decode_dense(layout, message))
        return list(decode_rows(layout.specs, message))

    def kind(self, worker: int) -> Kind:
        """What a full lane holds."""
        return self.mailbox.header(worker, self.lane).kind

    def merger(self) -> Any:
        """A merger for this kind."""
        make = DenseMerger if self.lane is Lane.DENSE else RowsMerger
        return make(self._shard.layout, self._shard.breathe)

    def accept(self, worker: int, header: Header, gradients: Sequence[Any]) -> bool:
        """Whether the gradients may be applied. Raises NonFiniteGradient."""
        specs = self._shard.layout.specs
        tables = specs.dense if self.lane is Lane.DENSE else specs.sparse
        names = [*(spec.name for spec in specs.dense), *(spec.name for spec in specs.sparse)]
        told = names[header.argument - 1] if header.argument else ""
        return self._guard.accept(tables, gradients, worker, header.step, told)

    def apply(self, gradients: Sequence[Any]) -> None:
        """Apply to the tables."""
        if self.lane is Lane.DENSE:
            self._shard.apply_dense(gradients)
        else:
            self._shard.apply_rows(gradients)

    def publish(self) -> None:
        """Raise the version: one more update is applied, or was skipped."""
        self._version += 1
        self.mailbox.set_version(self.lane, self._version)


class AsyncPart:
    """Applies each message as it comes, undivided, one per turn and workers in turn."""

    awaited: int | None = None

    def __init__(self, gradients: Gradients, num_workers: int) -> None:
        self.members = set(range(num_workers))
        self._gradients = gradients
        self._next = 0

    def serve(self, flags: np.ndarray) -> bool:
        """Apply at most one worker's message; False too where all must wait to be staged."""
        num_workers = len(flags)
        full = np.flatnonzero(flags[:, self._gradients.lane])
        in_turn = np.roll(full, -int(np.searchsorted(full, self._next))).tolist()
        assembler = self._gradients.assembler
        worker = next((worker for worker in in_turn if assembler.admits(worker)), None)
        if worker is None:
            return False
        self._next = (worker + 1) % num_workers
        taken = assembler.take(worker)
        if taken is not None:
            self._deal_with(worker, *taken)
        return True

    def _deal_with(self, worker: int, header: Header, message: np.ndarray) -> None:
        if header.kind is Kind.STOP:
            self.members.remove(worker)
        elif header.kind is Kind.STEP:
            gradients = self._gradients.decode(message)
            if self._gradients.accept(worker, header, gradients):
                self._gradients.apply(gradients)
            self._gradients.publish()
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
        return True

    def _next(self, full: np.ndarray) -> int | None:
        """Who is dealt with next: who says no more than STOP, PAUSE or RESUME need not wait."""
        idle = self.members.difference(self._active)
        for worker in sorted(idle.union(self._active[self._turn :])):
            if full[worker] and self._gradients.kind(worker) is not Kind.STEP:
                return worker
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
            if self._gradients.accept(worker, header, gradients):
                self._merger.add(gradients)
            self._turn += 1
        elif header.kind is Kind.RESUME:
            insort(self._active, worker)
        elif worker in self._active:
            self._active.remove(worker)
        if header.kind is Kind.STOP:
            self.members.remove(worker)
        self._gradients.mailbox.clear(worker, self._gradients.lane)


class Requests:
    """Answers pulls of workers that cannot reach the tables, and saves and loads.

    handlers: what to do for SAVE and LOAD; a handler gets the request's payload and returns bytes.
    """

    def __init__(
        self,
        shard: Shard,
        mailbox: ServerMailbox,
        handlers: Mapping[Kind, Callable[[bytes], bytes]],
    ) -> None:
        self._shard = shard
        self._mailbox = mailbox
        self._handlers = handlers
        self._assembler = Assembler(mailbox, Lane.REQUEST)

    def serve(self, flags: np.ndarray, settle: Callable[[], None]) -> bool:
        """Answer everything that was asked. settle: applies what was delivered before a save."""
        asked = np.flatnonzero(flags[:, Lane.REQUEST])
        for worker in asked.tolist():
            sequence = int(flags[worker, Lane.REQUEST])
            taken = self._assembler.take(worker)
            if taken is not None:
                self._answer(worker, sequence, *taken, settle)
        return bool(asked.size)

    def _answer(
        self,
        worker: int,
        sequence: int,
        header: Header,
        message: np.ndarray,
        settle: Callable[[], None],
    ) -> None:
        capacity = self._mailbox.layout.capacities[Lane.REPLY]
        if header.kind is Kind.PULL_ROWS:
            num_bytes = self._gather(worker, header.argument, message.view(np.int64))
        elif header.kind is Kind.PULL_DENSE:
            start, stop = message.view(np.int64)[:2].tolist()
            values = self._shard.dense(header.argument)[start:stop]
            num_bytes = values.nbytes
            self._mailbox.payload(worker, Lane.REPLY, num_bytes)[:] = values.view(np.uint8)
        else:
            settle()
            answer = self._handlers[header.kind](message.tobytes())[:capacity]
            num_bytes = len(answer)
            reply = self._mailbox.payload(worker, Lane.REPLY, num_bytes)
            reply[:] = np.frombuffer(answer, np.uint8)
        done = Header(header.kind, 0, header.argument, num_bytes, 0, num_bytes)
        self._mailbox.reply(worker, sequence, done)

    def _gather(self, worker: int, table: int, rows: np.ndarray) -> int:
        spec = self._shard.layout.specs.sparse[table]
        dtype = np.dtype(spec.dtype)
        num_bytes = rows.size * spec.dim * dtype.itemsize
        reply = self._mailbox.payload(worker, Lane.REPLY, num_bytes)
        self._shard.gather(table, rows, reply.view(dtype).reshape(rows.size, spec.dim))
        return num_bytes


class ParameterServer:
    """Serves until every worker has stopped: dense lanes first, then requests, then rows.

    progress: lets MPI move what others started towards this rank.  report_s: how long a half
    merged step may wait before the missing worker is named in the log.
    """

    def __init__(
        self,
        shard: Shard,
        mailbox: ServerMailbox,
        *,
        sync: bool,
        skip_nonfinite: bool,
        handlers: Mapping[Kind, Callable[[bytes], bytes]],
        progress: Callable[[], None],
        report_s: float = 60.0,
    ) -> None:
        make = SyncPart if sync else AsyncPart
        used = lanes_of(shard.layout.specs)
        parts = {
            lane: make(
                Gradients(shard, mailbox, lane, skip_nonfinite),
                mailbox.layout.num_workers if lane in used else 0,
            )
            for lane in (Lane.DENSE, Lane.ROWS)
        }
        self._dense: Part = parts[Lane.DENSE]
        self._rows: Part = parts[Lane.ROWS]
        self._requests = Requests(shard, mailbox, handlers)
        self._mailbox = mailbox
        self._progress = progress
        self._report_s = report_s

    def run(self) -> None:
        """Serve until every worker has stopped; at most a few milliseconds between looks at MPI."""
        backoff = Backoff(long_sleep_s=IDLE_SLEEP_S)
        busy_s = time.monotonic()
        while self._dense.members or self._rows.members:
            if self._turn():
                backoff.reset()
                busy_s = time.monotonic()
            else:
                self._progress()
                backoff.pause()
                busy_s = self._report(busy_s)

    def _report(self, since_s: float) -> float:
        """Name the worker that others have waited for; returns since when to count on."""
        now_s = time.monotonic()
        if now_s - since_s < self._report_s:
            return since_s
        for part in (self._dense, self._rows):
            if part.awaited is not None:
                get_logger().warning(
                    "%.0f s without the step of worker %d, for which other workers wait",
                    now_s - since_s,
                    part.awaited,
                )
                break
        return now_s

    def _turn(self) -> bool:
        flags = self._mailbox.poll()
        if not flags[:, : Lane.REPLY].any():
            return False
        if self._dense.serve(flags):
            return True
        # A stream of pulls must not hold up the rows for ever.
        answered = self._requests.serve(flags, self._settle)
        return self._rows.serve(flags) or answered

    def _settle(self) -> None:
        """Apply everything that was delivered before this moment and can be applied."""
        delivered = self._mailbox.poll().copy()
        while True:
            flags = self._mailbox.poll()
            # What arrives from now on waits: with busy workers there would be no end otherwise.
            old = np.where(flags == delivered, flags, 0)
            if not (self._dense.serve(old) or self._rows.serve(old)):
                return
