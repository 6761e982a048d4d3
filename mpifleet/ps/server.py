"""The server's loop: look at the lanes, merge, apply, answer, until every worker has stopped."""

import time
from collections.abc import Callable, Mapping

import numpy as np

from mpifleet.log import get_logger
from mpifleet.patience import Backoff
from mpifleet.ps.assembler import Assembler
from mpifleet.ps.clocks import Clocks
from mpifleet.ps.lag import LagCount
from mpifleet.ps.mailbox import Lane, ServerMailbox, lanes_of
from mpifleet.ps.message import Header, Kind
from mpifleet.ps.parts import AsyncPart, Gradients, Part, SyncPart
from mpifleet.ps.shard import Shard

IDLE_SLEEP_S = 1e-3


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
        lane = Lane.DENSE if header.kind is Kind.PULL_DENSE else Lane.ROWS
        version = self._mailbox.versions[lane]
        done = Header(header.kind, 0, header.argument, num_bytes, 0, num_bytes, version)
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
    sync: apply the mean over the active workers once per step; dense_sync: the dense part only.
    staleness: see Clocks, -1 for no bound.  stamp: see Gradients.
    """

    def __init__(
        self,
        shard: Shard,
        mailbox: ServerMailbox,
        *,
        sync: bool,
        dense_sync: bool = False,
        staleness: int = -1,
        skip_nonfinite: bool,
        handlers: Mapping[Kind, Callable[[bytes], bytes]],
        progress: Callable[[], None],
        report_s: float = 60.0,
        stamp: Callable[[int, int], None] = lambda *_: None,
    ) -> None:
        used, num_workers = lanes_of(shard.layout.specs), mailbox.layout.num_workers
        clocks = None
        if staleness >= 0:
            clocks = Clocks(used, num_workers, staleness, mailbox.set_slowest)
        parts: dict[Lane, Part] = {}
        self.lags: dict[Lane, LagCount] = {}
        for lane in (Lane.DENSE, Lane.ROWS):
            make = SyncPart if sync or (dense_sync and lane is Lane.DENSE) else AsyncPart
            gradients = Gradients(shard, mailbox, lane, skip_nonfinite, clocks, stamp)
            self.lags[lane] = gradients.lag
            parts[lane] = make(gradients, num_workers if lane in used else 0)
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
