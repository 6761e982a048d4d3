"""No push is lost, doubled or torn: integer gradients, any order, exact sums.

float64 adds integers exactly in any order, so after the flush every table must equal its first
value plus all that was pushed, to the last bit, however the servers interleaved the workers.
"""

import numpy as np
import pytest
import torch
from torch import nn

from mpifleet.embedding import SparseEmbedding
from mpifleet.exchange import Gradients
from mpifleet.partition import unique_keys
from tests.mpi.jobs import TINY_BYTES, WORLD, Place, at_places, places, run

ROWS, DIM, STEPS = 97, 5, 40


class Sums(nn.Module):
    """A table and a dense parameter, both starting at dyadic numbers."""

    def __init__(self, rows=ROWS, dense=700):
        super().__init__()
        self.table = SparseEmbedding(
            "t", rows, DIM, pooling="sum", initializer="constant", scale=0.5, dtype=torch.float64
        )
        self.dense = nn.Parameter(torch.full((dense,), 0.25, dtype=torch.float64))


def build():
    model = Sums()
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def draws(worker, step, rows=ROWS, dense=700):
    """Keys with many duplicates [n], their integer weights [n, DIM], integer dense gradient."""
    rng = np.random.default_rng([worker, step])
    count = int(rng.integers(0, 60))
    keys = rng.integers(0, rows, count) // rng.integers(1, 9)
    weights = rng.integers(-9, 10, (count, DIM)).astype(np.float64)
    return keys, weights, rng.integers(-9, 10, dense).astype(np.float64)


def expected(num_workers, steps, divide=1, rows=ROWS, dense=700):
    """First values minus everything pushed."""
    table, flat = np.full((rows, DIM), 0.5), np.full(dense, 0.25)
    for worker in range(num_workers):
        for step in range(steps):
            keys, weights, grads = draws(worker, step, rows, dense)
            np.subtract.at(table, keys, weights / divide)
            flat -= grads / divide
    return table, flat


def train(worker, steps=range(STEPS)):
    """Through the face: forward, backward, step, without a pause."""
    model, optimizer = worker.model, worker.optimizer
    for step in steps:
        keys, weights, grads = draws(worker.index, step)
        out = model.table(torch.from_numpy(keys)[:, None])
        loss = (out * torch.from_numpy(weights)).sum()
        (loss + (model.dense * torch.from_numpy(grads)).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    worker.settled()
    result = worker.table(), worker.refreshed()["dense"]
    worker.barrier()
    return result


@at_places()
def test_async_applies_every_gradient_once(comm, place):
    results = run(comm, place, build, train, sync=False)
    table, dense = expected(place.workers, STEPS)
    for got_table, got_dense in results:
        np.testing.assert_array_equal(got_table, table)
        np.testing.assert_array_equal(got_dense, dense)


@at_places()
def test_sync_applies_the_mean_of_every_step(comm, place):
    divide = {1: 1, 2: 2, 3: 3}[place.workers]
    if divide == 3:
        # Thirds are not exact: gradients that are multiples of three are.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(f"{__name__}.draws", tripled(draws))
            results = run(comm, place, build, train)
            table, dense = expected(3, STEPS, 3)
    else:
        results = run(comm, place, build, train)
        table, dense = expected(place.workers, STEPS, divide)
    for got_table, got_dense in results:
        np.testing.assert_array_equal(got_table, table)
        np.testing.assert_array_equal(got_dense, dense)


def tripled(plain):
    def draws(*where):
        keys, weights, grads = plain(*where)
        return keys, 3 * weights, 3 * grads

    return draws


def push_without_pause(worker):
    """Straight to the exchange: no pull of rows between pushes, messages of several pieces."""
    rows, dense, specs = 3000, 9000, worker.optimizer.specs
    hypers = worker.optimizer.hypers()
    flats = [np.zeros(dense)]
    present = [np.ones(1, np.uint8)]
    for step in range(12):
        keys, weights, grads = draws(worker.index, step, rows, dense)
        keys, weights = np.tile(keys, 40), np.tile(weights, (40, 1))
        keys = (keys + np.arange(keys.size)) % rows
        unique = unique_keys(keys, rows, worker.exchange.num_servers, specs.sparse[0].name)
        sums = np.zeros((unique.keys.size, DIM))
        np.add.at(sums, unique.inverse, weights)
        gradients = Gradients(hypers[0], present, [grads], hypers[1], [unique], [sums])
        worker.exchange.step(gradients, flats)
    worker.settled()
    result = worker.table(), worker.refreshed()["dense"]
    worker.barrier()
    return result


def build_large():
    model = Sums(3000, 9000)
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def tiny_places():
    found = [Place(p.servers, p.workers, p.home, TINY_BYTES) for p in places()]
    return found if WORLD.size > 1 else []


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("place", tiny_places() or [None], ids=str)
def test_pushes_in_pieces_from_workers_that_never_wait(comm, place):
    results = run(comm, place, build_large, push_without_pause, sync=False)
    table, dense = np.full((3000, DIM), 0.5), np.full(9000, 0.25)
    for worker in range(place.workers):
        for step in range(12):
            keys, weights, grads = draws(worker, step, 3000, 9000)
            keys, weights = np.tile(keys, 40), np.tile(weights, (40, 1))
            np.subtract.at(table, (keys + np.arange(keys.size)) % 3000, weights)
            dense -= grads
    for got_table, got_dense in results:
        np.testing.assert_array_equal(got_table, table)
        np.testing.assert_array_equal(got_dense, dense)


def read_own_writes(worker):
    """Each worker owns a row: after its flush it sees all its own pushes, never more."""
    table, seen = worker.model.table, []
    key = torch.tensor([[worker.index]])
    for _ in range(15):
        table(key).sum().backward()
        worker.optimizer.step()
        worker.optimizer.zero_grad()
        worker.exchange.flush()
        with torch.no_grad():
            seen.append(table(key).numpy().copy())
    return np.concatenate(seen)


@at_places()
def test_after_a_flush_a_worker_reads_its_own_writes(comm, place):
    for seen in run(comm, place, build, read_own_writes, sync=False):
        np.testing.assert_array_equal(seen, 0.5 - np.arange(1.0, 16.0)[:, None] * np.ones(DIM))


def count_up(worker):
    """All add ones to all elements of one row; every read is a count, and counts never fall."""
    seen = []
    key = torch.zeros(1, 1, dtype=torch.int64)
    for _ in range(60):
        rows = worker.model.table(key)
        seen.append(rows.detach().numpy().copy())
        (-rows).sum().backward()
        worker.optimizer.step()
        worker.optimizer.zero_grad()
    worker.settled()
    seen.append(worker.table()[:1])
    return np.concatenate(seen)


@at_places()
def test_reads_are_whole_rows_that_never_go_back(comm, place):
    results = run(comm, place, build, count_up, sync=False)
    for seen in results:
        counts = seen - 0.5
        assert (counts == counts.round()).all()
        assert (counts == counts[:, :1]).all(), "a row was read while it was being written"
        assert (np.diff(counts[:, 0]) >= 0).all()
        assert counts[-1, 0] == 60 * place.workers
