"""Save and load through the face: any number of servers, any moment, any error, and go on."""

import h5py
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from mpifleet.checkpoint import open_checkpoint
from mpifleet.embedding import SparseEmbedding
from mpifleet.errors import CheckpointError
from tests.mpi.jobs import TINY_BYTES, WORLD, Place, at_places, run

ROWS, DIM = 53, 4


class Net(nn.Module):
    """Two tables, a batch norm with its buffers, a frozen parameter and a linear layer."""

    def __init__(self, width=30, rows=ROWS):
        super().__init__()
        self.one = SparseEmbedding("one", rows, DIM, pooling="sum")
        self.two = SparseEmbedding("two", 7, 2, pooling="sum", dtype=torch.float64)
        self.norm = nn.BatchNorm1d(DIM + 2)
        self.hidden = nn.Linear(DIM + 2, width)
        self.scale = nn.Parameter(torch.full((1,), 2.0), requires_grad=False)

    def forward(self, ids):
        joined = torch.cat([self.one(ids % self.one.num_rows), self.two(ids % 7).float()], 1)
        return self.hidden(self.norm(joined)).sum(1) * self.scale


def build(width=30, rows=ROWS):
    model = Net(width, rows)
    trained = [param for param in model.parameters() if param.requires_grad]
    return model, torch.optim.Adam(trained, lr=0.02)


def steps(worker, first, last):
    for step in range(first, last):
        rng = np.random.default_rng([worker.index, step])
        ids = torch.from_numpy(rng.integers(0, 1000, (6, 3)))
        targets = torch.from_numpy(rng.normal(size=6).astype(np.float32))
        worker.optimizer.zero_grad()
        functional.mse_loss(worker.model(ids), targets).backward()
        worker.optimizer.step()


def state(worker):
    """Everything a checkpoint must bring back, as bytes by name."""
    model = worker.model
    values = {
        **worker.refreshed(),
        **{name: buffer.numpy().copy() for name, buffer in model.named_buffers()},
        "one": worker.table(model.one),
        "two": worker.table(model.two),
    }
    return {name: array.tobytes() for name, array in values.items()}


def content(directory):
    """Every dataset and attribute of the file, by its path inside."""
    found = {}

    def visit(name, item):
        found[name] = {key: str(value) for key, value in item.attrs.items()}
        if isinstance(item, h5py.Dataset):
            found[name]["value"] = (item.dtype.str, item.shape, item[()].tobytes())

    with h5py.File(directory / "model.h5") as file:
        file.visititems(visit)
        found["/"] = {key: str(value) for key, value in file.attrs.items()}
    return found


def saving(directory, by_all=True):
    def work(worker):
        steps(worker, 0, 6)
        if by_all or worker.index == 0:
            worker.session.save(directory)
        saved = state(worker)
        worker.barrier()
        return saved

    return work


def loading(directory, more=0):
    def work(worker):
        worker.session.load(directory)
        loaded = state(worker)
        worker.barrier()
        steps(worker, 6, 6 + more)
        worker.settled()
        return loaded, state(worker)

    return work


def all_places(workers):
    """Jobs with this many workers on the ranks that are there; the first is the smallest."""
    found = [Place(0, 1)] if workers == 1 else []
    return found + [Place(servers, workers) for servers in range(1, WORLD.size - workers + 1)]


@pytest.mark.parametrize("by_all", [True, False], ids=["by-all", "by-worker-0"])
@pytest.mark.parametrize("workers", range(1, max(2, WORLD.size)))
def test_same_file_whatever_the_number_of_servers(comm, shared_tmp_path, workers, by_all):
    reference = None
    for place in all_places(workers):
        directory = shared_tmp_path / str(place)
        run(comm, place, build, saving(directory, by_all))
        found = content(directory)
        reference = reference or found
        assert found == reference, f"{place} differs"
        assert [path.name for path in directory.iterdir()] == ["model.h5"]


@pytest.mark.parametrize("at_start", [False, True], ids=["load", "init_server"])
def test_resume_at_another_number_of_servers_is_uninterrupted(comm, shared_tmp_path, at_start):
    """Values, buffers, optimizer state: the next steps have the same bits."""

    def uninterrupted(worker):
        steps(worker, 0, 6)
        middle = state(worker)
        steps(worker, 6, 12)
        return middle, state(worker)

    everywhere = all_places(1)
    (expected,) = run(comm, everywhere[-1], build, uninterrupted)
    for saver, loader in zip(everywhere, everywhere[1:] + everywhere[:1], strict=True):
        directory = shared_tmp_path / f"{saver}-{at_start}"
        (saved,) = run(comm, saver, build, saving(directory))
        assert saved == expected[0]
        start = directory if at_start else None
        (resumed,) = run(comm, loader, build, loading(directory, more=6), load_from=start)
        assert resumed == expected, f"saved by {saver}, loaded by {loader}"


@at_places()
@pytest.mark.parametrize("mailbox", [None, TINY_BYTES], ids=["", "tiny"])
def test_a_save_among_async_pushes_has_every_flushed_one(comm, shared_tmp_path, place, mailbox):
    """sgd on ones: the file's counts lie between what was flushed before and begun by its end."""
    wide = 4000 if mailbox else 40
    if mailbox:
        place = Place(place.servers, place.workers, place.home, mailbox)

    def counters():
        table = SparseEmbedding(
            "t", wide, 8, pooling="sum", initializer="zeros", dtype=torch.float64
        )
        return table, torch.optim.SGD(table.parameters(), lr=1.0)

    keys = torch.arange(wide)[:, None]

    def work(worker):
        directory = shared_tmp_path / str(place)
        flushed = 0
        for round_ in range(12):
            (-worker.model(keys).sum()).backward()
            worker.optimizer.step()
            worker.optimizer.zero_grad()
            if round_ == 3:
                worker.exchange.flush()
                flushed = round_ + 1
                if worker.index == 0:
                    worker.session.save(directory)
        worker.settled()
        return flushed

    run(comm, place, counters, work, sync=False)
    with open_checkpoint(shared_tmp_path / str(place)) as checkpoint:
        rows = checkpoint.sparse_block("t", 0, wide)["rows"]
    assert (rows == rows.round()).all()
    assert rows.min() >= 4, "what worker 0 had flushed is missing"
    assert rows.max() <= 4 + 12 * (place.workers - 1)
    assert (rows == rows[:, :1]).all()


@at_places()
def test_a_save_has_every_push_that_was_delivered_before_it(comm, shared_tmp_path, place):
    """Delivered is enough: what still lies in a lane is applied first."""

    def counters():
        table = SparseEmbedding("t", 5000, 8, initializer="zeros", dtype=torch.float64)
        return table, torch.optim.SGD(table.parameters(), lr=1.0)

    keys = torch.arange(5000)[:, None]

    def work(worker):
        for round_ in range(5):
            (-worker.model(keys).sum()).backward()
            worker.optimizer.step()  # without a flush
            worker.optimizer.zero_grad()
            worker.barrier()
            if worker.index == 0:
                worker.session.save(shared_tmp_path / str(round_))
            worker.barrier()

    run(comm, place, counters, work, sync=False)
    for round_ in range(5):
        with open_checkpoint(shared_tmp_path / str(round_)) as checkpoint:
            rows = checkpoint.sparse_block("t", 0, 5000)["rows"]
        np.testing.assert_array_equal(rows, (1 + round_) * place.workers)


def misfit(worker, directory):
    error = ""
    try:
        worker.session.load(directory)
    except CheckpointError as failure:
        error = str(failure)
    steps(worker, 6, 8)  # the job goes on
    worker.settled()
    return error


@at_places()
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"width": 31}, ["'hidden.weight'", "(30, 6)", "(31, 6)"]),
        ({"rows": 54}, ["table 'one'", "53", "54"]),
    ],
    ids=["dense", "sparse"],
)
def test_a_wrong_model_is_named_on_every_worker_and_nothing_changes(
    comm, shared_tmp_path, place, wrong, words
):
    run(comm, place, build, saving(shared_tmp_path))

    def work(worker):
        before = state(worker)
        worker.barrier()
        error = ""
        try:
            worker.session.load(shared_tmp_path)
        except CheckpointError as failure:
            error = str(failure)
        after = state(worker)
        worker.barrier()
        steps(worker, 0, 2)
        worker.settled()
        return error, before == after

    for error, unchanged in run(comm, place, lambda: build(**wrong), work):
        assert all(word in error for word in words), error
        assert unchanged


@at_places()
def test_a_buffer_that_is_missing_is_found_before_anything_changes(comm, shared_tmp_path, place):
    run(comm, place, build, saving(shared_tmp_path))

    def with_more():
        model, _ = build()
        model.register_buffer("extra", torch.zeros(3))
        trained = [param for param in model.parameters() if param.requires_grad]
        return model, torch.optim.Adam(trained, lr=0.02)

    def work(worker):
        before = state(worker)
        worker.barrier()
        try:
            worker.session.load(shared_tmp_path)
        except CheckpointError as failure:
            return str(failure), state(worker) == before
        return "", False

    for error, unchanged in run(comm, place, with_more, work):
        assert "'extra'" in error
        assert unchanged


@at_places()
def test_no_file_is_an_error_on_every_worker(comm, shared_tmp_path, place):
    errors = run(comm, place, build, lambda worker: misfit(worker, shared_tmp_path / "none"))
    assert all("none" in error for error in errors)


@at_places()
def test_a_directory_that_cannot_be_written_leaves_the_last_file_and_the_job(
    comm, shared_tmp_path, place
):
    """A file stands where the directory should be: that stops root too."""
    good, bad = shared_tmp_path / "good", shared_tmp_path / "good" / "model.h5" / "below"

    def work(worker):
        steps(worker, 0, 2)
        worker.session.save(good)
        worker.barrier()
        before = content(good)
        error = ""
        try:
            worker.session.save(bad)
        except CheckpointError as failure:
            error = str(failure)
        worker.barrier()
        steps(worker, 2, 4)
        unchanged = content(good) == before
        worker.barrier()
        worker.session.save(good)  # and saving goes on
        worker.barrier()
        return error, unchanged, content(good) != before

    results = run(comm, place, build, work)
    assert str(bad) in results[0][0]
    assert all(not error for error, *_ in results[1:])
    assert all(unchanged and changed for _, unchanged, changed in results)


@at_places(least_workers=2)
def test_loading_drops_what_was_pushed_before(comm, shared_tmp_path, place):
    """Async: a push still in a lane must not land on the rows that were loaded."""
    run(comm, place, build, saving(shared_tmp_path))
    (saved, *_) = run(comm, place, build, loading(shared_tmp_path))

    def work(worker):
        steps(worker, 0, 5)
        worker.session.load(shared_tmp_path)
        result = state(worker)
        worker.barrier()
        return result

    for result in run(comm, place, build, work, sync=False):
        assert result == saved[0]
