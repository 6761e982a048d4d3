"""Nobody who pushes or pulls without pause keeps the others from being served."""

import numpy as np
import pytest

from mpifleet.ps.mailbox import Lane
from mpifleet.ps.message import Kind
from tests.unit.test_server import DENSE_ONLY, ROWS_ONLY, Server

QUESTION = np.zeros(1, np.int64).view(np.uint8)


def dense(server, worker):
    server.push_dense(worker, 1e-3)


def rows(server, worker):
    server.push_rows(worker, [worker], 1.0)


def pull(server, worker):
    server.lanes.deliver(worker, Lane.REQUEST, QUESTION, kind=Kind.PULL_ROWS)


ASK = {Lane.DENSE: dense, Lane.ROWS: rows, Lane.REQUEST: pull}


def turns_until_served(server, stream, asked, most=50):
    """Turns until the last worker's lane `asked` is empty while all others' `stream` is full."""
    last = server.lanes.layout.num_workers - 1
    ASK[asked](server, last)
    for turn in range(1, most + 1):
        for worker in range(last):
            if not server.lanes.is_full(worker, stream):
                ASK[stream](server, worker)
        assert server.loop._turn(), "there is something to do"
        if not server.lanes.is_full(last, asked):
            return turn
    return pytest.fail(f"not served in {most} turns")


@pytest.mark.parametrize("num_workers", [2, 3, 8])
@pytest.mark.parametrize("asked", ASK, ids=lambda lane: lane.name)
@pytest.mark.parametrize("stream", ASK, ids=lambda lane: lane.name)
def test_a_stream_from_all_others_does_not_starve_a_worker(stream, asked, num_workers):
    server = Server(num_workers, sync=False)
    turns = turns_until_served(server, stream, asked)
    # Behind each other's dense messages at most, or, among equals, when it is one's turn.
    assert turns <= num_workers + (stream is Lane.DENSE)


def test_rows_and_pulls_wait_for_a_round_of_dense_messages_no_longer():
    """Worker 0 pushes dense without pause: of any few turns in a row one serves rows and pulls."""
    server = Server(2, sync=False)
    applied = []
    for _ in range(9):
        for lane in (Lane.DENSE, Lane.ROWS):
            if not server.lanes.is_full(0, lane):
                ASK[lane](server, 0)
        before = server.version(Lane.ROWS)
        server.loop._turn()
        applied.append(server.version(Lane.ROWS) - before)
    assert applied == [0, 0, 1] * 3


def test_dense_goes_on_where_nothing_else_waits():
    server = Server(1, sync=False, specs=DENSE_ONLY)
    for step in range(5):
        dense(server, 0)
        assert server.loop._turn()
        assert server.version(Lane.DENSE) == step + 1


def test_the_next_word_of_a_merged_worker_waits_for_its_step():
    """Sync: STOP behind a step must not take the worker out before that step is complete."""
    server = Server(2, sync=True, specs=ROWS_ONLY)
    server.push_rows(0, [1], 4.0)
    server.turn()
    server.stop(0)
    server.turn()
    assert server.lanes.is_full(0, Lane.ROWS)
    server.push_rows(1, [1], 2.0)
    server.turn()
    assert server.rows[1, 0] == -1.5, "the mean of both"
    assert not server.lanes.is_full(0, Lane.ROWS), "and then it is heard"


@pytest.mark.parametrize("sync", [False, True])
def test_a_look_at_many_workers_reads_the_header_of_whom_it_serves_alone(monkeypatch, sync):
    num_workers = 300
    server = Server(num_workers, sync=sync, specs=ROWS_ONLY)
    for worker in range(num_workers):
        server.push_rows(worker, [1], 1.0)
    read, header = [], server.lanes.server.header
    monkeypatch.setattr(
        server.lanes.server, "header", lambda *asked: read.append(asked) or header(*asked)
    )
    server.turn(most=2 * num_workers)
    assert server.version(Lane.ROWS) == (1 if sync else num_workers)
    assert len(read) == num_workers
