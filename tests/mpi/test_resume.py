"""Resume through the face: the same bits in lock step, no step lost or made twice in every mode."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from mpifleet.embedding import SparseEmbedding
from mpifleet.errors import CheckpointError
from mpifleet.ps.saving import SaveOptions
from mpifleet.resume import Resumption
from tests.mpi.jobs import WORLD, Place, at_places, run
from tests.unit.resuming import ROWS, Net

BATCHES, SAVED_AT = 7, 3


def build():
    model = Net()
    dense = [*model.norm.parameters(), *model.out.parameters()]
    groups = [{"params": dense}, {"params": model.table.parameters(), "lr": 0.05}]
    return model, torch.optim.Adam(groups, lr=0.02)


def resumption(worker):
    return Resumption(worker.session.persistables(), worker.session.states)


def begin(worker, schedule=True):
    """What a script sets up before it resumes: a schedule, and random numbers of its own."""
    torch.manual_seed(100 + worker.index)
    if schedule:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(worker.optimizer, 0.1, total_steps=50)
        worker.session.states.register("schedule", scheduler, per_worker=False)
        return scheduler
    return None


def train(worker, scheduler, first, last, flushes=False):
    for step in range(first, last):
        ids = np.random.default_rng([worker.index, step]).integers(0, ROWS, (6, 2))
        worker.optimizer.zero_grad()
        loss = functional.mse_loss(worker.model(torch.from_numpy(ids)), torch.randn(6))
        loss.backward()
        worker.optimizer.step()
        scheduler.step()
        if flushes:
            worker.exchange.flush()


def learned(worker):
    worker.settled()
    state = {**worker.model.state_dict(), "rows": torch.from_numpy(worker.table())}
    found = {name: tensor.numpy().tobytes() for name, tensor in state.items()}
    found["rates"] = [group["lr"] for group in worker.optimizer.param_groups]
    worker.barrier()
    return found


def compare_with_uninterrupted(comm, place, directory, **mode):
    flushes = not mode.get("sync", True)

    def uninterrupted(worker):
        scheduler = begin(worker)
        train(worker, scheduler, 0, BATCHES, flushes)
        return learned(worker)

    def first(worker):
        scheduler = begin(worker)
        train(worker, scheduler, 0, SAVED_AT, flushes)
        resumption(worker).save(directory, {"batch": SAVED_AT}, SaveOptions())
        train(worker, scheduler, SAVED_AT, BATCHES, flushes)  # saving has changed nothing
        return learned(worker)

    def second(worker):
        scheduler = begin(worker)
        at = resumption(worker).resume(directory)
        train(worker, scheduler, at["batch"], BATCHES, flushes)
        return learned(worker)

    expected = run(comm, place, build, uninterrupted, **mode)
    assert run(comm, place, build, first, **mode) == expected
    assert run(comm, place, build, second, **mode) == expected


@at_places()
def test_in_sync_mode_a_resumed_job_has_the_same_bits(comm, shared_tmp_path, place):
    """Every worker its own random numbers and running means, one schedule, two param groups."""
    compare_with_uninterrupted(comm, place, shared_tmp_path)


@pytest.mark.ranks(1, 2, 3)
def test_one_async_worker_has_the_same_bits(comm, shared_tmp_path):
    place = Place(WORLD.size - 1, 1)
    compare_with_uninterrupted(comm, place, shared_tmp_path, sync=False)


MODES = {
    "async": {"sync": False},
    "bounded": {"sync": False, "staleness": 1},
    "hybrid": {"hybrid": True},
}


@at_places(least_workers=2)
@pytest.mark.parametrize("mode", MODES)
def test_no_step_is_lost_or_made_twice(comm, shared_tmp_path, place, mode):
    """Rows count the steps of all workers, each of which has come to another one by the save."""

    def counters():
        table = SparseEmbedding("t", ROWS, 3, initializer="zeros", dtype=torch.float64)
        dense = torch.nn.Linear(1, 1, dtype=torch.float64)
        table.dense = dense
        return table, torch.optim.SGD(table.parameters(), lr=1.0)

    keys = torch.arange(ROWS)[:, None]

    def count(worker, steps):
        for _ in range(steps):
            (-worker.model(keys).sum() - worker.model.dense.bias.sum()).backward()
            worker.optimizer.step()
            worker.optimizer.zero_grad()

    def first(worker):
        made = 3 + worker.index
        count(worker, made)
        wait = place.servers % 2 == 0
        resumption(worker).save(shared_tmp_path, made, SaveOptions(wait=wait))
        count(worker, 4)  # these are lost with the job

    def second(worker):
        made = resumption(worker).resume(shared_tmp_path)
        assert made == 3 + worker.index
        count(worker, 9 - made)
        worker.settled()
        return worker.table()

    run(comm, place, counters, first, **MODES[mode])
    for rows in run(comm, place, counters, second, **MODES[mode]):
        np.testing.assert_array_equal(rows, 9 * place.workers)


@pytest.mark.ranks(2, 3, 4)
def test_another_number_of_workers_takes_worker_0s(comm, shared_tmp_path):
    def first(worker):
        scheduler = begin(worker)
        train(worker, scheduler, 0, 2)
        resumption(worker).save(shared_tmp_path, worker.index, SaveOptions())
        return learned(worker)

    def second(worker):
        begin(worker)
        position = torch.get_rng_state()
        progress = resumption(worker).resume(shared_tmp_path)
        assert torch.equal(torch.get_rng_state(), position), "random numbers start anew"
        return progress, learned(worker)

    saved = run(comm, Place(1, WORLD.size - 1), build, first)
    places = [Place(0, 1)] if WORLD.size > 2 else []
    places += [Place(2, WORLD.size - 2)] if WORLD.size == 4 else []
    for place in places:
        for progress, found in run(comm, place, build, second):
            assert progress == 0
            assert found == saved[0]


@at_places(least_workers=2)
def test_what_one_worker_cannot_save_or_take_all_are_told(comm, shared_tmp_path, place):
    def work(worker):
        scheduler = begin(worker)
        odd = torch.nn.Module()
        odd.state_dict = lambda: {"value": open if worker.index == 1 and not odd.good else 3}
        odd.good = False
        worker.session.states.register("odd", odd, per_worker=True)
        errors = []
        for directory in (shared_tmp_path / "none", shared_tmp_path):
            try:
                resumption(worker).save(directory, 1, SaveOptions())
            except CheckpointError as error:
                errors.append(str(error))
            odd.good = True
        train(worker, scheduler, 0, 1)  # the job goes on
        if worker.index == 1:
            worker.session.states.register("more", torch.Generator(), per_worker=True)
        for attempt in (
            lambda: resumption(worker).resume(shared_tmp_path),
            lambda: resumption(worker).save(shared_tmp_path, 1, SaveOptions()),
        ):
            try:
                attempt()
            except CheckpointError as error:
                errors.append(str(error))
        train(worker, scheduler, 1, 2)
        worker.settled()
        return errors

    for errors in run(comm, place, build, work):
        assert len(errors) == 3, errors
        assert "state 'odd': ['value'] is a builtins.builtin_function" in errors[0]
        assert "no state 'more'" in errors[1]
        assert "workers have different states" in errors[2]
    assert not (shared_tmp_path / "none").exists()
