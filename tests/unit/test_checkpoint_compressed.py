"""Compressed checkpoints in one process: the chunks, what any HDF5 reader finds, and failures."""

import functools
import itertools
import os
import resource

import h5py
import numpy as np
import pytest
import torch

from mpifleet.checkpoint import (
    Block,
    ChunkPlaces,
    DenseShape,
    Keep,
    Newcomer,
    Sized,
    chunks,
    lay_out,
    open_checkpoint,
    write_parts,
    writing,
)
from mpifleet.checkpoint.chunks import CHUNK_BYTES, chunks_of, gzip_level, packed
from mpifleet.checkpoint.collective import mpi_libraries
from mpifleet.checkpoint.digests import digest_of
from mpifleet.cli.contents import contents
from mpifleet.embedding import SparseEmbedding
from mpifleet.errors import CheckpointError
from mpifleet.log import get_logger
from mpifleet.ps import placed_chunks
from mpifleet.ps.saving import SaveOptions
from tests.unit.checkpoint_content import leftovers
from tests.unit.local_job import connect

SHAPES = [(7,), (5, 3), (2, 3, 4), (1, 40), (3, 1, 1, 5), (100, 2), (2, 2, 50)]


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(chunks, "LEAST_BYTES", 1)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 96)


class TestChunks:
    @pytest.mark.usefixtures("small_chunks")
    @pytest.mark.parametrize("dtype", ["float32", "int64", "bool"])
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_they_cover_the_array_in_its_order(self, shape, dtype):
        grid = chunks_of(shape, np.dtype(dtype))
        values = np.arange(np.prod(shape)).reshape(shape)
        assert grid.size * grid.itemsize <= 96
        end = 0
        for chunk in range(grid.count):
            box = tuple(slice(a, a + n) for a, n in zip(grid.corner(chunk), grid.box, strict=True))
            inside = values[box].reshape(-1).tolist()
            assert inside == list(range(end, end + len(inside)))
            assert (grid.start(chunk), grid.stop(chunk)) == (end, end + len(inside))
            end += len(inside)
        assert end == values.size
        corners = {grid.corner(chunk) for chunk in range(grid.count)}
        steps = [range(0, n, b) for n, b in zip(shape, grid.box, strict=True)]
        assert corners == set(itertools.product(*steps))

    @pytest.mark.usefixtures("small_chunks")
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_the_first_chunk_from_an_element_on(self, shape):
        grid = chunks_of(shape, np.dtype("float32"))
        starts = [grid.start(chunk) for chunk in range(grid.count)]
        for element in range(int(np.prod(shape)) + 1):
            expected = sum(start < element for start in starts)
            assert grid.first_from(element) == expected

    @pytest.mark.parametrize("shape", [(), (0,), (4, 0, 3), (1000,)], ids=str)
    def test_some_stay_in_one_piece(self, shape):
        assert chunks_of(shape, np.dtype("float32")) is None

    def test_a_mebibyte_at_most(self):
        grid = chunks_of((3_000_000, 16), np.dtype("float32"))
        assert grid.box == (CHUNK_BYTES // 64, 16)
        assert chunks_of((10, 5_000_000), np.dtype("float64")).box == (1, CHUNK_BYTES // 8)

    @pytest.mark.parametrize("value", ["lzf", "gzip-0", "gzip-10", "gzip9", 4, True, ""])
    def test_other_compressions_are_refused(self, value):
        with pytest.raises(CheckpointError, match=r'compression=.*None, "gzip"'):
            gzip_level(value)

    def test_levels(self):
        assert [gzip_level(each) for each in (None, "gzip", "gzip-1", "gzip-9")] == [0, 1, 1, 9]


def written(directory, arrays, level=1):
    """A checkpoint of dense parameters, as one server writes it."""
    newcomer = Newcomer(directory)
    try:
        with writing(directory):
            shapes = [DenseShape(name, a.shape, a.dtype.name) for name, a in arrays.items()]
            places = lay_out(newcomer, shapes, [], {}, {}, level=level)
            whole = [s for s in shapes if s.path() in places]
            parts = [(places[s.path()], np.ascontiguousarray(arrays[s.name])) for s in whole]
            blocks = write_parts(newcomer.descriptor, parts)
            found = ChunkPlaces(newcomer)
            for shape in shapes:
                array = arrays[shape.name]
                grid = chunks_of(shape.shape, array.dtype)
                for chunk in range(grid.count if grid else 0):
                    part = array.reshape(-1)[grid.start(chunk) : grid.stop(chunk)]
                    data, mask = packed(part, grid, level)
                    size = Sized(shape.path(), grid.corner(chunk), len(data), mask)
                    (offset,) = found.place([size])
                    os.pwrite(newcomer.descriptor, data, offset)
                    blocks.append(Block(offset, len(data), digest_of(data)))
            found.close()
            return newcomer.publish(blocks, Keep())
    finally:
        newcomer.close()


def odd_arrays():
    rng = np.random.default_rng(3)
    return {
        "noise": rng.integers(0, 2**64, (3, 50, 7), dtype=np.uint64),  # deflate cannot help
        "bytes of noise": rng.integers(0, 256, 1000).astype(np.uint8),
        "zeros": np.zeros((40, 40)),
        "mask": rng.random(999) < 0.5,
        "half": rng.normal(size=(13, 11)).astype(np.float16),
        "keys": np.arange(10_000, dtype=np.int64) * 3,
        "scalar": np.array(np.nan),
        "empty": np.empty((0, 4), np.float32),
    }


@pytest.mark.parametrize("level", [1, 9])
@pytest.mark.parametrize("chunk_bytes", [96, 4096, CHUNK_BYTES])
def test_plain_h5py_reads_it(tmp_path, small_chunks, monkeypatch, chunk_bytes, level):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", chunk_bytes)
    arrays = odd_arrays()
    path = written(tmp_path, arrays, level)
    with h5py.File(path, "r") as file:
        for name, array in arrays.items():
            dataset = file[f"dense/{name}/value"]
            assert dataset[()].tobytes() == array.tobytes(), name
            assert dataset.dtype == array.dtype
            is_chunked = array.ndim > 0 and array.size > 0
            assert (dataset.compression == "gzip") == is_chunked
            assert (dataset.chunks is not None) == is_chunked
    with open_checkpoint(path) as checkpoint:
        for name, array in arrays.items():
            assert checkpoint.dense(name).value.tobytes() == array.tobytes()
    raw = sum(array.nbytes for array in arrays.values())
    if chunk_bytes == CHUNK_BYTES:
        assert path.stat().st_size < raw


def test_every_byte_is_under_a_digest(tmp_path, small_chunks):
    path = written(tmp_path, {"w": np.arange(600.0).reshape(20, 30)})
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for place in rng.integers(0, len(whole), 100).tolist():
        flipped = bytearray(whole)
        flipped[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(flipped)
        with pytest.raises(CheckpointError, match="is damaged: bytes"):
            open_checkpoint(path)


def test_two_mpi_libraries_in_one_process_are_seen():
    line = "7f00-7f10 r-xp 00000000 fe:00 123                        {}\n"
    ours, theirs = "/usr/lib/libmpi.so.40.30.4", "/home/me/my venv/lib/libmpi.so.40"
    others = line.format("/usr/lib/libmpi_mpifh.so.40") + "7f00-7f10 rw-p 0 00:00 0\n"
    one = line.format(ours) * 3 + others
    assert mpi_libraries(one) == [ours]
    assert mpi_libraries(one + line.format(theirs)) == [theirs, ours]
    assert mpi_libraries(others) == []


def model(rows=3000):
    torch.manual_seed(0)
    module = torch.nn.Module()
    module.table = SparseEmbedding("emb", rows, 8, pooling="sum")
    module.head = torch.nn.Linear(300, 40)
    return module, connect(module, torch.optim.Adam(module.parameters(), lr=0.1))


def trained(module, optimizer):
    for step in range(3):
        ids = torch.arange(step, 100)[:, None]
        optimizer.zero_grad()
        (module.table(ids).sum() + module.head(torch.ones(300)).sum()).backward()
        optimizer.step()
    return optimizer._exchange


def values_in(directory):
    with open_checkpoint(directory) as checkpoint:
        table = checkpoint.sparse("emb")
        values = checkpoint.sparse_block("emb", 0, table.num_rows)
        for name in checkpoint.dense_names:
            entry = checkpoint.dense(name)
            values |= {f"{name} {slot}": a for slot, a in {"": entry.value, **entry.state}.items()}
        return table, {name: array.tobytes() for name, array in values.items()}


def test_a_job_saves_the_same_content_smaller(tmp_path, caplog, monkeypatch):
    """wait=False is said to be waited for."""
    monkeypatch.setattr(get_logger(), "propagate", True)
    exchange = trained(*model())
    for name, options in (("plain", SaveOptions()), ("small", SaveOptions(wait=False, level=1))):
        exchange.save(tmp_path / name, {"a": 1}, {"b": np.ones(3)}, options)
    sizes = [(tmp_path / n / "model-000001.h5").stat().st_size for n in ("plain", "small")]
    assert sizes[1] < 0.7 * sizes[0]
    assert values_in(tmp_path / "small") == values_in(tmp_path / "plain")
    for name, compression in (("plain", None), ("small", "gzip-1")):
        with open_checkpoint(tmp_path / name) as checkpoint:
            assert contents(checkpoint, tmp_path / name)["compression"] == compression
    assert [r.getMessage() for r in caplog.records if "wait=False" in r.getMessage()]


def test_drivers_that_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"driver='mpi'; use None or \"mpio\""):
        SaveOptions(level=1, driver="mpi")
    with pytest.raises(CheckpointError, match=r'is for compressed .*add compression="gzip"'):
        SaveOptions(driver="mpio")
    exchange = trained(*model())
    with pytest.raises(CheckpointError, match="on server 0: there is no MPI in this job; without"):
        exchange.save(tmp_path / "new", {}, {}, SaveOptions(level=1, driver="mpio"))
    assert not list(tmp_path.iterdir())


def test_rows_of_a_delta_that_failed_are_in_the_next_one(tmp_path, monkeypatch):
    module, optimizer = model(300)
    exchange = trained(module, optimizer)
    save = functools.partial(exchange.save, tmp_path / "chain", {}, {})
    save(SaveOptions(level=1, mode="base"))
    trained(module, optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(placed_chunks, "write_unsynced", full_disk)
        with pytest.raises(CheckpointError, match="No space left"):
            save(SaveOptions(level=1, mode="delta"))
    save(SaveOptions(level=1, mode="delta"))
    exchange.save(tmp_path / "full", {}, {}, SaveOptions())
    assert values_in(tmp_path / "chain") == values_in(tmp_path / "full")
    with open_checkpoint(tmp_path / "chain") as checkpoint:
        assert checkpoint.stored("emb").stored_rows == 100
        assert checkpoint.compression == "gzip-1"


def full_disk(*_):
    raise OSError(28, "No space left on device")


def test_a_disk_that_fills_up_leaves_the_previous_file(tmp_path):
    exchange = trained(*model())
    exchange.save(tmp_path, {}, {}, SaveOptions())
    before = values_in(tmp_path)
    exchange.save(tmp_path / "other", {}, {}, SaveOptions(level=1))
    size = (tmp_path / "other" / "model-000001.h5").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in range(0, size, size // 20):  # bytes beyond which no file may grow
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
            with pytest.raises(CheckpointError, match=f"into {tmp_path}: .*File too large"):
                exchange.save(tmp_path, {}, {}, SaveOptions(level=1))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert leftovers(tmp_path) == ["other"]
        assert values_in(tmp_path) == before
    exchange.save(tmp_path, {}, {}, SaveOptions(level=1))
    assert values_in(tmp_path) == before
