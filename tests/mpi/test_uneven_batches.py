"""Workers with different numbers of batches all finish, and the mean is over the active ones."""

import numpy as np
import pytest
from torch.nn import functional

from tests.mpi.jobs import Place, at_places, run
from tests.mpi.joint_batch import Oracle, build_linear, exact_batch, linear_loss, sgd


class Uneven:
    """A worker function: worker w takes batches[w] steps, then stops while others go on."""

    def __init__(self, batches):
        self.batches = batches

    def __call__(self, worker):
        first = {**worker.dense(), "table": worker.table()}
        worker.barrier()
        for step in range(self.batches[worker.index]):
            inputs, ids, targets = exact_batch(worker.index, step)
            worker.optimizer.zero_grad()
            functional.mse_loss(worker.model(inputs, ids), targets).backward()
            worker.optimizer.step()
        exchange = worker.exchange
        if worker.index:
            exchange.finish()
            return first, None
        # Worker 0 has most batches and is last to stop: what it sees is the end.
        exchange.flush()
        return first, {**worker.refreshed(), "table": worker.table()}


@at_places(least_workers=2)
@pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
def test_workers_with_different_numbers_of_batches_all_finish(comm, place, sync):
    batches = (10, 7, 0) if place.workers == 3 else (10, 1)
    results = run(comm, place, build_linear, Uneven(batches), sync=sync)
    if not sync:
        return
    oracle = Oracle(results[0][0], sgd, "sgd")
    for step in range(10):
        active = [worker for worker, count in enumerate(batches) if step < count]
        joint = [exact_batch(worker, step) for worker in active]
        oracle.step(
            lambda params, rows: [linear_loss(params, rows, batch) for batch in joint],  # noqa: B023
            np.concatenate([batch[1].numpy().ravel() for batch in joint]),
            len(active),
        )
    for name, values in oracle.values().items():
        np.testing.assert_allclose(results[0][1][name], values, rtol=1e-12, atol=1e-13)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("idle", [0, 1, 2])
def test_a_worker_without_batches_holds_nobody_up(comm, idle):
    batches = [4, 4, 4]
    batches[idle] = 0

    def work(worker):
        for step in range(batches[worker.index]):
            inputs, ids, targets = exact_batch(worker.index, step)
            worker.optimizer.zero_grad()
            functional.mse_loss(worker.model(inputs, ids), targets).backward()
            worker.optimizer.step()
        return worker.exchange._step

    assert run(comm, Place(1, 3), build_linear, work) == batches
