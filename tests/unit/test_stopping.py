"""All workers stop in one place: jobs of threads, whose steps and meetings wait as real ones do."""

import os
import queue
import random
import signal
import threading
import time
from types import SimpleNamespace

import pytest

from mpifleet import preemption
from mpifleet.errors import ConfigError, StallError
from mpifleet.lifeline.stop_agreement import StopAgreement
from mpifleet.lifeline.stopping import STOP_SIGNALS, Stopping, agreed_here
from mpifleet.strategy import DistributedStrategy

LIMIT_S = 20.0


class Wires:
    """A hub and its connections: each rank hears in order, and some time after it was told."""

    def __init__(self, num_workers, seed):
        self._agreement, self._lock = StopAgreement(), threading.Lock()
        self._lots = random.Random(seed)
        self._queues = [queue.Queue() for _ in range(num_workers + 1)]
        self.ranks = [
            Stopping(lambda message, rank=rank: self._send(rank, message), num_workers, rank > 0)
            for rank in range(num_workers + 1)  # rank 0 is a server
        ]
        for rank in range(num_workers + 1):
            threading.Thread(target=self._deliver, args=(rank,), daemon=True).start()

    def _send(self, rank, message):
        with self._lock:
            for answer in self._agreement.hear(rank, message):
                for each in self._queues:
                    each.put((answer, self._lots.random() * 0.004))

    def _deliver(self, rank):
        while True:
            message, delay_s = self._queues[rank].get()
            time.sleep(delay_s)
            self.ranks[rank].hear(message)


class Workers:
    """How workers wait for one another in steps and in meetings.

    staleness: 0 for lock step, more for a bound, None for no waiting.
    """

    def __init__(self, num, staleness):
        self._num, self._staleness = num, staleness
        self._change = threading.Condition()
        self._clocks = dict.fromkeys(range(num), 0)
        self._waiting = {}
        self._met = 0

    def step(self, worker):
        with self._change:
            self._clocks[worker] += 1
            self._change.notify_all()
            if self._staleness is not None:
                mine = self._clocks[worker]
                self._until(lambda: min(self._clocks.values()) >= mine - self._staleness)

    def meet(self, worker, purpose):
        """All workers come; who waits here is not waited for by steps. All for one purpose."""
        with self._change:
            self._clocks.pop(worker)
            self._waiting[worker] = purpose
            number = self._met
            if len(self._waiting) == self._num:
                assert len(set(self._waiting.values())) == 1, self._waiting
                self._waiting, self._met = {}, self._met + 1
                self._clocks = dict.fromkeys(range(self._num), 0)
            self._change.notify_all()
            self._until(lambda: self._met > number)

    def _until(self, condition):
        assert self._change.wait_for(condition, LIMIT_S), "workers wait for each other for ever"


def work(workers, worker, stopping, lots, num_batches, counts, stops):
    """Epochs until told to stop; counts: whether steps wait for other workers."""
    steps = 0

    def made():
        return steps

    for epoch in range(10_000):
        for batch in range(num_batches):
            time.sleep(lots.random() * 0.002)
            workers.step(worker)
            steps += 1
            if stopping.is_due(steps if counts else None):
                with stopping.meeting(made):
                    workers.meet(worker, "save")
                stops[worker] = (epoch, batch)
                return
        time.sleep(lots.random() * 0.006)  # what a script does before the others are met
        with stopping.meeting(made):
            workers.meet(worker, f"end of epoch {epoch}")


@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
@pytest.mark.parametrize("staleness", [0, 2, None], ids=["sync", "bounded", "async"])
@pytest.mark.parametrize("seed", range(6))
def test_all_stop_in_one_place(staleness, uneven, seed):
    lots = random.Random(seed)
    num = 1 + seed % 4
    wires, workers = Wires(num, seed), Workers(num, staleness)
    batches = [lots.randrange(2, 7) for _ in range(num)] if uneven else [4] * num
    stops = {}
    threads = [
        threading.Thread(
            target=work,
            args=(workers, w, wires.ranks[w + 1], random.Random(f"{seed} {w}"), batches[w]),
            kwargs={"counts": staleness is not None, "stops": stops},
            daemon=True,
        )
        for w in range(num)
    ]
    for thread in threads:
        thread.start()
    time.sleep(lots.random() * 0.03)
    for rank in {0, lots.randrange(num + 1)}:  # one that came to all comes once
        wires.ranks[rank].ask("SIGTERM came")
    for thread in threads:
        thread.join(LIMIT_S + 1)
    assert len(stops) == num, f"only {stops} have stopped"
    assert len({epoch for epoch, _ in stops.values()}) == 1
    if staleness == 0:
        assert len(set(stops.values())) == 1, "after the same step"


def test_a_worker_that_has_finished_is_not_waited_for():
    wires = Wires(2, 0)
    wires.ranks[1].finish()
    wires.ranks[0].ask("SIGTERM came")
    time.sleep(0.05)
    assert not wires.ranks[2].is_due(1)
    assert not wires.ranks[2].is_due(2), "the rest of the job is one worker's last steps"


def test_a_worker_that_never_votes_is_complained_of():
    wires = Wires(2, 0)
    wires.ranks[0].ask("SIGTERM came")
    time.sleep(0.05)

    def alive():
        raise TimeoutError

    with pytest.raises(TimeoutError):
        wires.ranks[1].is_due(1, alive)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_stops_a_single_process(number, capfd):
    before = {each: signal.getsignal(each) for each in STOP_SIGNALS}
    was_agreed = agreed_here.is_set()
    stopping = Stopping(None)
    try:
        stopping.heed_alone()
        assert not stopping.is_due(3)
        os.kill(os.getpid(), number)
        assert stopping.is_due(4)
        assert stopping.is_due(5), "for good"
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        if not was_agreed:
            agreed_here.clear()
    assert f"preempted: {signal.Signals(number).name} came" in capfd.readouterr().err


def test_handlers_of_the_script_stay():
    before = {each: signal.getsignal(each) for each in STOP_SIGNALS}
    own = lambda *_: None  # noqa: E731
    try:
        for number in STOP_SIGNALS:
            signal.signal(number, own)
        Stopping(None).heed_alone()
        assert [signal.getsignal(number) for number in STOP_SIGNALS] == [own, own]
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@pytest.fixture
def session(monkeypatch):
    """What fleet.preempted() finds: worker 0 of two, in sync mode."""
    exchange = SimpleNamespace(waits_for_others=True, clock=SimpleNamespace(steps=1))
    found = SimpleNamespace(
        connected=lambda: exchange,
        stopping=None,
        strategy=DistributedStrategy(),
        gone=lambda _: "",
    )
    monkeypatch.setattr(preemption, "current", lambda: found)
    return found


def test_a_script_that_did_not_ask_is_told_how(session):
    with pytest.raises(ConfigError, match=r"needs strategy\.preemptible = True"):
        preemption.preempted()


@pytest.mark.parametrize("why", ["gone", "never"])
def test_who_waits_for_a_worker_that_never_comes_is_told(session, why):
    wires = Wires(2, 0)
    session.stopping = wires.ranks[1]
    assert not preemption.preempted()
    wires.ranks[0].ask("SIGTERM came")
    time.sleep(0.05)
    session.strategy.stall_report_s, session.strategy.stall_end_s = 0.5, 1.5
    session.gone = lambda _: "rank 2 is away" if why == "gone" else ""
    words = {"gone": "rank 2 is away", "never": r"call fleet\.preempted\(\)"}
    session.connected().clock.steps = 2
    with pytest.raises(StallError, match=words[why]):
        preemption.preempted()
