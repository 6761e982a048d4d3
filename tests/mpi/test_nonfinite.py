"""Gradients that are not finite: refused whole, by name, before they touch anything."""

import numpy as np
import pytest
import torch
from torch import nn

from mpifleet.embedding import SparseEmbedding
from tests.mpi.jobs import WORLD, Place, at_places, attempt, run

DIM, DENSE = 3, 64  # dense elements for every one of two servers
BAD = [(float("nan"), "rows"), (float("inf"), "dense"), (float("-inf"), "rows")]


class Model(nn.Module):
    """Rows of `first` and `second`, and one dense parameter, all at 0.5; gradients are ones."""

    def __init__(self):
        super().__init__()
        options = {"pooling": "sum", "initializer": "constant", "scale": 0.5}
        self.first = SparseEmbedding("first", 8, DIM, dtype=torch.float64, **options)
        self.second = SparseEmbedding("second", 8, DIM, dtype=torch.float64, **options)
        self.dense = nn.Parameter(torch.full((DENSE,), 0.5, dtype=torch.float64))

    def ones(self):
        keys = torch.arange(8)[:, None]
        return self.first(keys).sum() + self.second(keys).sum() + self.dense.sum()


def build():
    model = Model()
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def step(worker, bad=None, where="rows"):
    model, optimizer = worker.model, worker.optimizer
    optimizer.zero_grad()
    loss = model.ones()
    if bad is not None and where == "rows":
        loss = loss + (model.second(torch.tensor([[3]])) * bad).sum()
    loss.backward()
    if bad is not None and where == "dense":
        model.dense.grad[5] = bad  # the first server's part
    optimizer.step()


def state(worker):
    tables = [worker.table(worker.model.first), worker.table(worker.model.second)]
    return [*tables, worker.refreshed()["dense"]]


@pytest.mark.parametrize(("bad", "where"), BAD)
@pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
def test_raises_at_the_server_and_touches_nothing(comm, bad, where, sync):
    place = Place(1, 1) if WORLD.size > 1 else Place(0, 1)

    def work(worker):
        for _ in range(2):
            step(worker)
        worker.settled()
        before = state(worker)
        error = ""
        try:
            step(worker, bad, where)
            worker.exchange.flush()
        except Exception as failure:
            error = str(failure)
        return before, state(worker), error

    outcomes = attempt(comm, place, build, work, sync=sync, end_s=0.4)
    *servers, worker = outcomes
    before, after, error = worker.value
    text = servers[0].error if servers else f"NonFiniteGradient: {error}"
    table = "second" if where == "rows" else "dense0.float64"
    assert text.startswith(
        f"NonFiniteGradient: worker 0 pushed NaN or infinity for table {table!r} at step 3"
    )
    assert error
    for left, right in zip(before, after, strict=True):
        np.testing.assert_array_equal(left, -1.5)
        np.testing.assert_array_equal(right, -1.5)


@at_places()
@pytest.mark.parametrize(("bad", "where"), BAD)
@pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
def test_skip_leaves_the_whole_push_out_on_every_server(comm, place, bad, where, sync):
    def work(worker):
        step(worker)
        is_bad = worker.index == 0
        step(worker, bad if is_bad else None, where)
        step(worker)
        worker.settled()
        result = state(worker)
        worker.barrier()
        return result

    for values in run(comm, place, build, work, sync=sync, skip=True):
        # sync: two whole steps, and one of the others' mean, which is one where there are others.
        steps = 2 + (place.workers > 1) if sync else 3 * place.workers - 1
        for array in values:
            np.testing.assert_array_equal(array, 0.5 - steps)


@at_places()
def test_a_skipped_push_is_not_an_update_of_the_rule(comm, place):
    """adam's bias correction counts applied updates, the same on every server."""

    def adam():
        model = Model()
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    def work(bad):
        def train(worker):
            step(worker)
            if bad:
                step(worker, float("nan"), "dense")
            step(worker)
            worker.settled()
            return state(worker)

        return train

    clean = run(comm, place, adam, work(False), skip=True)
    skipped = run(comm, place, adam, work(True), skip=True)
    for left, right in zip(clean[0], skipped[0], strict=True):
        np.testing.assert_array_equal(left, right)
