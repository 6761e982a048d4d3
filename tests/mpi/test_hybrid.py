"""Hybrid mode: rows change by every push undivided, dense parameters by one mean per step.

The gradients are whole numbers that depend on worker and step alone, so both sums are exact in any
order: rows must equal their first value less everything pushed, dense parameters less the sum over
steps of the mean over the workers that took part in each.
"""

import numpy as np
import pytest
import torch

from mpifleet.checkpoint import open_checkpoint
from mpifleet.ps.mailbox import Lane
from mpifleet.pull_ahead import ahead
from tests.mpi.jobs import TINY_BYTES, WORLD, Place, at_places, attempt, places, run
from tests.mpi.test_checkpoints import build as build_net
from tests.mpi.test_checkpoints import state as net_state
from tests.mpi.test_checkpoints import steps as net_steps
from tests.mpi.test_conservation import Sums, build, draws
from tests.mpi.test_dense_models import DenseOnly, train_dense
from tests.mpi.test_nonfinite import build as build_ones
from tests.mpi.test_nonfinite import state as ones_state
from tests.mpi.test_nonfinite import step as ones_step

ROWS, DIM = 97, 5


def gradients(worker, step):
    """draws, the dense gradient times six: its mean over one, two or three workers is whole."""
    keys, weights, grads = draws(worker, step)
    return keys, weights, 6 * grads


def one_step(worker, step):
    model, optimizer = worker.model, worker.optimizer
    keys, weights, grads = gradients(worker.index, step)
    out = model.table(torch.from_numpy(keys)[:, None])
    loss = (out * torch.from_numpy(weights)).sum()
    (loss + (model.dense * torch.from_numpy(grads)).sum()).backward()
    optimizer.step()
    optimizer.zero_grad()


def outcome(taken):
    """taken: for every merged step the (worker, step) that took part. What table and dense hold."""
    table, dense = np.full((ROWS, DIM), 0.5), np.full(700, 0.25)
    for together in taken:
        for worker, step in together:
            keys, weights, grads = gradients(worker, step)
            np.subtract.at(table, keys, weights)
            dense -= grads / len(together)
    return table, dense


def check(results, taken):
    table, dense = outcome(taken)
    for got_table, got_dense in results:
        np.testing.assert_array_equal(got_table, table)
        np.testing.assert_array_equal(got_dense, dense)


def by_counts(counts, first=0):
    """Who takes part in each step where worker w makes counts[w] of them, then none."""
    return [
        [(worker, first + step) for worker, count in enumerate(counts) if step < count]
        for step in range(max(counts))
    ]


def tiny_places():
    return [Place(p.servers, p.workers, p.home, TINY_BYTES) for p in places() if p.servers]


@pytest.mark.parametrize("place", [*places(), *tiny_places()], ids=str)
@pytest.mark.parametrize("num_ahead", [0, 2])
def test_rows_are_summed_and_dense_parameters_averaged(comm, place, num_ahead):
    def work(worker):
        def look_ups(step):
            return {worker.model.table: torch.from_numpy(gradients(worker.index, step)[0])[:, None]}

        for step in ahead(range(25), look_ups, num_ahead):
            one_step(worker, step)
            seen = worker.dense()["dense"]
            np.testing.assert_array_equal(
                seen, outcome(by_counts([step + 1] * worker.count))[1], f"after step {step}"
            )
        worker.settled()
        result = worker.table(), worker.refreshed()["dense"]
        worker.barrier()
        return result

    check(run(comm, place, build, work, hybrid=True), by_counts([25] * place.workers))


@at_places()
@pytest.mark.parametrize("first_is_longest", [True, False])
def test_uneven_workers_stop_while_others_train(comm, place, first_is_longest):
    """One makes no step at all, where there are three."""
    counts = {1: [9], 2: [12, 1], 3: [12, 7, 0]}[place.workers]
    counts = counts if first_is_longest else counts[::-1]

    def work(worker):
        for step in range(counts[worker.index]):
            one_step(worker, step)
        if counts[worker.index] < max(counts):
            worker.exchange.finish()
            return None
        worker.exchange.flush()
        # Rows of those that stopped before are applied: a stop comes after all it follows.
        return worker.table(), worker.refreshed()["dense"]

    results = [r for r in run(comm, place, build, work, hybrid=True) if r is not None]
    check(results, by_counts(counts))


@at_places()
def test_workers_meet_while_others_train(comm, place):
    """Three epochs of uneven length with a barrier after each: all go on from the same values."""
    counts = [3, 8, 0][: place.workers]

    def taken_before(epoch, step=0):
        taken = [who for e in range(epoch) for who in by_counts(counts, first=8 * e)]
        return taken + by_counts(counts, first=8 * epoch)[:step]

    def work(worker):
        seen = []
        for epoch in range(3):
            for step in range(counts[worker.index]):
                one_step(worker, 8 * epoch + step)
                _, dense = outcome(taken_before(epoch, step + 1))
                np.testing.assert_array_equal(worker.dense()["dense"], dense, f"{epoch}, {step}")
            worker.barrier()
            seen.append(worker.dense()["dense"])
        worker.settled()
        return [worker.table(), worker.refreshed()["dense"]], seen

    results = run(comm, place, build, work, hybrid=True)
    for epoch in range(3):
        _, dense = outcome(taken_before(epoch + 1))
        for _, seen in results:
            np.testing.assert_array_equal(seen[epoch], dense)
    check([values for values, _ in results], taken_before(3))


@pytest.mark.parametrize("place", places(), ids=str)
def test_a_model_without_tables_trains_as_in_sync_mode(comm, place):
    def dense_only():
        model = DenseOnly()
        return model, torch.optim.Adam(model.parameters(), lr=0.05)

    synced = run(comm, place, dense_only, train_dense, sync=True)
    assert run(comm, place, dense_only, train_dense, hybrid=True) == synced


@at_places()
def test_a_model_of_a_table_alone_waits_for_nobody(comm, place):
    def table_only():
        table = Sums().table
        return table, torch.optim.SGD(table.parameters(), lr=1.0)

    def work(worker):
        assert not worker.exchange.waits_for_others
        for step in range(20 if worker.index else 30):
            keys, weights, _ = draws(worker.index, step)
            out = worker.model(torch.from_numpy(keys)[:, None])
            (out * torch.from_numpy(weights)).sum().backward()
            worker.optimizer.step()
            worker.optimizer.zero_grad()
        worker.settled()
        return worker.table()

    results = run(comm, place, table_only, work, hybrid=True)
    counts = [30] + [20] * (place.workers - 1)
    table, _ = outcome(by_counts(counts))
    for got in results:
        np.testing.assert_array_equal(got, table)


@at_places()
@pytest.mark.parametrize(("bad", "where"), [(float("nan"), "rows"), (float("inf"), "dense")])
def test_a_skipped_push_is_left_out_of_rows_and_mean(comm, place, bad, where):
    def work(worker):
        ones_step(worker)
        ones_step(worker, bad if worker.index == 0 else None, where)
        ones_step(worker)
        worker.settled()
        result = ones_state(worker)
        worker.barrier()
        return result

    for first, second, dense in run(comm, place, build_ones, work, hybrid=True, skip=True):
        np.testing.assert_array_equal(first, 0.5 - (3 * place.workers - 1))
        np.testing.assert_array_equal(second, 0.5 - (3 * place.workers - 1))
        np.testing.assert_array_equal(dense, 0.5 - (2 + (place.workers > 1)))


@pytest.mark.parametrize(("bad", "where"), [(float("nan"), "rows"), (float("inf"), "dense")])
def test_a_push_that_is_not_finite_ends_the_job_by_name(comm, bad, where):
    def work(worker):
        ones_step(worker)
        ones_step(worker, bad, where)

    place = Place(1, 1) if WORLD.size > 1 else Place(0, 1)
    first, *_ = attempt(comm, place, build_ones, work, hybrid=True, end_s=0.4)
    table = "second" if where == "rows" else "dense0.float64"
    told = f"NonFiniteGradient: worker 0 pushed NaN or infinity for table {table!r} at step 2"
    assert first.error.startswith(told)


@at_places()
def test_what_is_saved_is_loaded(comm, shared_tmp_path, place):
    directory = shared_tmp_path / str(place)

    def save(worker):
        net_steps(worker, 0, 4)
        worker.settled()
        worker.session.persistables().save(directory)
        saved = net_state(worker)
        worker.barrier()
        return saved

    def load(worker):
        net_steps(worker, 4, 6)
        worker.session.persistables().load(directory)
        loaded = net_state(worker)
        worker.barrier()
        net_steps(worker, 4, 6)
        return loaded

    saved = run(comm, place, build_net, save, hybrid=True)
    loaded = run(comm, place, build_net, load, hybrid=True)
    buffers = ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked")
    for before, after in zip(saved, loaded, strict=True):
        shared = before.keys() - buffers  # buffers are each worker's own, worker 0's are saved
        assert {name: after[name] for name in shared} == {name: before[name] for name in shared}


@at_places()
def test_one_worker_saves_while_others_train(comm, shared_tmp_path, place):
    """The others wait for its next step; the file has the mean of all steps before."""
    directory = shared_tmp_path / str(place)

    def work(worker):
        for step in range(10):
            one_step(worker, step)
            if step == 4 and worker.index == 0:
                worker.session.persistables().save(directory)
        worker.settled()

    run(comm, place, build, work, hybrid=True)
    with open_checkpoint(directory) as checkpoint:
        dense = checkpoint.dense("dense").value
    np.testing.assert_array_equal(dense, outcome(by_counts([5] * place.workers))[1])


@pytest.mark.ranks(2, 3, 4)
@at_places()
def test_dense_gradients_are_never_stale(comm, place):
    def work(worker):
        for step in range(20):
            one_step(worker, step)

    outcomes = attempt(comm, place, build, work, hybrid=True)
    for server in (o for o in outcomes if o.name.startswith("server")):
        lag = server.value.lag[Lane.DENSE]
        assert (lag.num_pushes, lag.maximum) == (20 * place.workers, 0)
