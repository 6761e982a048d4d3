"""What workers have in common after they met, and what they start from."""

import os

import numpy as np
import pytest
import torch
from torch import nn

from mpifleet.embedding import SparseEmbedding
from mpifleet.errors import ConfigError, TableError
from mpifleet.local_state import share
from tests.mpi.jobs import at_places, run
from tests.mpi.outcomes import raised, together


def build():
    torch.manual_seed(0)
    model = nn.Sequential(SparseEmbedding("emb", 8, 2, pooling="sum"), nn.Linear(2, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


@pytest.mark.ranks(3, 4)
@at_places(least_workers=2)
def test_after_a_barrier_all_go_on_from_the_same_parameters(comm, place):
    def work(worker):
        for _ in range(3 if worker.index == 0 else 0):
            worker.optimizer.zero_grad()
            worker.model(torch.tensor([[1, 2]])).sum().backward()
            worker.optimizer.step()
        worker.barrier()
        return worker.model[1].bias.item()

    biases = run(comm, place, build, work, sync=True)
    assert len(set(biases)) == 1
    assert biases[0] != build()[0][1].bias.item(), "three steps were made"


@pytest.mark.ranks(2, 3, 4)
@at_places()
def test_workers_may_meet_after_they_have_stopped(comm, place):
    def work(worker):
        worker.exchange.finish()
        return worker.session.util.all_gather(worker.index)

    gathered = run(comm, place, build, work, sync=True)
    assert gathered == [list(range(place.workers))] * place.workers


@pytest.mark.ranks(3, 4)
@at_places(least_workers=2)
def test_after_a_collective_that_failed_nobody_steps(comm, place):
    """The others do not wait for such a worker any more: its gradient would never be applied."""

    def work(worker):
        with pytest.raises(ConfigError):
            worker.session.util.all_reduce(np.ones(2 + worker.index))
        worker.model(torch.tensor([[1, 2]])).sum().backward()
        with pytest.raises(TableError, match="a collective call of the workers failed"):
            worker.optimizer.step()

    run(comm, place, build, work, sync=True)


@pytest.mark.ranks(2, 3, 4)
def test_frozen_parameters_and_buffers_are_worker_0s(comm):
    torch.manual_seed(os.getpid())
    tensors = {
        "weight": nn.Parameter(torch.randn(3, 2), requires_grad=False),
        "count": torch.tensor(comm.rank),
        "half": torch.randn(5).to(torch.bfloat16),
        "strided": torch.randn(4, 3).t(),
        "none": torch.zeros(0),
    }
    first = {name: comm.bcast(tensor.tolist()) for name, tensor in tensors.items()}
    share(comm, tensors)
    assert together(comm, {name: t.tolist() for name, t in tensors.items()} == first)


@pytest.mark.ranks(2, 3)
def test_workers_with_other_buffers_are_told(comm):
    size = 3 if comm.rank == 1 else 2
    text = raised(ConfigError, share, comm, {"cache": torch.zeros(size)})
    assert together(comm, "cache" in text and "workers disagree" in text)
