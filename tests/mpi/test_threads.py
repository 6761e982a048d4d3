"""Training threads of a worker: their steps are merged in sync mode, their own in async mode."""

import contextlib
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn

from mpifleet import training_threads
from mpifleet.embedding import SparseEmbedding
from mpifleet.errors import ConfigError
from mpifleet.pull_ahead import ahead
from tests.mpi import test_conservation as conservation
from tests.mpi.jobs import Place, at_places, attempt, run
from tests.mpi.test_conservation import STEPS, Sums, build, draws

THREADS = 2


def step(thread, number):
    """One step of numbers that no other thread of the job draws."""
    keys, weights, grads = draws(number, 0)
    out = thread.model.table(torch.from_numpy(keys)[:, None])
    loss = (out * torch.from_numpy(weights)).sum()
    (loss + (thread.model.dense * torch.from_numpy(grads)).sum()).backward()
    thread.optimizer.step()
    thread.optimizer.zero_grad()


def train_all(steps_of, threads=THREADS):
    """A worker's work: thread t of worker w makes steps_of(w, t) steps."""

    def work(worker):
        def train(thread):
            everyone = worker.index * threads + thread.index
            for number in range(steps_of(worker.index, thread.index)):
                step(thread, everyone * STEPS + number)

        worker.session.run_threads(train, threads)
        worker.settled()
        result = worker.table(), worker.refreshed()["dense"]
        worker.barrier()
        return result

    return work


def sums(counts, divide=1):
    """Tables after the steps of all threads; counts: steps by thread of the job."""
    table, flat = np.full((conservation.ROWS, conservation.DIM), 0.5), np.full(700, 0.25)
    for everyone, count in enumerate(counts):
        for number in range(count):
            keys, weights, grads = draws(everyone * STEPS + number, 0)
            np.subtract.at(table, keys, weights / divide)
            flat -= grads / divide
    return table, flat


@at_places()
@pytest.mark.parametrize("threads", [1, 3])
def test_async_applies_every_threads_gradient_once(comm, place, threads):
    def steps_of(worker, thread):
        return 7 + 3 * thread + worker

    counts = [steps_of(w, t) for w in range(place.workers) for t in range(threads)]
    table, dense = sums(counts)
    for got_table, got_dense in run(comm, place, build, train_all(steps_of, threads), sync=False):
        np.testing.assert_array_equal(got_table, table)
        np.testing.assert_array_equal(got_dense, dense)


@at_places()
def test_sync_steps_are_the_mean_of_all_threads_of_all_workers(comm, place):
    with pytest.MonkeyPatch.context() as patch:
        if place.workers == 3:  # thirds are not exact: gradients that are multiples of three are
            patch.setattr(f"{__name__}.draws", conservation.tripled(draws))
        results = run(comm, place, build, train_all(lambda *_: 9))
        table, dense = sums([9] * THREADS * place.workers, THREADS * place.workers)
    for got_table, got_dense in results:
        np.testing.assert_array_equal(got_table, table)
        np.testing.assert_array_equal(got_dense, dense)


@at_places()
@pytest.mark.parametrize("mode", [{"hybrid": True}, {"sync": False, "staleness": 1}])
def test_threads_with_fewer_steps_leave_the_others_alone(comm, place, mode):
    """The last thread makes its steps alone: their mean is of one."""
    results = run(comm, place, build, train_all(lambda _, t: (2, 6)[t]), **mode)
    assert len(results) == place.workers
    for got_table, got_dense in results[1:]:
        np.testing.assert_array_equal(got_table, results[0][0])
        np.testing.assert_array_equal(got_dense, results[0][1])
    if place.workers == 1:
        table, dense = np.full((conservation.ROWS, conservation.DIM), 0.5), np.full(700, 0.25)
        for everyone, number in [(t, n) for t in range(2) for n in range((2, 6)[t])]:
            keys, weights, grads = draws(everyone * STEPS + number, 0)
            divide = 2 if number < 2 else 1
            np.subtract.at(table, keys, weights / divide)
            dense -= grads / divide
        np.testing.assert_array_equal(results[0][0], table)
        np.testing.assert_array_equal(results[0][1], dense)


@at_places()
def test_rows_pulled_ahead_reach_their_thread(comm, place):
    """Every row is another one: a look-up gets what it asked for, whoever else asks."""

    def build_varied():
        model = Sums()
        model.table = SparseEmbedding("t", 97, 5, pooling="sum", dtype=torch.float64)
        return model, torch.optim.SGD(model.parameters(), lr=0.0)

    def work(worker):
        rows = worker.table()
        assert np.unique(rows).size > 97

        def train(thread):
            rng = np.random.default_rng([worker.index, thread.index])
            batches = [torch.from_numpy(rng.integers(0, 97, (20, 1))) for _ in range(15)]
            for ids in ahead(batches, lambda ids: {thread.model.table: ids}, 2):
                out = thread.model.table(ids)
                np.testing.assert_array_equal(out.detach().numpy(), rows[ids[:, 0].numpy()])
                out.sum().backward()
                thread.optimizer.step()
                thread.optimizer.zero_grad()

        worker.session.run_threads(train, THREADS)
        steps = worker.optimizer.clock.split().steps
        worker.settled()
        return steps

    assert run(comm, place, build_varied, work, sync=False) == [2 * 15] * place.workers


def names_of_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("training")]


@at_places()
def test_the_first_error_ends_all_threads_and_the_worker_goes_on(comm, place):
    """The others end at their next exchange, whatever their loops make of errors."""

    def work(worker):
        ended = []

        def train(thread):
            try:
                for number in range(10_000_000):
                    if thread.index == 1 and number == 3:
                        raise ValueError("bad sample")
                    with contextlib.suppress(Exception):
                        thread.model.table(torch.arange(3)[:, None]).sum().backward()
                        thread.optimizer.step()
                        thread.optimizer.zero_grad()
            finally:
                ended.append(thread.index)

        with pytest.raises(ValueError, match="bad sample"):
            worker.session.run_threads(train, 3)
        assert sorted(ended) == [0, 1, 2]
        assert names_of_threads() == []
        worker.settled()
        before = worker.refreshed()["dense"]
        worker.barrier()
        worker.session.run_threads(lambda thread: step(thread, 0), 2)
        worker.settled()
        after = worker.refreshed()["dense"]
        np.testing.assert_array_equal(after, before - place.workers * 2 * draws(0, 0)[2])
        return True

    assert all(run(comm, place, build, work, sync=False))


@at_places()
def test_a_push_that_is_refused_ends_all_threads_that_step_together(comm, place):
    """Whatever the thread makes of the error that it gets."""

    def work(worker):
        def train(thread):
            for _ in range(1000):
                with contextlib.suppress(Exception):
                    thread.model.dense.sum().mul(float("nan")).backward()
                    thread.optimizer.step()
                    thread.optimizer.zero_grad()

        worker.session.run_threads(train, THREADS)

    outcomes = attempt(comm, place, build, work, end_s=1.5)
    assert any("finite" in outcome.error for outcome in outcomes), outcomes
    assert names_of_threads() == []


def rate_of_a_thread(thread):
    torch.optim.lr_scheduler.LambdaLR(thread.optimizer, lambda _: 0.0)
    thread.optimizer.step()


class Dense(nn.Module):
    """No table: nothing but the model itself can refuse a call."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3, bias=False)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, inputs):
        return self.inner(inputs) * self.scale


@at_places()
def test_the_workers_own_model_and_optimizer_are_refused_meanwhile(comm, place):
    def work(worker):
        wrong = {
            "own model": lambda _: worker.model(torch.zeros(1, 3)),
            "own model;": lambda _: worker.model.inner(torch.zeros(1, 3)),
            r"thread\.model.*\('\w+' was asked": lambda _: worker.optimizer.step(),
            "'flush' was asked": lambda _: worker.session.flush(),
            "worker's own optimizer": lambda t: t.optimizer.load_state_dict({}),
            "cannot finish": lambda t: t.optimizer.exchange.finish(),
            "'num_servers'": lambda _: worker.optimizer.zero_grad(),
            "('num_servers') was": lambda _: worker.optimizer.clip_grad_norm_(1.0),
            "'waits_for_others'": lambda _: worker.session.util.barrier(),
            "'lr' of a thread's optimizer was changed from 1.0 to 0.0": rate_of_a_thread,
        }
        for words, call in wrong.items():
            with pytest.raises(ConfigError, match=words):
                worker.session.run_threads(call, 2)
        worker.model(torch.zeros(1, 3))  # and afterwards they are whole again
        worker.optimizer.step()
        worker.settled()
        return True

    def build_dense():
        model = Dense()
        return model, torch.optim.SGD(model.parameters(), lr=1.0)

    assert all(run(comm, place, build_dense, work, sync=False))


@at_places()
def test_frozen_and_tied_parameters_and_frozen_tables(comm, place):
    """A thread's copy has the same ties, and freezes the same."""

    def build_odd():
        model = Sums()
        model.tied = model.dense
        model.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        model.table.weight.requires_grad_(False)
        trained = [p for p in model.parameters() if p.requires_grad]
        return model, torch.optim.SGD(trained, lr=1.0)

    def work(worker):
        def train(thread):
            model = thread.model
            assert model.tied is model.dense
            assert not model.frozen.requires_grad
            assert not model.table.weight.requires_grad
            rows = model.table(torch.arange(4)[:, None])
            (model.tied.sum() + model.frozen.sum() + rows.sum()).backward()
            thread.optimizer.step()

        worker.session.run_threads(train, THREADS)
        worker.settled()
        return worker.refreshed()["dense"]

    for dense in run(comm, place, build_odd, work, sync=False):
        np.testing.assert_array_equal(dense, 0.25 - THREADS * place.workers)


@pytest.mark.ranks(1)
def test_threads_share_values_and_rates_and_compute_side_by_side(comm):
    """In one process: buffers and dense values are one memory, a scheduler of the worker counts."""

    def build_norm():
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        return model, torch.optim.SGD(model.parameters(), lr=0.5)

    def work(worker):
        meeting = threading.Barrier(THREADS, timeout=20)
        torch.set_num_threads(4)

        def train(thread):
            meeting.wait()  # both are here at once
            for own, theirs in zip(
                worker.model.state_dict().values(), thread.model.state_dict().values(), strict=True
            ):
                assert own.data_ptr() == theirs.data_ptr()
            assert torch.get_num_threads() == 2
            worker.optimizer.param_groups[0]["lr"] = 0.25
            assert thread.optimizer.hypers()[0][0, 0] == 0.25
            thread.model(torch.randn(4, 3)).sum().backward()
            assert next(worker.model.parameters()).grad is None

        try:
            worker.session.run_threads(train, THREADS)
            assert torch.get_num_threads() == 4
        finally:
            torch.set_num_threads(1)
        return True

    assert run(comm, Place(0, 1), build_norm, work) == [True]


@pytest.mark.ranks(1)
def test_the_time_after_a_threads_end_is_nobodys(comm):
    def work(worker):
        def train(thread):
            step(thread, thread.index)
            if thread.index:
                time.sleep(0.5)

        worker.session.run_threads(train, THREADS)
        return worker.optimizer.clock.split().seconds

    (seconds,) = run(comm, Place(0, 1), build, work, sync=False)
    # One thread sleeps between step() and the next forward that never comes, the other has ended.
    assert 0.5 <= seconds["data"] < 0.9


@pytest.mark.ranks(1)
def test_a_model_that_threads_cannot_have_is_named(comm):
    def work(worker):
        worker.model.lock = threading.Lock()
        with pytest.raises(ConfigError, match="cannot be copied"):
            worker.session.run_threads(lambda _: None, 2)
        del worker.model.lock
        worker.session.model = nn.Linear(1, 1)
        with pytest.raises(ConfigError, match="are not in the model"):
            worker.session.run_threads(lambda _: None, 2)
        return True

    assert run(comm, Place(0, 1), build, work) == [True]


@pytest.mark.ranks(1)
def test_a_thread_that_does_not_end_keeps_the_tables(comm, monkeypatch):
    monkeypatch.setattr(training_threads, "END_S", 0.2)
    ends = threading.Event()

    def work(worker):
        def train(thread):
            if thread.index:
                ends.wait(20)
            else:
                raise ValueError("bad sample")

        with pytest.raises(ValueError, match="bad sample"):
            worker.session.run_threads(train, 2)
        with pytest.raises(ConfigError, match="had not ended long after another one failed"):
            worker.optimizer.step()
        ends.set()
        return True

    assert run(comm, Place(0, 1), build, work) == [True]
