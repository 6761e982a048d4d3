"""Save and load through the face: any number of servers, any moment, any error, and go on."""

import time
from dataclasses import replace

import h5py
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from mpifleet.checkpoint import Keep, open_checkpoint
from mpifleet.embedding import SparseEmbedding
from mpifleet.errors import CheckpointError
from mpifleet.ps.saving import SaveOptions
from tests.mpi.jobs import TINY_BYTES, WORLD, Place, at_places, run

ROWS, DIM = 53, 4
BEHIND = SaveOptions(wait=False)


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
    """Everything in the newest checkpoint, rows in order of their keys."""
    with open_checkpoint(directory) as checkpoint:
        tables = [checkpoint.sparse(name) for name in checkpoint.sparse_names]
        blocks = {t.name: checkpoint.sparse_block(t.name, 0, t.num_rows) for t in tables}
        entries = [checkpoint.dense(name) for name in checkpoint.dense_names]
        return {
            "meta": checkpoint.meta,
            "dense": [(e.name, e.step, e.attrs, bits({"": e.value} | e.state)) for e in entries],
            "sparse": [(replace(t, num_shards=1), bits(blocks[t.name])) for t in tables],
            "buffers": bits(checkpoint.buffers()),
        }


def server_ranks(place):
    """Where the servers of a job are among the ranks of one node."""
    return list(range(place.workers, place.workers + place.servers)) or [0]


def bits(arrays):
    return {name: (a.dtype.str, a.shape, a.tobytes()) for name, a in arrays.items()}


def saving(directory, by_all=True):
    def work(worker):
        steps(worker, 0, 6)
        if by_all or worker.index == 0:
            worker.session.persistables().save(directory)
        saved = state(worker)
        worker.barrier()
        return saved

    return work


def loading(directory, more=0):
    def work(worker):
        worker.session.persistables().load(directory)
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
        names = sorted(path.name for path in directory.iterdir())
        assert names == ["latest", "model-000001.h5", "model-000001.h5.sums"]


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
                    worker.session.persistables().save(directory)
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
                worker.session.persistables().save(shared_tmp_path / str(round_))
            worker.barrier()

    run(comm, place, counters, work, sync=False)
    for round_ in range(5):
        with open_checkpoint(shared_tmp_path / str(round_)) as checkpoint:
            rows = checkpoint.sparse_block("t", 0, 5000)["rows"]
        np.testing.assert_array_equal(rows, (1 + round_) * place.workers)


def misfit(worker, directory):
    error = ""
    try:
        worker.session.persistables().load(directory)
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
            worker.session.persistables().load(shared_tmp_path)
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
            worker.session.persistables().load(shared_tmp_path)
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
    good, bad = shared_tmp_path / "good", shared_tmp_path / "good" / "latest" / "below"

    def work(worker):
        steps(worker, 0, 2)
        worker.session.persistables().save(good)
        worker.barrier()
        before = content(good)
        error = ""
        try:
            worker.session.persistables().save(bad)
        except CheckpointError as failure:
            error = str(failure)
        worker.barrier()
        steps(worker, 2, 4)
        unchanged = content(good) == before
        worker.barrier()
        worker.session.persistables().save(good)  # and saving goes on
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
        worker.session.persistables().load(shared_tmp_path)
        result = state(worker)
        worker.barrier()
        return result

    for result in run(comm, place, build, work, sync=False):
        assert result == saved[0]


@at_places()
def test_a_save_behind_training_has_the_moment_it_was_asked_for(comm, shared_tmp_path, place):
    """What is pushed while it is written is not in it; the next save waits for it."""

    def work(worker):
        steps(worker, 0, 4)
        worker.settled()
        moment = state(worker)
        worker.barrier()
        if worker.index == 0:
            worker.session.persistables().save(shared_tmp_path / "behind", BEHIND)
        worker.barrier()
        steps(worker, 4, 8)
        worker.settled()
        if worker.index == 0:
            worker.session.persistables().save(shared_tmp_path / "after")
        worker.barrier()
        worker.session.persistables().load(shared_tmp_path / "behind")
        loaded = state(worker)
        worker.barrier()
        # Buffers are each worker's own; a load gives all of them worker 0's.
        shared = [name for name in moment if worker.index == 0 or not name.startswith("norm.")]
        return [moment[name] == loaded[name] for name in shared]

    assert all(all(same) for same in run(comm, place, build, work))


@at_places()
def test_a_save_behind_training_becomes_visible_without_another_call(comm, shared_tmp_path, place):
    def work(worker):
        steps(worker, 0, 2)
        if worker.index == 0:
            worker.session.persistables().save(shared_tmp_path, BEHIND)
            end_s = time.monotonic() + 20
            while not (shared_tmp_path / "latest").exists():
                assert time.monotonic() < end_s
                if place.servers == 0:
                    worker.exchange.settle_saves()  # alone nobody else looks after it
                time.sleep(0.01)
            open_checkpoint(shared_tmp_path).close()
        worker.barrier()
        return True

    assert all(run(comm, place, build, work))


@at_places()
@pytest.mark.parametrize("at_stop", [False, True], ids=["next-save", "stop"])
def test_what_fails_behind_training_is_raised_later(
    comm, shared_tmp_path, place, monkeypatch, at_stop
):
    """The disk fails on the last server; the checkpoint before stays; saving goes on."""
    from mpifleet.ps import save_writing

    def work(worker):
        steps(worker, 0, 2)
        errors = []
        if worker.index == 0:
            worker.session.persistables().save(shared_tmp_path)
            fails.touch()
            worker.session.persistables().save(shared_tmp_path, BEHIND)
            try:
                if at_stop:
                    worker.exchange.finish()
                else:
                    worker.session.persistables().save(shared_tmp_path)
            except CheckpointError as error:
                errors.append(str(error))
            fails.unlink()
            if not at_stop:
                worker.session.persistables().save(shared_tmp_path)  # and saving goes on
        if not at_stop:
            worker.barrier()
        return errors

    fails = shared_tmp_path / "fails"
    real = save_writing.write_parts
    last_server = server_ranks(place)[-1]

    def write_parts(descriptor, parts):
        if fails.exists() and comm.rank == last_server:
            raise OSError(28, "No space left on device")
        return real(descriptor, parts)

    monkeypatch.setattr(save_writing, "write_parts", write_parts)
    results = run(comm, place, build, work)
    assert any("No space left on device" in error for error in results[0]), results
    assert open_checkpoint(shared_tmp_path).close() is None
    names = sorted(path.name for path in shared_tmp_path.glob("*.h5"))
    assert names == ["model-000001.h5" if at_stop else "model-000002.h5"]
    assert not list(shared_tmp_path.glob(".*"))


@at_places()
def test_busy_is_refused_where_asked_and_old_ones_go(comm, shared_tmp_path, place, monkeypatch):
    from mpifleet.ps import save_writing

    real = save_writing.write_parts

    def slow(descriptor, parts):
        time.sleep(0.3)
        return real(descriptor, parts)

    monkeypatch.setattr(save_writing, "write_parts", slow)

    def work(worker):
        error = ""
        if worker.index == 0:
            steps_alone = replace(BEHIND, refuse_busy=True)
            worker.session.persistables().save(shared_tmp_path, BEHIND)
            try:
                worker.session.persistables().save(shared_tmp_path, steps_alone)
            except CheckpointError as failure:
                error = str(failure)
            for _ in range(4):
                worker.session.persistables().save(shared_tmp_path, SaveOptions(keep=Keep(2, 3)))
        worker.barrier()
        return error

    errors = run(comm, place, build, work, sync=False)
    assert "still being written" in errors[0]
    names = sorted(path.name for path in shared_tmp_path.glob("*.h5"))
    assert names == [f"model-00000{number}.h5" for number in (3, 4, 5)]


@at_places()
def test_version_1_is_read(comm, shared_tmp_path, place):
    """As the first version wrote it: model.h5, keys ascending, no digests."""
    run(comm, place, build, saving(shared_tmp_path))
    before = run(comm, place, build, loading(shared_tmp_path))[0][0]
    if comm.rank == 0:
        as_version_1(shared_tmp_path)
    comm.Barrier()
    assert run(comm, place, build, loading(shared_tmp_path))[0][0] == before
    comm.Barrier()


def as_version_1(directory):
    with open_checkpoint(directory) as checkpoint:
        tables = [checkpoint.sparse(name) for name in checkpoint.sparse_names]
        blocks = {t.name: checkpoint.sparse_block(t.name, 0, t.num_rows) for t in tables}
        path = checkpoint.path
    with h5py.File(path, "r+") as file:
        file.attrs["format_version"] = 1
        for table in tables:
            group = file[f"sparse/{table.name}"]
            del group.attrs["num_shards"]
            group["keys"][:] = np.arange(table.num_rows)
            group["rows"][:] = blocks[table.name]["rows"]
            for slot in table.state_names:
                group["state"][slot][:] = blocks[table.name][slot]
    path.rename(directory / "model.h5")
    for other in ("latest", path.name + ".sums"):
        (directory / other).unlink()
