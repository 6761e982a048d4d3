"""Transfers of more elements than one MPI call counts go in several."""

import itertools

import numpy as np
import pytest

from mpifleet import window as window_module
from mpifleet.window import Window
from tests.mpi.outcomes import together
from tests.mpi.windows import ATOMIC, opened
from tests.ranks import MPI


@pytest.mark.parametrize("on_node", ATOMIC)
def test_large_transfers_go_in_pieces(comm, monkeypatch, on_node):
    monkeypatch.setattr(window_module, "MAX_COUNT", 7)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    wrong = []
    with opened(comm, 64, True, on_node) as window:
        for size in (15, 8, 7, 6, 1, 0):
            sent = np.arange(size, dtype=np.uint8) + 20 * comm.rank
            window.put(right, 3, np.full(16, 255, np.uint8))
            window.flush(right)
            window.put(right, 3, sent)
            window.flush(right)
            comm.Barrier()
            got = np.zeros(size, np.uint8)
            window.get(comm.rank, 3, got)
            window.flush(comm.rank)
            window.sync()
            expected = [i + 20 * left for i in range(size)]
            around = [0] * 3 + expected + [255] * (16 - size) + [0] * 45
            if got.tolist() != expected or window.local.tolist() != around:
                wrong.append(size)
            comm.Barrier()
        assert together(comm, not wrong), wrong


@pytest.mark.parametrize("on_node", ATOMIC)
@pytest.mark.parametrize("dtype", [np.int64, np.float32])
def test_large_atomic_transfers_go_in_pieces(comm, monkeypatch, on_node, dtype):
    calls = []

    class Counted(Window):
        def _parts(self, *arguments):
            parts = list(super()._parts(*arguments))
            calls.append([part[0].size for part, _ in parts])
            return iter(parts)

    monkeypatch.setattr(window_module, "MAX_COUNT", 3)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    window = Counted(MPI, comm, 10 * 8, atomic=True, on_node=on_node)
    facts = []
    for size, sizes in ((8, [3, 3, 2]), (6, [3, 3]), (3, [3]), (1, [1]), (0, [])):
        calls.clear()
        sent = np.arange(size, dtype=dtype) + 20 * comm.rank
        window.store(right, sent.itemsize, sent)
        window.flush(right)
        window.add(right, sent.itemsize, np.full(size, 2, dtype))
        window.flush(right)
        comm.Barrier()
        got = np.full(size, -1, dtype)
        window.read(comm.rank, got.itemsize, got)
        window.flush(comm.rank)
        facts += [got.tolist() == [i + 20 * left + 2 for i in range(size)], calls == [sizes] * 3]
        comm.Barrier()
    window.sync()
    untouched = window.local.view(dtype)
    facts += [untouched[0] == 0, not untouched[9:].any()]
    assert together(comm, *facts), facts
    window.free()


def test_many_rows_go_in_pieces(comm, monkeypatch):
    monkeypatch.setattr(window_module, "MAX_COUNT", 7)
    wrong = []
    with opened(comm, 16 * 8 * 8) as window:
        window.local.view(np.float64)[:] = np.arange(16 * 8)
        window.sync()
        comm.Barrier()
        for dim, num_rows in itertools.product([1, 3, 7, 8], [0, 1, 6, 7, 8, 15]):
            rows = np.random.default_rng(dim).permutation(16)[:num_rows]
            out = np.empty((num_rows, dim))
            window.get_rows(0, 0, rows, out)
            window.flush(0)
            if not (out == rows[:, None] * dim + np.arange(dim)).all():
                wrong.append((dim, num_rows))
        assert together(comm, not wrong), wrong
