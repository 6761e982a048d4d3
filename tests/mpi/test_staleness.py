"""The lag that servers report, and the bound that keeps workers within s steps of the slowest.

Workers are made slow by sleeping.  Two measurements, neither of which asks the code under test: the
time at which each worker began and handed over each step (one clock for all processes of a node),
and counters in the table, one row per worker, to which each adds one in every step: what a worker
reads when it begins a step is how many steps of each worker are in the tables.
"""

import time

import numpy as np
import pytest
import torch
from torch import nn

from mpifleet.embedding import SparseEmbedding
from mpifleet.ps.mailbox import Lane
from tests.mpi.jobs import Place, at_places, attempt, places, run
from tests.mpi.test_conservation import STEPS, build, expected
from tests.mpi.test_conservation import train as train_sums
from tests.mpi.test_pull_ahead import road  # noqa: F401 - a fixture

NUM_STEPS = 20
NAP_S = 0.02  # many times a step, also where more ranks than cores run
SEVERAL = pytest.mark.parametrize("place", places(least_workers=2) or [None], ids=str)


class Counters(nn.Module):
    """One row and 64 dense elements per worker, so that every server has some."""

    def __init__(self, num_workers):
        super().__init__()
        self.table = SparseEmbedding(
            "t", num_workers, 1, pooling="sum", initializer="zeros", dtype=torch.float64
        )
        self.dense = nn.Parameter(torch.zeros(num_workers, 64, dtype=torch.float64))


def counters(num_workers):
    def build_counters():
        model = Counters(num_workers)
        return model, torch.optim.SGD(model.parameters(), lr=1.0)

    return build_counters


class Trace:
    """What one worker saw: times in ns and counters [steps, workers], one entry per step."""

    def __init__(self):
        self.begun, self.handed_over = [], []
        self.rows, self.dense = [], []

    def step(self, worker, nap_s=0.0):
        """One step that adds one to this worker's counters."""
        model, optimizer = worker.model, worker.optimizer
        self.begun.append(time.monotonic_ns())
        self.dense.append(model.dense.detach().numpy()[:, 0].copy())
        out = model.table(torch.arange(worker.count)[:, None])[:, 0]
        self.rows.append(out.detach().numpy().copy())
        time.sleep(nap_s)
        (-out[worker.index] - model.dense[worker.index].sum()).backward()
        self.handed_over.append(time.monotonic_ns())
        optimizer.step()
        optimizer.zero_grad()


def lags(traces):
    """Own clock less the slowest one whenever a worker began a step, of every step of all workers.

    A clock counts the steps handed over until then; a worker that has made all its steps is left
    out from the moment at which it handed over the last.
    """
    found = []
    for trace in traces:
        for clock, begun in enumerate(trace.begun):
            clocks = [np.searchsorted(other.handed_over, begun) for other in traces]
            active = [c for c, t in zip(clocks, traces, strict=True) if c < len(t.begun)]
            found.append(clock - min(active))
    return np.array(found)


def nap_of(worker, step):
    """The last worker is slow at first, the first one later."""
    slow = worker.count - 1 if step < NUM_STEPS // 2 else 0
    return NAP_S if worker.index == slow else 0.0


def train(worker):
    trace = Trace()
    for step in range(NUM_STEPS):
        trace.step(worker, nap_of(worker, step))
    split = worker.exchange.clock.split()
    return trace, split.seconds["wait"], worker.exchange.is_finished


@pytest.mark.ranks(3, 4)
@SEVERAL
@pytest.mark.parametrize(
    ("hybrid", "staleness"),
    [(False, 0), (False, 1), (False, 3), (True, 1)],
    ids=["async-0", "async-1", "async-3", "hybrid-1"],
)
def test_no_worker_is_more_than_s_steps_ahead_and_some_are_that_far(comm, place, hybrid, staleness):
    options = {"sync": False, "hybrid": hybrid, "staleness": staleness}
    results = run(comm, place, counters(place.workers), train, **options)
    traces = [trace for trace, _, _ in results]
    found = lags(traces)
    # The dense mean of a hybrid job keeps its workers together anyway.
    assert found.max() == (0 if hybrid else staleness)
    clocks = np.arange(NUM_STEPS)[:, None]
    for trace in traces:
        rows = np.array(trace.rows)
        assert (rows >= clocks - staleness).all(), "an update that should be there is missing"
        assert (rows <= clocks + staleness + 1).all()
    if not hybrid:
        least = [(np.array(values) - clocks).min() for t in traces for values in (t.rows, t.dense)]
        assert min(least) == -staleness
    # The naps of one are waits of the others, half of them of the first and half of the last.
    waited_s = results[0][1]
    assert waited_s > 0.3 * NAP_S * NUM_STEPS / 2


@pytest.mark.ranks(3, 4)
@SEVERAL
def test_without_a_bound_the_same_workers_run_away(comm, place):
    results = run(comm, place, counters(place.workers), train, sync=False)
    assert lags([trace for trace, _, _ in results]).max() > 3


@at_places()
@pytest.mark.parametrize("staleness", [0, 2])
def test_every_push_is_applied_undivided(comm, place, staleness):
    results = run(comm, place, build, train_sums, sync=False, staleness=staleness)
    table, dense = expected(place.workers, STEPS)
    for got_table, got_dense in results:
        np.testing.assert_array_equal(got_table, table)
        np.testing.assert_array_equal(got_dense, dense)


@pytest.mark.ranks(3, 4)
@SEVERAL
@pytest.mark.parametrize("slow", [0, 1])
def test_who_has_stopped_is_not_waited_for(comm, place, slow):
    """The slow one makes three steps, a third worker none: the others go on to the end."""

    def work(worker):
        trace = Trace()
        counts = [NUM_STEPS] * worker.count
        counts[-1], counts[slow] = 0 if worker.count == 3 else NUM_STEPS, 3
        for _ in range(counts[worker.index]):
            trace.step(worker, NAP_S if worker.index == slow else 0.0)
        worker.exchange.finish()
        return trace

    traces = run(comm, place, counters(place.workers), work, sync=False, staleness=1, end_s=5.0)
    assert max(len(trace.begun) for trace in traces) == NUM_STEPS
    assert lags([trace for trace in traces if trace.begun]).max() <= 1


@pytest.mark.ranks(3, 4)
@SEVERAL
@pytest.mark.parametrize("hybrid", [False, True], ids=["async", "hybrid"])
def test_workers_of_uneven_epochs_meet_and_go_on_level(comm, place, hybrid):
    """Who waits in a barrier holds nobody up, and nobody pays for it in the next epoch."""

    def work(worker):
        epochs = []
        for _ in range(3):
            trace = Trace()
            for step in range(4 * (worker.index + 1)):
                # At the end of an epoch the fast ones wait in the barrier.
                trace.step(worker, NAP_S / 4 if worker.index and step < 3 else 0.0)
            epochs.append(trace)
            worker.barrier()
        worker.settled()
        return epochs, worker.table()[:, 0].tolist()

    options = {"sync": False, "hybrid": hybrid, "staleness": 1, "end_s": 5.0}
    results = run(comm, place, counters(place.workers), work, **options)
    for epoch in range(3):
        assert lags([epochs[epoch] for epochs, _ in results]).max() <= 1
    assert results[0][1] == [12.0 * (w + 1) for w in range(place.workers)]


@pytest.mark.ranks(3)
def test_a_worker_that_never_comes_is_reported(comm):
    def work(worker):
        if worker.index == 0:
            time.sleep(2.5)
            return ""
        try:
            for _ in range(5):
                Trace().step(worker)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "made all steps"

    first, second = run(comm, Place(1, 2), counters(2), work, sync=False, staleness=2, end_s=0.7)
    assert first == ""
    assert second.startswith("StallError: gave up after 1 s (strategy.stall_end_s): the slowest")
    assert "worker making step 1 (strategy.a_sync_configs['staleness']), server 0 has it" in second


# -- the lag that servers report -----------------------------------------------------------------


def reports(outcomes):
    return [outcome.value.lag for outcome in outcomes if outcome.name.startswith("server")]


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("servers", [1, 2])
def test_lag_is_the_pushes_of_others_since_the_pull(comm, road, servers):  # noqa: F811
    """One worker reads, waits while another makes seven steps, and pushes; then all over again."""
    if comm.size - servers < 2:
        pytest.skip("needs two workers")

    def work(worker):
        trace = Trace()
        for _ in range(2):
            out = worker.model.table(torch.arange(worker.count)[:, None]).sum()
            worker.optimizer.refresh()
            worker.barrier()
            for _ in range(7 if worker.index == 1 else 0):
                trace.step(worker)
                worker.exchange.flush()
            worker.barrier()
            if worker.index == 0:
                (out + worker.model.dense.sum()).backward()
                worker.optimizer.step()
                worker.optimizer.zero_grad()
                worker.exchange.flush()
            worker.barrier()

    place = Place(servers, comm.size - servers, "node")
    outcomes = attempt(comm, place, counters(place.workers), work, sync=False)
    assert not any(outcome.error for outcome in outcomes), outcomes
    for lag in reports(outcomes):
        for lane in (Lane.DENSE, Lane.ROWS):
            assert lag[lane].num_pushes == 2 * 7 + 2
            assert (lag[lane].quantile(14 / 16), lag[lane].quantile(15 / 16)) == (0, 7)
            assert lag[lane].maximum == 7


@pytest.mark.ranks(2, 3, 4)
@at_places()
def test_nothing_is_stale_in_sync_mode(comm, place):
    for lag in reports(attempt(comm, place, build, train_sums, sync=True)):
        assert lag[Lane.DENSE].num_pushes == STEPS * place.workers
        assert lag[Lane.ROWS].num_pushes > 0
        assert lag[Lane.DENSE].maximum == lag[Lane.ROWS].maximum == 0


@pytest.mark.ranks(3, 4)
@SEVERAL
def test_in_lock_step_no_push_is_older_than_the_others_of_its_step(comm, place):
    options = {"sync": False, "staleness": 0}
    outcomes = attempt(comm, place, counters(place.workers), train, **options)
    for lag in reports(outcomes):
        for lane in (Lane.DENSE, Lane.ROWS):
            assert lag[lane].num_pushes == NUM_STEPS * place.workers
            assert 1 <= lag[lane].maximum <= place.workers - 1
