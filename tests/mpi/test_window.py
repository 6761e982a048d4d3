"""Windows: every verb, on every kind of window, from every rank to every rank."""

import contextlib
import functools

import numpy as np
import pytest

from mpifleet import mpi
from mpifleet import window as window_module
from mpifleet.errors import ConfigError, TableError
from mpifleet.window import Window
from tests.mpi.outcomes import raised, together
from tests.mpi.windows import ATOMIC, opened
from tests.ranks import MPI

ELEMENTS = 24
ROWS, DIM = 12, 5
KINDS = [
    pytest.param(atomic, on_node, id=f"{'atomic' if atomic else 'locked'}-{on_node and 'shared'}")
    for atomic in (True, False)
    for on_node in (False, True)
]


def writing(window, rank, atomic):
    return contextlib.nullcontext() if atomic else window.exclusive(rank)


def reading(window, rank, atomic):
    return contextlib.nullcontext() if atomic else window.shared(rank)


@pytest.mark.parametrize(("atomic", "on_node"), KINDS)
def test_memory_starts_as_zeros_on_a_cache_line(comm, atomic, on_node):
    num_bytes = 40 + 24 * comm.rank
    with opened(comm, num_bytes, atomic, on_node) as window:
        facts = (
            window.local.size == num_bytes,
            window.local.dtype == np.uint8,
            window.local.ctypes.data % 64 == 0,
            not window.local.any(),
        )
        assert together(comm, *facts)


@pytest.mark.parametrize(("atomic", "on_node"), KINDS)
def test_what_one_rank_puts_every_rank_gets(comm, atomic, on_node):
    with opened(comm, ELEMENTS * 8, atomic, on_node) as window:
        right = (comm.rank + 1) % comm.size
        sent = np.arange(ELEMENTS, dtype=np.float64) + 100 * comm.rank
        with writing(window, right, atomic):
            window.put(right, 0, sent[:10])
            window.put(right, 80, sent[10:])
            window.flush(right)
        comm.Barrier()
        got = np.empty((comm.size, ELEMENTS))
        for rank in range(comm.size):
            with reading(window, rank, atomic):
                window.get(rank, 0, got[rank])
                window.flush(rank)
        left = (np.arange(comm.size) - 1) % comm.size
        window.sync()
        mine = window.local.view(np.float64)
        assert together(
            comm,
            (got == np.arange(ELEMENTS) + 100 * left[:, None]).all(),
            (mine == np.arange(ELEMENTS) + 100 * left[comm.rank]).all(),
        )


@pytest.mark.parametrize("on_node", ATOMIC)
def test_memory_of_others_is_loaded_directly(comm, on_node):
    with opened(comm, 8 * (comm.rank + 1), True, on_node) as window:
        window.local[:] = comm.rank + 1
        window.sync()
        comm.Barrier()
        window.sync()
        if on_node:
            seen = [window.memory_of(rank).tolist() for rank in range(comm.size)]
        else:
            got = [np.empty(8 * (rank + 1), np.uint8) for rank in range(comm.size)]
            for rank, out in enumerate(got):
                window.get(rank, 0, out)
                window.flush(rank)
            seen = [out.tolist() for out in got]
        assert together(comm, seen == [[r + 1] * 8 * (r + 1) for r in range(comm.size)])


@pytest.mark.parametrize("on_node", ATOMIC)
def test_store_and_read_move_words(comm, on_node):
    with opened(comm, 64, True, on_node) as window:
        right = (comm.rank + 1) % comm.size
        window.store(right, 8, np.array([2**62 + comm.rank, -5]))
        window.flush(right)
        comm.Barrier()
        words = np.empty(4, np.int64)
        window.read(comm.rank, 0, words)
        window.flush(comm.rank)
        left = (comm.rank - 1) % comm.size
        assert together(comm, words.tolist() == [0, 2**62 + left, -5, 0])


@pytest.mark.parametrize("on_node", ATOMIC)
@pytest.mark.parametrize("dtype", [np.int64, np.float32, np.float64])
def test_adders_lose_no_update(comm, on_node, dtype):
    """Every rank adds to the same words at the same time; whole numbers add exactly."""
    times, words = 300, 4
    with opened(comm, words * 8, True, on_node) as window:
        ones = np.arange(1, words + 1, dtype=dtype)
        for _ in range(times):
            window.add(0, 0, ones)
            window.flush(0)
        comm.Barrier()
        total = np.empty(words, dtype)
        window.read(0, 0, total)
        window.flush(0)
        assert together(comm, (total == times * comm.size * ones).all())


@pytest.mark.parametrize("on_node", [False, True])
def test_writers_in_turn_lose_no_update(comm, on_node):
    """Read, add and write back under the exclusive lock, from every rank at the same time."""
    times = 100
    with opened(comm, 8, False, on_node) as window:
        word = np.empty(1, np.int64)
        for _ in range(times):
            with window.exclusive(0):
                window.get(0, 0, word)
                window.flush(0)
                window.put(0, 0, word + 1)
        comm.Barrier()
        with window.shared(0):
            window.get(0, 0, word)
        assert together(comm, word[0] == times * comm.size)


@pytest.mark.parametrize(("atomic", "on_node"), KINDS)
@pytest.mark.parametrize("dtype", [np.float32, np.int64])
def test_rows_come_in_the_order_asked(comm, atomic, on_node, dtype):
    table = np.arange(ROWS * DIM, dtype=dtype).reshape(ROWS, DIM)
    orders = [], [3], [0, 1, 2], [11, 0], [7, 2, 9, 0, 11, 4], list(range(11, -1, -1))
    wrong = []
    with opened(comm, 64 + table.nbytes, atomic, on_node) as window:
        with writing(window, comm.rank, atomic):
            window.put(comm.rank, 64, table + 1000 * comm.rank)
            window.flush(comm.rank)
        comm.Barrier()
        for rank in range(comm.size):
            for order in orders:
                rows = np.array(order, np.int64)
                out = np.full((rows.size, DIM), -1, dtype)
                with reading(window, rank, atomic):
                    window.get_rows(rank, 64, rows, out)
                    window.flush(rank)
                if not (out == table[rows] + 1000 * rank).all():
                    wrong.append((rank, order))
        assert together(comm, not wrong), wrong


@pytest.mark.parametrize(("atomic", "on_node"), KINDS)
def test_shares_of_no_bytes(comm, atomic, on_node):
    """All ranks but the last hold nothing; with one rank it holds nothing itself."""
    last = comm.size - 1
    has_bytes = comm.rank == last and comm.size > 1
    with opened(comm, 8 if has_bytes else 0, atomic, on_node) as window:
        size_is_right = window.local.size == (8 if has_bytes else 0)
        nothing = np.empty(0)
        with writing(window, 0, atomic):
            window.put(0, 0, nothing)
            window.get(0, 0, nothing)
            window.get_rows(0, 0, np.empty(0, np.int64), np.empty((0, 4)))
            window.flush(0)
        refused = raised(TableError, lambda: window.get(0, 0, np.empty(1, np.uint8)))
        if comm.size > 1:
            with reading(window, last, atomic):
                window.get(last, 0, np.empty(1))
        assert together(comm, size_is_right, "outside the 0 bytes of rank 0" in refused)


VERBS = ["put", "get", "read", "store", "add"]


@pytest.mark.parametrize("verb", VERBS)
def test_ranges_outside_are_refused(comm, verb):
    with opened(comm, 64) as window:
        call = getattr(window, verb)
        last = comm.size - 1
        messages = [
            raised(TableError, lambda: call(last, 60, np.zeros(1, np.int64))),
            raised(TableError, lambda: call(last, -8, np.zeros(1, np.int64))),
            raised(TableError, lambda: call(last, 0, np.zeros(9, np.int64))),
        ]
        expected = [
            f"bytes [{span}) are outside the 64 bytes of rank {last}"
            for span in ("60, 68", "-8, 0", "0, 72")
        ]
        call(last, 0, np.zeros(8, np.int64))  # exactly all of it
        window.flush(last)
        assert together(comm, messages == expected)


@pytest.mark.parametrize(
    ("rows", "span"), [([0, 3], "48, 64"), ([-1, 0], "-16, -16"), ([2, 1, 1000], "16000, 16016")]
)
def test_rows_outside_are_refused(comm, rows, span):
    with opened(comm, 48) as window:
        out = np.empty((len(rows), 2))
        message = raised(TableError, lambda: window.get_rows(0, 0, np.array(rows), out))
        assert together(comm, message == f"bytes [{span}) are outside the 48 bytes of rank 0")


def test_rows_beyond_the_reach_of_one_datatype_are_refused(comm, monkeypatch):
    monkeypatch.setattr(window_module, "MAX_INT32", 2)
    with opened(comm, 64) as window:
        window.get_rows(0, 0, np.array([2]), np.empty((1, 1)))
        message = raised(TableError, lambda: window.get_rows(0, 0, np.array([3]), np.empty((1, 1))))
        window.flush(0)
        assert together(comm, "row 3 is beyond 2" in message)


def test_rows_and_their_place_must_agree(comm):
    with opened(comm, 64) as window:
        rows = np.arange(3)
        message = raised(TableError, lambda: window.get_rows(0, 0, rows, np.empty((2, 2))))
        assert together(comm, message == "3 rows do not fit an array of shape (2, 2)")


@pytest.mark.parametrize("verb", [*VERBS, "get_rows"])
def test_arrays_in_another_memory_order_are_refused(comm, verb):
    square = np.zeros((4, 4))
    strange = [square[:, ::2], np.asfortranarray(square), square.T, np.zeros((8, 4))[::-2]]
    with opened(comm, 256) as window:
        messages = []
        for array in strange:
            arguments = (np.arange(len(array)), array) if verb == "get_rows" else (array,)
            call = functools.partial(getattr(window, verb), 0, 0, *arguments)
            messages.append(raised(TableError, call))
        expected = [
            f"array of shape {array.shape} must be C-contiguous for a transfer" for array in strange
        ]
        assert together(comm, messages == expected), messages


def test_a_dtype_that_mpi_lacks_is_refused(comm):
    with opened(comm, 64) as window:
        halves = np.zeros(2, np.float16)
        messages = {
            raised(ConfigError, functools.partial(getattr(window, verb), 0, 0, halves))
            for verb in ("read", "store", "add")
        }
        messages.add(
            raised(ConfigError, lambda: window.get_rows(0, 0, np.arange(2), halves[:, None]))
        )
        assert together(comm, messages == {"no MPI datatype for float16"})


@pytest.mark.parametrize(("atomic", "on_node"), KINDS)
def test_use_after_free_is_refused(comm, atomic, on_node):
    window = Window(MPI, comm, 64, atomic=atomic, on_node=on_node)
    window.free()
    window.free()
    word = np.zeros(1, np.int64)

    def lock(kind):
        with kind(0):
            pass

    calls = [
        *(lambda verb=verb: getattr(window, verb)(0, 0, word) for verb in VERBS),
        lambda: window.get_rows(0, 0, word, np.zeros((1, 1))),
        lambda: window.flush(0),
        window.sync,
    ]
    if not atomic:
        calls += [lambda: lock(window.shared), lambda: lock(window.exclusive)]
    messages = [raised(TableError, call) for call in calls]
    assert together(comm, set(messages) == {"the window was freed"}, window.local.size == 0)


def test_a_failing_writer_gives_its_lock_back(comm):
    with opened(comm, 8, atomic=False) as window:
        message = ""
        try:
            with window.exclusive(0):
                raise ValueError("mid-way")
        except ValueError as error:
            message = str(error)
        with window.exclusive(0):
            window.put(0, 0, np.array([1]))
        assert together(comm, message == "mid-way")


def test_two_windows_do_not_meet(comm):
    with opened(comm, 8) as flags, opened(comm, 8, atomic=False, on_node=True) as table:
        flags.store(comm.rank, 0, np.array([1 + comm.rank]))
        flags.flush(comm.rank)
        with table.exclusive(comm.rank):
            table.put(comm.rank, 0, np.array([-1 - comm.rank]))
        comm.Barrier()
        assert together(
            comm,
            flags.local.view(np.int64)[0] == 1 + comm.rank,
            table.local.view(np.int64)[0] == -1 - comm.rank,
        )


@pytest.mark.ranks(1, 2)
def test_rows_are_picked_the_same_way_without_the_librarys_own_call(comm, monkeypatch):
    rows = np.array([5, 0, 3], np.int64)
    row = MPI.FLOAT.Create_contiguous(4).Commit()
    monkeypatch.setattr(mpi, "_library_call", lambda *_: None)
    plain = mpi.indexed_rows(MPI, row, rows)
    monkeypatch.undo()
    quick = mpi.indexed_rows(MPI, row, rows)
    same = plain.Get_envelope()[-1] == quick.Get_envelope()[-1]
    contents = [kind.Get_contents()[0] for kind in (plain, quick)]
    for kind in (plain, quick, row):
        kind.Free()
    assert together(comm, same, contents[0] == contents[1] == [3, 1, 5, 0, 3])
