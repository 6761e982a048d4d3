"""No long work between two breaths: the largest piece that one operation deals with is counted."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mpifleet import partition
from mpifleet.ps import update_rules
from mpifleet.ps.assembler import Assembler
from mpifleet.ps.mailbox import Lane
from mpifleet.ps.merge import RowsMerger
from mpifleet.ps.message import Kind, RowsGradient, dense_arrays, join, lay_out, rows_arrays
from mpifleet.ps.server import ParameterServer
from mpifleet.ps.shard import Shard
from mpifleet.ps.spec import TableSpecs, layouts
from tests.unit.lanes import Lanes
from tests.unit.table_examples import HYPERS, dense_spec, hyper, sparse_spec

CHUNK_BYTES, CHUNK_ROWS = 2048, 32
DIM, NUM_ROWS, DENSE_SIZE = 4, 2000, 20_000
FREE = {  # views, and memory that is not touched
    *("slice", "view", "select", "detach", "alias", "unbind", "lift_fresh"),
    *("empty", "empty_like", "new_empty"),
}
SCATTERED = {"index_select", "index_copy_", "index_add_"}
SPECS = TableSpecs(
    (dense_spec("dense0", (DENSE_SIZE,), "adam"),), (sparse_spec("emb", NUM_ROWS, DIM, "adam"),)
)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(partition, "CHUNK_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(partition, "CHUNK_ROWS", CHUNK_ROWS)


class Largest(TorchDispatchMode):
    """The most elements that a torch operation deals with, and those of rows one by one."""

    def __init__(self):
        super().__init__()
        self.elements, self.rows = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        del types
        name = func.overloadpacket.__name__
        if name in SCATTERED:  # of the table itself only these rows are touched
            self.rows = max(self.rows, args[2].numel())
        elif name not in FREE:
            lists = [arg if isinstance(arg, (list, tuple)) else [arg] for arg in args]
            tensors = [one for arg in lists for one in arg if isinstance(one, torch.Tensor)]
            self.elements = max([self.elements, *(tensor.numel() for tensor in tensors)])
        return func(*args, **(kwargs or {}))


class Sliced:
    """A server with lanes that hold a whole message, and what it does between breaths."""

    def __init__(self, num_workers, *, sync):
        self.lanes = Lanes(num_workers, capacity=1 << 17)
        self.layout = layouts(SPECS, 1)[0]
        self.breaths = 0
        memory = np.zeros(self.layout.num_bytes, np.uint8)
        hypers = HYPERS["adam"][None]
        shard = Shard(self.layout, memory, hypers, hypers, breathe=self._breathe, published=True)
        self.loop = ParameterServer(
            shard,
            self.lanes.server,
            sync=sync,
            skip_nonfinite=False,
            handlers={},
            progress=lambda: None,
        )

    def _breathe(self):
        self.breaths += 1

    def deliver(self, lane, arrays, kind=Kind.STEP):
        message = join(*lay_out(arrays))
        for worker in range(self.lanes.layout.num_workers):
            self.lanes.deliver(worker, lane, message, kind=kind)

    def serve(self):
        """Serve all that was delivered; returns what the largest operation was."""
        with Largest() as largest:
            while self.loop._turn():
                pass
        return largest


@pytest.mark.parametrize("sync", [False, True])
def test_a_large_dense_push(sync):
    server = Sliced(2, sync=sync)
    flat, present = np.full(DENSE_SIZE, 0.5, np.float32), np.ones(1, np.uint8)
    server.deliver(Lane.DENSE, dense_arrays(server.layout, HYPERS["adam"][None], [present], [flat]))
    largest = server.serve()
    assert 0 < largest.elements <= CHUNK_BYTES // 4
    assert server.breaths >= 3 * DENSE_SIZE * 4 // CHUNK_BYTES, "checked, applied and published"


@pytest.fixture
def _without_numba(monkeypatch):
    monkeypatch.setattr(update_rules, "compiled_rows", lambda: None)


@pytest.mark.usefixtures("_without_numba")
@pytest.mark.parametrize("sync", [False, True])
def test_a_push_of_many_rows(sync):
    server = Sliced(2, sync=sync)
    rows, values = np.arange(0, NUM_ROWS, 2), np.full((NUM_ROWS // 2, DIM), 0.5, np.float32)
    server.deliver(Lane.ROWS, rows_arrays(HYPERS["adam"][None], [rows], [values], [rows.size]))
    largest = server.serve()
    assert 0 < largest.rows <= CHUNK_ROWS
    assert 0 < largest.elements <= CHUNK_BYTES // 4
    assert server.breaths >= 6 * rows.size // CHUNK_ROWS, "three arrays are read and written"


def test_a_push_of_many_rows_to_compiled_code(monkeypatch):
    pytest.importorskip("numba")
    compiled, sizes = update_rules.compiled_rows(), []
    update = compiled.update

    def counted(terms, values, state, rows, *more):
        sizes.append(rows.size)
        update(terms, values, state, rows, *more)

    monkeypatch.setattr(compiled, "update", counted)
    server = Sliced(2, sync=False)
    rows, values = np.arange(0, NUM_ROWS, 2), np.full((NUM_ROWS // 2, DIM), 0.5, np.float32)
    server.deliver(Lane.ROWS, rows_arrays(HYPERS["adam"][None], [rows], [values], [rows.size]))
    server.serve()
    assert sum(sizes) == 2 * rows.size
    assert max(sizes) <= CHUNK_ROWS
    assert server.breaths >= 4 * rows.size // CHUNK_ROWS, "updated and written, for two workers"


def test_a_served_pull_of_many_rows():
    server = Sliced(2, sync=False)
    server.deliver(Lane.REQUEST, [np.arange(NUM_ROWS)], Kind.PULL_ROWS)
    largest = server.serve()
    assert 0 < largest.rows <= CHUNK_ROWS
    assert server.breaths >= 2 * NUM_ROWS // CHUNK_ROWS


def test_a_served_pull_of_dense_parameters():
    server = Sliced(1, sync=False)
    server.deliver(Lane.REQUEST, [np.array([0, DENSE_SIZE])], Kind.PULL_DENSE)
    server.serve()
    assert server.breaths >= DENSE_SIZE * 4 // CHUNK_BYTES


def test_pieces_of_a_message_are_staged_chunk_by_chunk():
    lanes, breaths = Lanes(1, capacity=8192), []
    sent = np.random.default_rng(0).integers(0, 256, 20_000).astype(np.uint8)
    assembler = Assembler(lanes.server, Lane.ROWS, lambda: breaths.append(1))
    for again in (sent, sent[:9_000], sent):  # the memory of the first one is used again
        for start in range(0, again.size, 8192):
            lanes.deliver(0, Lane.ROWS, again, start=start, stop=start + 8192)
            taken = assembler.take(0)
        assert taken is not None
        np.testing.assert_array_equal(taken[1], again)
        lanes.server.clear(0, Lane.ROWS)
    assert len(breaths) >= (2 * 20_000 + 9_000) // CHUNK_BYTES


@pytest.mark.parametrize("is_sorted", [True, False], ids=["increasing", "any order"])
def test_a_merge_in_slices_gives_the_same_bits(is_sorted):
    rng = np.random.default_rng(3)
    layout = layouts(SPECS, 1)[0]
    merger = RowsMerger(layout)
    total = np.zeros((NUM_ROWS, DIM), np.float32)
    for count in (1500, 0, 7, 1999):
        rows = rng.permutation(NUM_ROWS)[:count]
        rows = np.sort(rows) if is_sorted else rows
        values = rng.normal(size=(count, DIM)).astype(np.float32)
        merger.add([RowsGradient(hyper(), rows, values, count)])
        total[rows] += values
    (mean,) = merger.take_mean()
    assert (np.diff(mean.rows) > 0).all()
    np.testing.assert_array_equal(mean.values, (total / np.float32(4))[mean.rows])
