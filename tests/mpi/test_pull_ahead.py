"""Rows pulled ahead: nothing is lost, and no row is older than it may be."""

from collections import Counter

import numpy as np
import pytest
import torch

from mpifleet.ps.client import Client
from mpifleet.ps.homes import NodeHome
from mpifleet.pull_ahead import ahead
from mpifleet.roles import Roles
from tests.mpi.jobs import Place, at_places, run
from tests.mpi.test_conservation import STEPS, build, draws, expected, train


@pytest.fixture(params=["own road", "served"])
def road(request, monkeypatch):
    """The roads of the place, or every pull through the servers, as between two nodes."""
    if request.param == "served":
        monkeypatch.setattr(NodeHome, "reaches", lambda *_: False)
        monkeypatch.setattr(Roles, "one_node", property(lambda _: False))
    return request.param


def look_ups(worker):
    def of(step):
        return {worker.model.table: torch.from_numpy(draws(worker.index, step)[0])[:, None]}

    return of


@pytest.mark.parametrize("num_batches", [1, 3])
@at_places()
def test_every_gradient_is_applied_once(comm, place, road, num_batches):
    if road == "served" and place.home != "node":
        pytest.skip("only tables of a node's memory are served")

    def work(worker):
        return train(worker, ahead(range(STEPS), look_ups(worker), num_batches))

    results = run(comm, place, build, work, sync=False)
    table, dense = expected(place.workers, STEPS)
    for got_table, got_dense in results:
        np.testing.assert_array_equal(got_table, table)
        np.testing.assert_array_equal(got_dense, dense)


@pytest.mark.ranks(2, 3)
def test_each_batch_is_asked_for_once_and_rows_are_those_of_the_step_before(
    comm, road, monkeypatch
):
    """One key, one more in every step: what a forward sees tells when its row was read."""
    asked = Counter()
    begin = Client.begin_rows

    def counted(self, table, unique):
        asked["times"] += 1
        return begin(self, table, unique)

    monkeypatch.setattr(Client, "begin_rows", counted)

    def work(worker):
        if worker.index:
            return []
        table, ids, seen = worker.model.table, torch.zeros(1, 1, dtype=torch.int64), []
        for _ in ahead(range(10), lambda _: {table: ids}, 1):
            out = table(ids)
            seen.append(float(out.detach()[0, 0]))
            (-out.sum() + 0.0 * worker.model.dense.sum()).backward()
            worker.optimizer.step()
            worker.optimizer.zero_grad()
        assert asked["times"] == 10
        return seen

    place = Place(1, comm.size - 1, "node")
    seen = run(comm, place, build, work, sync=False)[0]
    applied = [value - 0.5 for value in seen]
    # A near row is read in the step before, after the push and perhaps before it is applied; a far
    # one is read when it is asked for, which is before that step's forward.
    least = [max(step - (1 if road == "own road" else 2), 0) for step in range(10)]
    assert all(
        low <= value <= step for step, (low, value) in enumerate(zip(least, applied, strict=True))
    )


@pytest.mark.parametrize("num_batches", [1, 3])
@at_places()
def test_a_stream_that_rests_gives_rows_that_are_no_older(comm, place, road, num_batches):
    """30 steps of something else come between two of its batches."""
    if road == "served" and place.home != "node":
        pytest.skip("only tables of a node's memory are served")
    ids = torch.arange(97)[:, None]

    def work(worker):
        model, optimizer = worker.model, worker.optimizer

        def age(stream):
            next(stream)
            with torch.no_grad():
                now = model.table(ids).numpy().copy()
            seen = model.table(ids)
            (0 * seen.sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
            return np.abs(seen.detach().numpy() - now).max()

        stream = ahead([0] * 8, lambda _: {model.table: ids}, num_batches)
        ages = [age(stream)]
        worker.barrier()  # nobody's steps come between another's two looks
        for _ in range(30):
            model.table(ids).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        worker.exchange.flush()
        worker.barrier()
        ages.append(age(stream))
        worker.barrier()
        stream.close()
        return ages

    assert run(comm, place, build, work, sync=False) == [[0.0, 0.0]] * place.workers


@pytest.mark.ranks(1, 2)
@at_places()
def test_flush_forgets_what_was_pulled(comm, place):
    ids = torch.arange(5)[:, None]

    def work(worker):
        model, optimizer = worker.model, worker.optimizer
        stream = ahead([0, 1, 2], lambda _: {model.table: ids}, 2)
        next(stream)
        model.table(ids + 5).sum().backward()
        optimizer.step()
        worker.session.flush()
        assert model.table._expected.take(ids, None) is None
        stream.close()
        return True

    assert all(run(comm, place, build, work, sync=False))
