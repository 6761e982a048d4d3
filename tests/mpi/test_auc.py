"""Held-out AUC after one epoch of generated clicks: the same as one process reaches."""

from functools import cache

import numpy as np
import pytest
import torch

from mpifleet.data.criteo_synthetic import TEST_PART, synthetic_samples
from mpifleet.embedding import SparseEmbedding
from mpifleet.metrics import AUC
from mpifleet.models.ctr_dnn import CTRDNN
from tests.mpi.jobs import Place, run

ROWS, TEST_ROWS, BATCH, MARGIN = 30_000, 10_000, 500, 0.001
ONE = Place(0, 1)

pytestmark = pytest.mark.timeout(100)


@cache
def samples(rows, part):
    return synthetic_samples(rows, seed=0, part=part)


def build():
    embedding = SparseEmbedding("emb", 1_000_001, 10, scale=0.1)
    model = CTRDNN(embedding, hidden=(64, 64))
    return model, torch.optim.Adam(model.parameters(), lr=2e-3)


def epoch(worker):
    """Each worker takes its share of every joint batch of BATCH rows. Returns the AUC."""
    data, share = samples(ROWS, 0), BATCH // worker.count
    for start in range(worker.index * share, ROWS, BATCH):
        part = data.rows(slice(start, start + share))
        worker.optimizer.zero_grad()
        worker.model.loss(*tensors(part), torch.from_numpy(part.labels)).backward()
        worker.optimizer.step()
    worker.settled()
    worker.optimizer.refresh()
    held_out, auc = samples(TEST_ROWS, TEST_PART), AUC()
    auc.update(worker.model.probability(*tensors(held_out)).numpy(), held_out.labels)
    worker.barrier()
    return auc.compute()


def tensors(part):
    return torch.from_numpy(np.ascontiguousarray(part.dense)), torch.from_numpy(part.ids)


@pytest.mark.ranks(2)
def test_async_with_one_worker_is_as_good_as_one_process(comm):
    (alone,) = run(comm, ONE, build, epoch)
    (auc,) = run(comm, Place(1, 1), build, epoch, sync=False)
    assert alone > 0.70, "the fixture does not learn"
    assert abs(auc - alone) <= MARGIN, f"{auc:.5f} against {alone:.5f} in one process"


@pytest.mark.ranks(3)
def test_two_workers_in_sync_mode_are_one_process_on_the_joint_batch(comm, capsys):
    (alone,) = run(comm, ONE, build, epoch)
    auc, same = run(comm, Place(1, 2), build, epoch)
    assert alone > 0.70, "the fixture does not learn"
    assert auc == same
    assert abs(auc - alone) <= MARGIN, f"{auc:.5f} against {alone:.5f} in one process"
    # The other worker's updates are a real staleness: reported, not held to a margin.
    stale = run(comm, Place(1, 2), build, epoch, sync=False)
    with capsys.disabled():
        if comm.rank == 0:
            print(f"\nAUC: one process {alone:.5f}, sync {auc:.5f}, async {np.mean(stale):.5f}")
