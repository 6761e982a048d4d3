"""Training threads of a worker: their steps are merged in sync mode, their own in async mode."""

import threading
import time

import numpy as np
import pytest
import torch
from torch import nn

from mpifleet.errors import ConfigError
from mpifleet.pull_ahead import ahead
from tests.mpi import test_conservation as conservation
from tests.mpi.jobs import at_places, run
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
    """Rows are keyed by their own number: a look-up gets what it asked for, whoever else asks."""

    def build_fixed():
        model = Sums()
        return model, torch.optim.SGD(model.parameters(), lr=0.0)

    def work(worker):
        def train(thread):
            rng = np.random.default_rng([worker.index, thread.index])
            batches = [torch.from_numpy(rng.integers(0, 97, (20, 1))) for _ in range(15)]
            for ids in ahead(batches, lambda ids: {thread.model.table: ids}, 2):
                out = thread.model.table(ids)
                assert (out == 0.5).all()
                out.sum().backward()
                thread.optimizer.step()
                thread.optimizer.zero_grad()

        worker.session.run_threads(train, THREADS)
        steps = worker.optimizer.clock.split().steps
        worker.settled()
        return steps

    assert run(comm, place, build_fixed, work, sync=False) == [2 * 15] * place.workers


@at_places()
def test_the_first_error_ends_all_threads_and_the_worker_goes_on(comm, place):
    """The others end at their next exchange, in sync mode also those that wait in a step."""

    def work(worker):
        ended = []

        def train(thread):
            try:
                for number in range(10_000_000):
                    if thread.index == 1 and number == 3:
                        raise ValueError("bad sample")
                    thread.model.table(torch.arange(3)[:, None]).sum().backward()
                    thread.optimizer.step()
                    thread.optimizer.zero_grad()
            finally:
                ended.append(thread.index)

        with pytest.raises(ValueError, match="bad sample"):
            worker.session.run_threads(train, 3)
        assert sorted(ended) == [0, 1, 2]
        assert threading.active_count() < 10
        worker.session.run_threads(lambda thread: step(thread, 0), 2)
        return True

    assert all(run(comm, place, build, work, sync=place.workers == 1))


@at_places()
def test_the_workers_own_model_and_optimizer_are_refused_meanwhile(comm, place):
    def work(worker):
        def wrong_table(thread):
            worker.model.table(torch.zeros(1, 1, dtype=torch.int64))

        def wrong_model(thread):
            worker.model(torch.zeros(1, 1, dtype=torch.int64))

        def wrong_optimizer(thread):
            worker.optimizer.step()

        def wrong_barrier(thread):
            worker.session.flush()

        words = r"thread\.model"
        for wrong in (wrong_table, wrong_model, wrong_optimizer, wrong_barrier):
            with pytest.raises(ConfigError, match=words):
                worker.session.run_threads(wrong, 2)
        step(worker, 0)  # and afterwards they are whole again
        worker.settled()
        return worker.table(), worker.refreshed()["dense"]

    class Callable(Sums):
        def forward(self, ids):
            return self.table(ids)

    def build_callable():
        model = Callable()
        return model, torch.optim.SGD(model.parameters(), lr=1.0)

    table, dense = np.full((97, 5), 0.5), np.full(700, 0.25)
    keys, weights, grads = draws(0, 0)
    np.subtract.at(table, keys, place.workers * weights)
    dense -= place.workers * grads
    for got_table, got_dense in run(comm, place, build_callable, work, sync=False):
        np.testing.assert_array_equal(got_table, table)
        np.testing.assert_array_equal(got_dense, dense)


@pytest.mark.ranks(1)
def test_threads_share_values_and_rates_and_compute_side_by_side(comm):
    """In one process: buffers and dense values are one memory, a scheduler of the worker counts."""
    from tests.mpi.jobs import Place

    def build_norm():
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        return model, torch.optim.SGD(model.parameters(), lr=0.5)

    def work(worker):
        meeting = threading.Barrier(THREADS, timeout=20)

        def train(thread):
            meeting.wait()  # both are here at once
            for own, theirs in zip(
                worker.model.state_dict().values(), thread.model.state_dict().values(), strict=True
            ):
                assert own.data_ptr() == theirs.data_ptr()
            assert torch.get_num_threads() == 1
            worker.optimizer.param_groups[0]["lr"] = 0.25
            assert thread.optimizer.hypers()[0][0, 0] == 0.25
            thread.model(torch.randn(4, 3)).sum().backward()
            assert next(worker.model.parameters()).grad is None
            time.sleep(0.01)

        worker.session.run_threads(train, THREADS)
        return True

    assert run(comm, Place(0, 1), build_norm, work) == [True]
