"""Compressed checkpoints: the same content by either road, at any number of servers; failures."""

import contextlib
import logging
import resource

import h5py
import pytest

from mpifleet.checkpoint import chunks, why_not_collective
from mpifleet.errors import CheckpointError
from mpifleet.log import get_logger
from mpifleet.ps import chunk_writing, collective_chunks, placed_chunks
from mpifleet.ps.saving import SaveOptions
from tests.mpi.jobs import Place, run
from tests.mpi.test_checkpoints import (
    all_places,
    build,
    content,
    loading,
    saving,
    server_ranks,
    state,
    steps,
)

COMPRESSED = SaveOptions(level=1)


@pytest.fixture(params=["placed", "collective"])
def road(request, monkeypatch):
    """How servers write. Arrays are cut small: chunks and pieces end within servers' shares."""
    if request.param == "placed":
        monkeypatch.setattr(chunk_writing, "why_not_collective", lambda: "the test says so")
    elif obstacle := why_not_collective():
        pytest.skip(obstacle)
    monkeypatch.setattr(chunks, "LEAST_BYTES", 100)  # some stay in one piece
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 96)
    monkeypatch.setattr(chunk_writing, "LEAST_CHUNKS", 2)  # some larger, some smaller
    monkeypatch.setattr(placed_chunks, "PIECE_BYTES", 200)
    monkeypatch.setattr(collective_chunks, "PIECE_BYTES", 200)
    return request.param


def test_it_has_what_an_uncompressed_one_has(comm, shared_tmp_path, road):
    """And loads at another number of servers."""

    def work(worker):
        saved = saving(shared_tmp_path / f"{place}-plain")(worker)
        worker.session.persistables().save(shared_tmp_path / str(place), COMPRESSED)
        worker.barrier()
        return saved

    everywhere = all_places(1)
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


def test_servers_without_a_row_or_a_chunk(comm, shared_tmp_path, road, monkeypatch):
    """One chunk for each array, of which servers have parts; more servers than rows."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1 << 20)
    place = all_places(1)[-1]
    small = lambda: build(width=1, rows=2)  # noqa: E731

    def work(worker):
        steps(worker, 0, 2)
        worker.session.persistables().save(shared_tmp_path, COMPRESSED)
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


def test_a_full_disk_is_an_error_and_the_job_goes_on(comm, shared_tmp_path, road, monkeypatch):
    place = all_places(1)[-1]
    fails = shared_tmp_path / "fails"
    name = "write_unsynced" if road == "placed" or not place.servers else "reserve"
    module = placed_chunks if name == "write_unsynced" else collective_chunks
    real = getattr(module, name)
    server = server_ranks(place)[-1 if name == "write_unsynced" else 0]

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
                worker.session.persistables().save(shared_tmp_path, COMPRESSED)
            except CheckpointError as failure:
                error = str(failure)
            fails.unlink()
            assert not list(shared_tmp_path.glob(".*"))
            worker.session.persistables().save(shared_tmp_path, COMPRESSED)
        worker.barrier()
        return error

    results = run(comm, place, build, work)
    assert "File too large" in results[0]
    assert content(shared_tmp_path)["dense"]
    comm.Barrier()


def test_which_road_is_said_once(comm, shared_tmp_path, road):
    place = all_places(1)[-1]
    said = []
    listener = logging.Handler()
    listener.emit = lambda record: said.append(record.getMessage())
    get_logger().addHandler(listener)

    def work(worker):
        if worker.index == 0:
            for _ in range(2):
                worker.session.persistables().save(shared_tmp_path, COMPRESSED)
        worker.barrier()

    try:
        run(comm, place, build, work)
    finally:
        get_logger().removeHandler(listener)
    said = [each for each in said if "compressed" in each]
    first = comm.rank == server_ranks(place)[0]
    expected = road == "placed" and first and place.servers > 0
    assert len(said) == expected, said
