"""Base and delta saves by any number of servers: a chain holds what a full save holds."""

import pytest

from mpifleet.checkpoint import open_checkpoint
from mpifleet.errors import CheckpointError
from mpifleet.ps import save_writing
from mpifleet.ps.load_report import LoadOptions
from mpifleet.ps.saving import SaveOptions
from tests.mpi.jobs import at_places, run
from tests.mpi.test_checkpoints import all_places, build, content, server_ranks, state, steps

BASE, DELTA = SaveOptions(mode="base"), SaveOptions(mode="delta")
DELTA_BEHIND = SaveOptions(mode="delta", wait=False)


def train_and_save(worker, first, chain, options):
    """Two steps, then a save by worker 0."""
    steps(worker, first, first + 2)
    worker.settled()
    if worker.index == 0:
        worker.session.persistables().save(chain, options)
    worker.barrier()


def test_a_chain_is_a_full_save_and_goes_on_at_another_number_of_servers(comm, shared_tmp_path):
    """Two deltas by one job, a third by the next at another number of servers, read by a third."""
    places = all_places(1)
    few, some, many = places[0], places[len(places) // 2], places[-1]
    saver, next_one, reader = (few, many, some) if comm.size % 2 else (many, few, some)
    chain, full = shared_tmp_path / "chain", shared_tmp_path / "full"

    def save(worker):
        train_and_save(worker, 0, chain, BASE)
        train_and_save(worker, 2, chain, DELTA)
        train_and_save(worker, 4, chain, DELTA_BEHIND)
        return state(worker)

    def go_on(worker):
        report = worker.session.persistables().load(chain)
        loaded = state(worker)
        train_and_save(worker, 6, chain, DELTA)
        worker.session.persistables().save(full)
        worker.barrier()
        return report.is_whole, loaded, state(worker)

    def load(worker):
        worker.session.persistables().load(chain)
        return state(worker)

    (saved,) = run(comm, saver, build, save)
    ((is_whole, loaded, after),) = run(comm, next_one, build, go_on)
    assert is_whole
    assert loaded == saved, f"saved by {saver}, loaded by {next_one}"
    assert run(comm, reader, build, load) == [after]
    assert content(chain) == content(full)
    with open_checkpoint(chain) as checkpoint:
        assert len(checkpoint.members) == 4
        assert 0 < checkpoint.stored("one").stored_rows < 53
    comm.Barrier()


@at_places()
def test_rows_of_a_delta_that_failed_on_one_server_are_in_the_next(
    comm, shared_tmp_path, place, monkeypatch
):
    real, fails = save_writing.write_parts, shared_tmp_path / "fails"

    def write_parts(descriptor, parts):
        if fails.exists() and comm.rank == server_ranks(place)[-1]:
            raise OSError(28, "No space left on device")
        return real(descriptor, parts)

    monkeypatch.setattr(save_writing, "write_parts", write_parts)

    def work(worker):
        chain, error = shared_tmp_path / "chain", ""
        train_and_save(worker, 0, chain, BASE)
        if worker.index == 0:
            fails.touch()
        train_and_save(worker, 2, chain, DELTA_BEHIND)
        try:
            if worker.index == 0:
                worker.exchange.settle_saves()
        except CheckpointError as failure:
            error = str(failure)
            fails.unlink()
        worker.barrier()
        train_and_save(worker, 4, chain, DELTA)
        worker.session.persistables().save(shared_tmp_path / "full")
        worker.barrier()
        return error

    errors = run(comm, place, build, work)
    assert "No space left" in errors[0]
    assert content(shared_tmp_path / "chain") == content(shared_tmp_path / "full")
    comm.Barrier()


@at_places()
@pytest.mark.parametrize("at_start", [False, True], ids=["load", "init_server"])
def test_a_partial_load_is_reported_alike_to_all(comm, shared_tmp_path, place, at_start):
    """Another width: all but one layer is taken, with its state, and the job goes on."""

    def save(worker):
        steps(worker, 0, 2)
        worker.session.persistables().save(shared_tmp_path / "a")
        worker.barrier()
        return state(worker)

    def load(worker):
        before = state(worker)
        worker.barrier()
        report = worker.session.persistables().load(shared_tmp_path / "a", LoadOptions(False))
        after = state(worker)
        worker.barrier()
        table = worker.session.persistables().load(shared_tmp_path / "a", LoadOptions(table="one"))
        steps(worker, 2, 3)
        worker.settled()
        return report.entries, report.names("misfit"), before, after, table.is_whole

    (saved, *_) = run(comm, place, build, save)
    start = {"load_from": shared_tmp_path / "a", "load_strict": False} if at_start else {}
    found = run(comm, place, lambda: build(width=31), load, **start)
    entries = found[0][0]
    for theirs, misfits, before, after, is_whole in found:
        assert theirs == entries
        assert is_whole
        assert misfits == ["hidden.weight", "hidden.bias"]
        assert (before["one"] == saved["one"]) == at_start
        assert all(after[n] == (before if n in misfits else saved)[n] for n in after)
    comm.Barrier()
