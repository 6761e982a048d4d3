"""Models leave a job and enter it, whoever calls, at any number of servers."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from mpifleet import exports, inference
from mpifleet.embedding import SparseEmbedding
from mpifleet.errors import CheckpointError
from mpifleet.portable.importing import check_matched, state_changes
from mpifleet.portable.inference_writing import write_inference
from mpifleet.portable.state_dict import read_state, state_streams, write_state
from mpifleet.portable.tensor_stream import TensorStream
from tests.mpi.jobs import at_places, run

ROWS = 61
ALL_IDS = torch.arange(2 * ROWS).reshape(-1, 2) % ROWS


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = SparseEmbedding("t", ROWS, 4)
        self.norm = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 1)

    def forward(self, ids):
        return self.out(self.norm(self.table(ids))).squeeze(1)


def build():
    model = Net()
    return model, torch.optim.Adam(model.parameters(), 0.05)


def train(worker, first, last):
    for step in range(first, last):
        draw = np.random.default_rng([worker.index, step])
        ids = torch.from_numpy(draw.integers(0, ROWS // 2, (5, 2)))
        worker.optimizer.zero_grad()
        functional.mse_loss(worker.model.train()(ids), ids.float().mean(1)).backward()
        worker.optimizer.step()


def predictions(model):
    with torch.no_grad():
        return model.eval()(ALL_IDS).tolist()


@at_places()
@pytest.mark.parametrize("keys", ["all", "trained"])
def test_an_exported_model_predicts_as_its_job(comm, shared_tmp_path, place, keys):
    """By worker 0 alone and by all workers, whose last pushes are in it."""
    directory = shared_tmp_path / str(place)

    def work(worker):
        train(worker, 0, 4)
        worker.barrier()  # all pushes are delivered, which is enough
        if keys == "all" or worker.index == 0:
            write = lambda source, told: write_inference(directory, source, keys, told)  # noqa: E731
            exports.export(worker.session, directory, write)
        worker.settled()
        worker.optimizer.refresh()
        theirs = predictions(worker.model)
        worker.barrier()
        return theirs if worker.index else (theirs, predictions(inference.load(directory, Net())))

    job, loaded = run(comm, place, build, work, sync=False)[0]
    assert loaded == job


@at_places()
def test_a_job_takes_over_a_state_dict_of_another(comm, shared_tmp_path, place):
    path = shared_tmp_path / "model.safetensors"

    def load(worker):
        def change(base):
            changes, unmatched = state_changes(base, read_state(path))
            check_matched(unmatched, path, "-")
            return changes, unmatched

        return exports.bring_in(worker.session, path, change)

    def saving(worker):
        train(worker, 0, 3)
        exports.export(
            worker.session, path, lambda source, _: write_state(path, state_streams(source))
        )
        worker.settled()
        return predictions(worker.model)

    def loading(worker):
        train(worker, 5, 7)
        assert [list(names) for names in load(worker)] == [[], []]
        taken = predictions(worker.model)
        worker.barrier()
        train(worker, 7, 9)
        worker.settled()
        if worker.index == 0:
            short = {n: t for n, t in read_state(path).items() if n != "out.bias"}
            path.unlink()
            write_state(path, streams_of(short))
        worker.barrier()
        with pytest.raises(CheckpointError, match=r"'out\.bias': not in"):
            load(worker)
        train(worker, 9, 10)
        return taken

    saved = run(comm, place, build, saving)
    taken = run(comm, place, build, loading)
    assert taken == [saved[0]] * place.workers
    assert [p.name for p in shared_tmp_path.iterdir()] == [path.name]


def streams_of(state):
    return [TensorStream.of(name, tensor.clone()) for name, tensor in state.items()]
