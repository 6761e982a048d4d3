"""The server's loop: look at the lanes, merge, apply, answer, until every worker has stopped."""

import time
from collections.abc import Callable, Mapping

import numpy as np

from mpifleet.log import get_logger
from mpifleet.partition import chunks
from mpifleet.patience import Backoff
from mpifleet.ps.assembler import Assembler
from mpifleet.ps.clocks import Clocks
from mpifleet.ps.lag import LagCount
from mpifleet.ps.mailbox import Lane, ServerMailbox, lanes_of
from mpifleet.ps.message import Header, Kind
from mpifleet.ps.parts import AsyncPart, Gradients, Part, SyncPart
from mpifleet.ps.server_load import ServerLoad
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
        load: ServerLoad,
    ) -> None:
        self._shard = shard
        self._mailbox = mailbox
        self._handlers = handlers
        self._load = load
        self._assembler = Assembler(mailbox, Lane.REQUEST, shard.breathe)

    def serve(self, flags: np.ndarray, settle: Callable[[], None]) -> bool:
        """Answer one question of every worker that asks; False where all must wait to be staged.

        settle: applies what was delivered before a save.
        """
        served = False
        for worker in np.flatnonzero(flags[:, Lane.REQUEST]).tolist():
            if self._assembler.admits(worker):
                sequence = int(flags[worker, Lane.REQUEST])
                taken = self._assembler.take(worker)
                if taken is not None:
                    self._answer(worker, sequence, *taken, settle)
                self._shard.breathe()
                served = True
        return served

    def _answer(
        self,
        worker: int,
        sequence: int,
        header: Header,
        message: np.ndarray,
        settle: Callable[[], None],
    ) -> None:
        if header.kind is Kind.PULL_ROWS:
            num_bytes = self._gather(worker, header.argument, message.view(np.int64))
        elif header.kind is Kind.PULL_DENSE:
            start, stop = message.view(np.int64)[:2].tolist()
            values = self._shard.dense(header.argument)[start:stop]
            num_bytes = self._copy(worker, values.view(np.uint8))
        else:
            answers: list[bytes] = []

            def handle() -> bool:
                settle()
                answers.append(self._handlers[header.kind](message.tobytes()))
                return True

            self._load.work("files", handle)
            capacity = self._mailbox.layout.capacities[Lane.REPLY]
            num_bytes = self._copy(worker, np.frombuffer(answers[0][:capacity], np.uint8))
        self._load.count(answers=header.kind in (Kind.PULL_ROWS, Kind.PULL_DENSE))
        lane = Lane.DENSE if header.kind is Kind.PULL_DENSE else Lane.ROWS
        version = self._mailbox.versions[lane]
        done = Header(header.kind, 0, header.argument, num_bytes, 0, num_bytes, version)
        self._mailbox.reply(worker, sequence, done)

    def _copy(self, worker: int, answer: np.ndarray) -> int:
        reply = self._mailbox.payload(worker, Lane.REPLY, answer.size)
        for start, stop in chunks(answer.size, 1):
            reply[start:stop] = answer[start:stop]
            self._shard.breathe()
        return answer.size

    def _gather(self, worker: int, table: int, rows: np.ndarray) -> int:
        spec = self._shard.layout.specs.sparse[table]
        dtype = np.dtype(spec.dtype)
        num_bytes = rows.size * spec.dim * dtype.itemsize
        reply = self._mailbox.payload(worker, Lane.REPLY, num_bytes)
        self._shard.gather(table, rows, reply.view(dtype).reshape(rows.size, spec.dim))
        return num_bytes


class ParameterServer:
    """Serves until every worker has stopped: dense lanes first, then requests, then rows.

    Nobody waits for ever: after as many dense messages in a row as there are workers comes what
    else was delivered, and in every turn one question of each worker is answered and one message of
    rows dealt with.

    progress: lets MPI move what others started towards this rank.  report_s: how long a half
    merged step may wait before the missing worker is named in the log.  load: counts the work.
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
        load: ServerLoad | None = None,
    ) -> None:
        self._load = load = load or ServerLoad()
        used, num_workers = lanes_of(shard.layout.specs), mailbox.layout.num_workers
        clocks = None
        if staleness >= 0:
            clocks = Clocks(used, num_workers, staleness, mailbox.set_slowest)
        parts: dict[Lane, Part] = {}
        self.lags: dict[Lane, LagCount] = {}
        for lane in (Lane.DENSE, Lane.ROWS):
            make = SyncPart if sync or (dense_sync and lane is Lane.DENSE) else AsyncPart
            gradients = Gradients(shard, mailbox, lane, skip_nonfinite, load, clocks, stamp)
            self.lags[lane] = gradients.lag
            parts[lane] = make(gradients, num_workers if lane in used else 0)
        self._dense: Part = parts[Lane.DENSE]
        self._rows: Part = parts[Lane.ROWS]
        self._requests = Requests(shard, mailbox, handlers, load)
        self._mailbox = mailbox
        self._progress = progress
        self._dense_in_a_row = 0
        self._report_s = report_s

    def run(self) -> None:
        """Serve until every worker has stopped; at most a few milliseconds between looks at MPI."""
        backoff = Backoff(long_sleep_s=IDLE_SLEEP_S)
        busy_s = time.monotonic()
        while self._dense.members or self._rows.members:
            is_busy = self._turn()
            self._progress()
            if is_busy:
                backoff.reset()
                busy_s = time.monotonic()
            else:
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
        full_lanes = int(np.count_nonzero(flags[:, : Lane.REPLY]))
        if not full_lanes or not self._serve(flags):
            return False
        self._load.turn(full_lanes)
        return True

    def _serve(self, flags: np.ndarray) -> bool:
        is_dense_first = self._dense_in_a_row < len(flags)
        if is_dense_first and self._serve_dense(flags):
            return True
        self._dense_in_a_row = 0
        answered = self._load.work("answers", self._requests.serve, flags, self._settle)
        # Both: a stream of pulls must not hold up the rows.
        if self._serve_rows(flags) or answered:
            return True
        return not is_dense_first and self._serve_dense(flags)

    def _serve_dense(self, flags: np.ndarray) -> bool:
        served = self._load.work("dense", self._dense.serve, flags)
        self._dense_in_a_row += served
        return served

    def _serve_rows(self, flags: np.ndarray) -> bool:
        return self._load.work("rows", self._rows.serve, flags)

    def _settle(self) -> None:
        """Apply everything that was delivered before this moment and can be applied."""
        delivered = self._mailbox.poll().copy()
        while True:
            flags = self._mailbox.poll()
            # What arrives from now on waits: with busy workers there would be no end otherwise.
            old = np.where(flags == delivered, flags, 0)
            if not (self._serve_dense(old) or self._serve_rows(old)):
                return
