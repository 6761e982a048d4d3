"""Compressed checkpoints: the same content by either driver, at any number of servers; failures."""

import contextlib
import resource
from dataclasses import replace

import h5py
import pytest

from mpifleet.checkpoint import chunks, open_checkpoint, why_not_collective
from mpifleet.errors import CheckpointError
from mpifleet.ps import chunk_writing, collective_chunks, placed_chunks
from mpifleet.ps.saving import SaveOptions
from tests.mpi.jobs import Place, run
from tests.mpi.test_checkpoints import (
    all_places,
    bits,
    build,
    content,
    loading,
    saving,
    server_ranks,
    state,
    steps,
)

COMPRESSED = SaveOptions(level=1)
BY_HDF5 = replace(COMPRESSED, driver="mpio")


@pytest.fixture(params=[COMPRESSED, BY_HDF5], ids=["plain", "mpio"])
def options(request, comm, monkeypatch):
    """How servers write. Arrays are cut small: chunks and pieces end within servers' shares."""
    if request.param.driver and comm.size == 1:
        pytest.skip("a single process has no MPI")
    if request.param.driver and (obstacle := why_not_collective()):
        pytest.skip(obstacle)
    monkeypatch.setattr(chunks, "LEAST_BYTES", 100)  # some stay in one piece
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 96)
    monkeypatch.setattr(placed_chunks, "PIECE_BYTES", 200)
    monkeypatch.setattr(collective_chunks, "PIECE_BYTES", 200)
    return request.param


def test_it_has_what_an_uncompressed_one_has(comm, shared_tmp_path, options):
    """And loads at another number of servers."""

    def work(worker):
        saved = saving(shared_tmp_path / f"{place}-plain")(worker)
        worker.session.persistables().save(shared_tmp_path / str(place), options)
        worker.barrier()
        return saved

    everywhere = [place for place in all_places(1) if place.servers or not options.driver]
    for place, loader in zip(everywhere, everywhere[1:] + everywhere[:1], strict=True):
        (saved,) = run(comm, place, build, work)
        directory = shared_tmp_path / str(place)
        assert content(directory) == content(shared_tmp_path / f"{place}-plain"), f"{place}"
        ((loaded, _),) = run(comm, loader, build, loading(directory))
        assert loaded == saved, f"saved by {place}, loaded by {loader}"
        with h5py.File(directory / "model-000001.h5", "r") as file:
            rows = file["sparse/one/rows"]
            assert (rows.chunks, rows.shuffle, rows.compression) == ((6, 4), True, "gzip")
            assert file["dense/hidden.weight/state/exp_avg"].chunks == (4, 6)
        comm.Barrier()


def test_chains_and_single_tables(comm, shared_tmp_path, options):
    """A base with two deltas is what a full one is; no delta has all rows."""
    chain, table, full = (shared_tmp_path / name for name in ("chain", "table", "full"))

    def work(worker):
        save = worker.session.persistables().save
        for step, mode in enumerate(("base", "delta", "delta")):
            steps(worker, step, step + 1)
            save(chain, replace(options, mode=mode))
        save(table, replace(options, table="one"))
        save(full)
        worker.barrier()

    run(comm, all_places(1)[-1], build, work)
    assert content(chain) == content(full)
    with open_checkpoint(chain) as found, open_checkpoint(table) as one:
        assert len(found.members) == 3
        assert 0 < found.stored("one").stored_rows < 53
        blocks = [each.sparse_block("one", 0, 53) for each in (found, one)]
        assert bits(blocks[0]) == bits(blocks[1])
    with h5py.File(chain / "model-000003.h5", "r") as file:
        assert file["sparse/one/rows"].compression == file["sparse/one/keys"].compression == "gzip"
    comm.Barrier()


def test_servers_without_a_row_or_a_chunk(comm, shared_tmp_path, options, monkeypatch):
    """One chunk for each array, of which servers have parts; more servers than rows."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1 << 20)
    place = all_places(1)[-1]
    small = lambda: build(width=1, rows=2)  # noqa: E731

    def work(worker):
        steps(worker, 0, 2)
        worker.session.persistables().save(shared_tmp_path, options)
        saved = state(worker)
        worker.barrier()
        return saved

    (saved,) = run(comm, place, small, work)
    ((loaded, _),) = run(comm, Place(0, 1), small, loading(shared_tmp_path))
    assert loaded == saved


@contextlib.contextmanager
def no_file_grows():
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_an_error_and_the_job_goes_on(comm, shared_tmp_path, options, monkeypatch):
    place = all_places(1)[-1]
    fails = shared_tmp_path / "fails"
    module, name, number = placed_chunks, "write_unsynced", -1
    if options.driver:
        module, name, number = collective_chunks, "reserve", 0
    real, server = getattr(module, name), server_ranks(place)[number]

    def full(*arguments):
        if fails.exists() and comm.rank == server:
            with no_file_grows():
                return real(*arguments)
        return real(*arguments)

    monkeypatch.setattr(module, name, full)

    def work(worker):
        steps(worker, 0, 2)
        error = ""
        if worker.index == 0:
            worker.session.persistables().save(shared_tmp_path)
            fails.touch()
            try:
                worker.session.persistables().save(shared_tmp_path, options)
            except CheckpointError as failure:
                error = str(failure)
            fails.unlink()
            assert not list(shared_tmp_path.glob(".*"))
            worker.session.persistables().save(shared_tmp_path, options)
        worker.barrier()
        return error

    results = run(comm, place, build, work)
    assert "File too large" in results[0]
    assert content(shared_tmp_path)["dense"]
    comm.Barrier()


def test_a_driver_that_a_server_lacks_is_refused_by_all(comm, shared_tmp_path, monkeypatch):
    """Before anything is written: another driver would not be what was asked for."""
    place = all_places(1)[-1]
    reason = "h5py was built without MPI" if place.servers else "there is no MPI in this job"
    if not why_not_collective() and comm.rank == server_ranks(place)[-1]:
        monkeypatch.setattr(chunk_writing, "why_not_collective", lambda: reason)
    directory = shared_tmp_path / "directory"

    def work(worker):
        error = ""
        if worker.index == 0:
            try:
                worker.session.persistables().save(directory, BY_HDF5)
            except CheckpointError as failure:
                error = str(failure)
            assert not directory.exists()
            worker.session.persistables().save(directory, COMPRESSED)
        worker.barrier()
        return error

    results = run(comm, place, build, work)
    assert f": {reason}; without the driver any h5py" in results[0]
    assert content(directory)["dense"]
    comm.Barrier()
