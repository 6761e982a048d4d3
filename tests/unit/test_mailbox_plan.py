"""The mailbox's budget, its layout, and the server's side of lanes in plain memory."""

import itertools

import numpy as np
import pytest

from mpifleet.errors import ConfigError
from mpifleet.ps.assembler import Assembler
from mpifleet.ps.mailbox import Lane, MailboxLayout
from mpifleet.ps.mailbox_plan import MIN_LANE_BYTES, plan
from mpifleet.ps.message import HEADER_BYTES, Header, Kind, Word
from mpifleet.strategy import DistributedStrategy
from tests.unit.lanes import Lanes

MIB = 1 << 20
WORKERS = (1, 2, 3, 7, 16, 64, 100, 256, 1000)
BUDGETS = (1, 4, 16, 17, 18, 20, 64, 256)
MESSAGES = list(itertools.product((0, 100, 5000, 10 * MIB, 2**31), (0, 4, 40, 4096, 20_000)))


@pytest.mark.parametrize("served", [False, True])
@pytest.mark.parametrize("num_workers", WORKERS)
def test_a_plan_stays_within_its_budget_or_is_refused(num_workers, served):
    for budget_mib, (dense_bytes, row_bytes) in itertools.product(BUDGETS, MESSAGES):
        budget_bytes = budget_mib * MIB
        try:
            layout = plan(num_workers, budget_bytes, dense_bytes, row_bytes, served)
        except ConfigError:
            least = max(MIN_LANE_BYTES, row_bytes + 64)
            assert budget_bytes < num_workers * (4 * least + 8 * HEADER_BYTES)
            continue
        case = (budget_mib, dense_bytes, row_bytes)
        formula = 64 + num_workers * (64 + sum(64 + size for size in layout.capacities))
        assert layout.num_bytes == formula <= budget_bytes, case
        assert all(size % 64 == 0 for size in layout.capacities)
        assert min(layout.capacities) >= MIN_LANE_BYTES, case
        if served:
            assert layout.capacities[Lane.REPLY] >= row_bytes, case


def test_the_default_budget_takes_a_model_of_the_usual_size_in_one_piece():
    layout = plan(4, 256 * MIB, 5 * MIB, 40, served=False)
    assert layout.capacities[Lane.DENSE] == 5 * MIB
    assert layout.capacities[Lane.ROWS] == 16 * MIB


@pytest.mark.parametrize(("row_bytes", "least"), [(0, 16384), (40, 16384), (20_000, 4 * 20_032)])
def test_a_budget_that_is_too_small_is_refused_with_the_numbers(row_bytes, least):
    with pytest.raises(
        ConfigError,
        match=rf"mailbox_mib=1 leaves 985 bytes to each of 700 workers; at least {least} are",
    ):
        plan(700, MIB, 100, row_bytes, served=False)
    needed = 700 * (least + 512)
    plan(700, needed, 100, row_bytes, served=True)
    with pytest.raises(ConfigError):
        plan(700, needed - 700, 100, row_bytes, served=True)


def test_no_two_words_or_lanes_share_memory():
    layout = MailboxLayout(3, (64, 128, 192, 256))
    spans = [(layout.version(lane), 8) for lane in (Lane.DENSE, Lane.ROWS)]
    spans += [(layout.beat, 8), (layout.slowest, 8)]
    spans += [(layout.flags(w), 64) for w in range(3)]
    spans += [
        (layout.lane(w, lane), HEADER_BYTES + layout.capacities[lane])
        for w, lane in itertools.product(range(3), Lane)
    ]
    taken = np.zeros(layout.num_bytes, int)
    for offset, num_bytes in spans:
        assert offset + num_bytes <= layout.num_bytes
        taken[offset : offset + num_bytes] += 1
    assert taken.max() == 1
    # Flags of all workers are read at once: rows of one array.
    assert layout.flags(2) - layout.flags(1) == layout.flags(1) - layout.flags(0) == 64


def message(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, size).astype(np.uint8)


def test_flags_come_as_one_row_per_worker():
    lanes = Lanes(3)
    lanes.deliver(2, Lane.ROWS, message(10))
    lanes.deliver(0, Lane.DENSE, message(10))
    assert lanes.server.poll()[:, :4].tolist() == [[2, 0, 0, 0], [0] * 4, [0, 1, 0, 0]]
    lanes.server.clear(2, Lane.ROWS)
    assert lanes.server.poll()[:, :4].tolist() == [[2, 0, 0, 0], [0] * 4, [0] * 4]


@pytest.mark.parametrize("size", [0, 1, 100, 4096])
def test_a_message_in_one_piece_is_a_view_of_its_lane(size):
    lanes = Lanes(2)
    sent = message(size)
    lanes.deliver(1, Lane.ROWS, sent, step=5)
    header, got = Assembler(lanes.server, Lane.ROWS).take(1)
    assert header == Header(Kind.STEP, 5, 0, size, 0, size)
    np.testing.assert_array_equal(got, sent)
    assert np.shares_memory(got, lanes.window.local) == (size > 0)
    assert lanes.is_full(1, Lane.ROWS), "the caller frees the lane when it is done"


def test_a_message_in_pieces_is_put_together():
    lanes, sent = Lanes(1), message(1000)
    assembler = Assembler(lanes.server, Lane.ROWS)
    for start in (0, 400):
        lanes.deliver(0, Lane.ROWS, sent, start=start, stop=start + 400)
        assert assembler.take(0) is None
        assert not lanes.is_full(0, Lane.ROWS), "room for the next piece"
    lanes.deliver(0, Lane.ROWS, sent, start=800)
    _, got = assembler.take(0)
    np.testing.assert_array_equal(got, sent)
    assert lanes.is_full(0, Lane.ROWS)


def test_one_message_is_staged_at_a_time():
    lanes = Lanes(3)
    first, second, small = message(1000, 1), message(900, 2), message(50, 3)
    assembler = Assembler(lanes.server, Lane.ROWS)
    lanes.deliver(0, Lane.ROWS, first, stop=600)
    lanes.deliver(1, Lane.ROWS, second, stop=600)
    lanes.deliver(2, Lane.ROWS, small)
    assert assembler.take(0) is None
    assert [assembler.admits(worker) for worker in range(3)] == [True, False, True]
    assert assembler.take(1) is None
    assert lanes.is_full(1, Lane.ROWS), "the second one waits in its lane"
    np.testing.assert_array_equal(assembler.take(2)[1], small)
    lanes.deliver(0, Lane.ROWS, first, start=600)
    np.testing.assert_array_equal(assembler.take(0)[1], first)
    lanes.server.clear(0, Lane.ROWS)
    assert assembler.admits(1)
    assert assembler.take(1) is None
    lanes.deliver(1, Lane.ROWS, second, start=600)
    np.testing.assert_array_equal(assembler.take(1)[1], second)


def test_a_reply_frees_the_request():
    lanes = Lanes(2)
    sequence = lanes.deliver(1, Lane.REQUEST, message(8), kind=Kind.PULL_ROWS)
    answer = message(77)
    lanes.server.payload(1, Lane.REPLY, 77)[:] = answer
    lanes.server.reply(1, sequence, Header(Kind.PULL_ROWS, 0, 3, 77, 0, 77))
    flags = lanes.server.poll()
    assert (flags[1, Lane.REQUEST], flags[1, Lane.REPLY]) == (0, sequence)
    assert lanes.server.header(1, Lane.REPLY) == Header(Kind.PULL_ROWS, 0, 3, 77, 0, 77)


def test_versions_stand_beside_the_flags():
    lanes = Lanes(2)
    lanes.server.set_version(Lane.DENSE, 3)
    lanes.server.set_version(Lane.ROWS, 2**40)
    words = lanes.window.local.view(np.int64)
    assert words[lanes.layout.version(Lane.DENSE) // 8] == 3
    assert words[lanes.layout.version(Lane.ROWS) // 8] == 2**40
    assert not lanes.server.poll().any()


def test_a_look_at_a_thousand_workers_is_one_read_of_64_bytes_each(monkeypatch):
    lanes, reads = Lanes(1000, capacity=64), []
    read = lanes.window.read
    monkeypatch.setattr(
        lanes.window, "read", lambda rank, offset, out: (reads.append(out), read(rank, offset, out))
    )
    lanes.deliver(999, Lane.ROWS, message(10))
    reads.clear()
    flags = lanes.server.poll()
    assert [out.nbytes for out in reads] == [64_000]
    assert np.flatnonzero(flags[:, Lane.ROWS]).tolist() == [999]


@pytest.mark.parametrize("served", [False, True])
def test_a_thousand_workers_of_a_usual_model_share_the_default_budget(served):
    budget = DistributedStrategy().mailbox_mib * MIB
    layout = plan(1000, budget, 2 * MIB, 40, served)
    assert 0.9 * budget < layout.num_bytes <= budget
    assert layout.lane(999, Lane.REPLY) + HEADER_BYTES + layout.capacities[3] == layout.num_bytes


def test_headers_of_all_workers_in_one_view():
    lanes = Lanes(3)
    lanes.deliver(0, Lane.ROWS, message(100), step=7)
    lanes.deliver(2, Lane.ROWS, message(100), kind=Kind.STOP, start=32, stop=64)
    headers = lanes.server.headers(Lane.ROWS)
    for worker in (0, 2):
        header = lanes.server.header(worker, Lane.ROWS)
        assert headers[worker, :6].tolist() == list(header.encode()[:6])
    assert headers[:, Word.STEP].tolist() == [7, 0, 0]
    assert headers[2, Word.START] == headers[2, Word.NUM_BYTES] == 32
    assert headers[2, Word.TOTAL_BYTES] == 100
    assert not headers[1].any()


def test_who_may_be_taken_first_while_a_message_is_staged():
    lanes = Lanes(4)
    assembler = Assembler(lanes.server, Lane.ROWS)
    for worker, stop in ((1, 600), (2, 600), (3, None)):
        lanes.deliver(worker, Lane.ROWS, message(1000), stop=stop)
    assert assembler.first(np.array([2, 3, 1])) == 2
    assert assembler.take(1) is None  # staged from now on
    assert assembler.first(np.array([2])) is None
    assert assembler.first(np.array([2, 3])) == 3
    lanes.deliver(1, Lane.ROWS, message(1000), start=600)
    assert assembler.first(np.array([2, 1, 3])) == 1
    assert assembler.first(np.empty(0, np.int64)) is None
