"""The server's loop in plain memory: who is served when, and what a save waits for."""

import numpy as np
import pytest

from mpifleet.errors import NonFiniteGradient
from mpifleet.ps.mailbox import Lane, lanes_of
from mpifleet.ps.message import NO_VERSION, Kind, dense_arrays, join, lay_out, rows_arrays
from mpifleet.ps.server import ParameterServer
from mpifleet.ps.shard import Shard
from mpifleet.ps.spec import TableSpecs, layouts
from tests.unit.lanes import Lanes
from tests.unit.table_examples import HYPERS, dense_spec, sparse_spec

DIM = 2
SGD = HYPERS["sgd"][None]  # rate 0.5
NOTHING = np.empty(0, np.uint8)
SPECS = TableSpecs((dense_spec("dense0", (16,)),), (sparse_spec("emb", 8, DIM),))
ROWS_ONLY, DENSE_ONLY = TableSpecs((), SPECS.sparse), TableSpecs(SPECS.dense, ())


class Server:
    """A server of one dense and one sparse table of zeros, turned by hand."""

    def __init__(
        self, num_workers, *, sync=False, skip=False, specs=SPECS, hybrid=False, staleness=-1
    ):
        self.lanes = Lanes(num_workers)
        self.layout = layouts(specs, 1)[0]
        memory = np.zeros(self.layout.num_bytes, np.uint8)
        hypers = SGD[: len(specs.dense)], SGD[: len(specs.sparse)]
        self.shard = Shard(self.layout, memory, *hypers)
        self.saved, self.stamps = [], []
        self.loop = ParameterServer(
            self.shard,
            self.lanes.server,
            sync=sync,
            dense_sync=hybrid,
            staleness=staleness,
            skip_nonfinite=skip,
            stamp=lambda lane, version: self.stamps.append((lane, version)),
            handlers={Kind.SAVE: self._save},
            progress=lambda: None,
        )

    def _save(self, request):
        self.saved.append((request, self.rows.copy(), self.dense.copy()))
        return b""

    @property
    def rows(self):
        return self.shard.rows(0)

    @property
    def dense(self):
        return self.shard.dense(0)

    def turn(self, most=50):
        """Turns until nothing is left to do; fails where there is no end."""
        for count in range(most):
            if not self.loop._turn():
                return count
        return pytest.fail(f"still busy after {most} turns")

    def push_rows(self, worker, rows, value, **piece):
        rows = np.array(rows, np.int64)
        values = np.full((rows.size, DIM), value, np.float32)
        message = join(*lay_out(rows_arrays(SGD, [rows], [values], [rows.size])))
        self.lanes.deliver(worker, Lane.ROWS, message, **piece)

    def push_dense(self, worker, value, **header):
        flat, present = np.full(16, value, np.float32), np.ones(1, np.uint8)
        message = join(*lay_out(dense_arrays(self.layout, SGD, [present], [flat])))
        self.lanes.deliver(worker, Lane.DENSE, message, **header)

    def stop(self, worker):
        for lane in lanes_of(self.layout.specs):
            self.lanes.deliver(worker, lane, NOTHING, kind=Kind.STOP)

    def version(self, lane):
        return self._word(self.lanes.layout.version(lane))

    @property
    def slowest(self):
        return self._word(self.lanes.layout.slowest)

    def _word(self, offset):
        return int(self.lanes.window.local.view(np.int64)[offset // 8])


def test_async_applies_what_is_there_undivided():
    server = Server(3, sync=False)
    server.push_rows(1, [2, 5], 1.0)
    server.push_rows(2, [5], 4.0)
    server.push_dense(0, 8.0)
    server.turn()
    assert server.rows[:, 0].tolist() == [0, 0, -0.5, 0, 0, -2.5, 0, 0]
    assert server.dense.tolist() == [-4.0] * 16
    assert (server.version(Lane.DENSE), server.version(Lane.ROWS)) == (1, 2)
    assert not server.lanes.server.poll().any()


def test_async_serves_workers_in_turn():
    server = Server(3, sync=False)
    for worker in range(3):
        server.push_rows(worker, [worker], 1.0)
    order = []
    for _ in range(6):
        before = server.rows[:, 0].copy()
        server.loop._turn()
        (worker,) = np.flatnonzero(server.rows[:, 0] != before).tolist()
        order.append(worker)
        server.push_rows(worker, [worker], 1.0)  # a worker that never pauses
    assert order == [0, 1, 2, 0, 1, 2]


def test_dense_comes_first_and_pulls_do_not_hold_up_rows():
    server = Server(2, sync=False)
    server.push_rows(0, [1], 2.0)
    server.push_dense(1, 2.0)
    server.lanes.deliver(1, Lane.REQUEST, np.zeros(1, np.int64).view(np.uint8), kind=Kind.PULL_ROWS)
    done = []
    for _ in range(2):
        server.loop._turn()
        done.append((server.dense[0] != 0, server.lanes.is_full(1, Lane.REPLY), server.rows[1, 0]))
    assert done == [(True, False, 0), (True, True, -1)]


def test_sync_waits_for_every_worker_and_takes_the_mean():
    server = Server(3, sync=True)
    server.push_rows(2, [1, 2], 6.0)
    server.push_rows(0, [1], 3.0)
    server.turn()
    assert not server.rows.any()
    assert server.version(Lane.ROWS) == 0
    server.push_rows(1, [], 0.0)
    server.turn()
    assert server.rows[:, 0].tolist() == [0, -1.5, -1, 0, 0, 0, 0, 0]  # 0.5 * (3 + 6) / 3
    assert server.version(Lane.ROWS) == 1


def test_sync_takes_the_mean_of_those_still_active():
    server = Server(3, sync=True)
    server.stop(1)
    server.push_rows(0, [1], 4.0)
    server.push_rows(2, [1], 4.0)
    server.turn()
    assert server.rows[1].tolist() == [-2.0] * DIM
    server.push_rows(0, [1], 4.0)
    server.stop(2)
    server.turn()
    assert server.rows[1].tolist() == [-4.0] * DIM
    server.stop(0)
    server.turn()
    server.loop.run()  # nobody is left: returns at once


def announce(server, worker, kind):
    """What a worker says in all its lanes; the server has heard it when this returns."""
    for lane in lanes_of(server.layout.specs):
        server.lanes.deliver(worker, lane, NOTHING, kind=kind)
    server.turn()
    assert not server.lanes.server.poll()[worker].any()


def test_sync_does_not_wait_for_a_worker_that_pauses():
    server = Server(3, sync=True, specs=ROWS_ONLY)
    server.push_rows(0, [1], 4.0)
    announce(server, 1, Kind.PAUSE)
    server.push_rows(2, [1], 2.0)
    server.turn()
    assert server.rows[1].tolist() == [-1.5] * DIM
    announce(server, 0, Kind.PAUSE)
    server.push_rows(2, [1], 2.0)
    server.turn()
    assert server.rows[1].tolist() == [-2.5] * DIM
    announce(server, 2, Kind.PAUSE)
    for worker in (2, 0, 1):  # together again, in any order
        announce(server, worker, Kind.RESUME)
    for worker in (1, 2):
        server.push_rows(worker, [1], 3.0)
        server.turn()
        assert server.rows[1].tolist() == [-2.5] * DIM
    server.push_rows(0, [1], 3.0)
    server.turn()
    assert server.rows[1].tolist() == [-4.0] * DIM
    assert server.version(Lane.ROWS) == 3


def test_a_worker_may_stop_while_it_pauses():
    server = Server(2, sync=True)
    announce(server, 0, Kind.PAUSE)
    server.stop(0)
    server.push_rows(1, [1], 2.0)
    server.turn()
    assert server.rows[1].tolist() == [-1.0] * DIM
    server.stop(1)
    server.loop.run()


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("specs", [ROWS_ONLY, DENSE_ONLY, SPECS], ids=["rows", "dense", "both"])
def test_the_loop_ends_when_all_have_stopped_in_the_lanes_they_use(specs, sync):
    """The last worker stops first: it need not wait for the others in a lane nobody uses."""
    server = Server(2, sync=sync, specs=specs)
    for lane in lanes_of(specs):
        push = server.push_rows if lane is Lane.ROWS else server.push_dense
        push(0, *([[1]] if lane is Lane.ROWS else []), 2.0)
    server.stop(1)
    server.turn()
    assert not server.lanes.server.poll().any(), "all was heard"
    assert all(server.version(lane) == 1 for lane in lanes_of(specs))
    server.stop(0)
    server.loop.run()


@pytest.mark.parametrize("kind", [Kind.PAUSE, Kind.RESUME])
def test_pauses_mean_nothing_in_async_mode(kind):
    server = Server(2, sync=False)
    announce(server, 0, kind)
    assert server.version(Lane.ROWS) == 0, "no update"


EMB = 2
"""What a worker that finds a number that is not finite in the rows of "emb" says."""


@pytest.mark.parametrize("sync", [False, True])
def test_a_gradient_that_is_not_finite_changes_nothing(sync):
    server = Server(1, sync=sync)
    server.push_rows(0, [1], np.inf, step=12, argument=EMB)
    with pytest.raises(NonFiniteGradient, match=r"worker 0 .* table 'emb' at step 12"):
        server.turn()
    assert not server.rows.any()


@pytest.mark.parametrize("sync", [False, True])
def test_skipping_goes_on_and_counts_the_step(sync):
    server = Server(2, sync=sync, skip=True)
    server.push_rows(0, [1], np.nan, argument=EMB)
    server.push_rows(1, [1], 2.0)
    server.turn()
    assert server.rows[1].tolist() == [-1.0] * DIM  # in sync mode the mean of those accepted
    assert server.version(Lane.ROWS) == (1 if sync else 2)


def ask_save(server, worker):
    server.lanes.deliver(worker, Lane.REQUEST, np.frombuffer(b"ckpt", np.uint8), kind=Kind.SAVE)


def test_a_save_has_everything_that_was_delivered_before():
    server = Server(2, sync=False)
    server.push_rows(0, [3], 2.0)
    server.push_rows(1, [4], 2.0)
    server.push_dense(1, 2.0)
    ask_save(server, 0)
    server.turn()
    ((request, rows, dense),) = server.saved
    assert request == b"ckpt"
    assert rows[:, 0].tolist() == [0, 0, 0, -1, -1, 0, 0, 0]
    assert dense.tolist() == [-1.0] * 16


def test_a_save_does_not_wait_for_messages_that_are_still_on_their_way():
    """One message is half staged, another holds a first piece: neither can be completed now."""
    server = Server(3, sync=False)
    rows = [1, 2, 3]
    server.push_rows(0, rows, 2.0, stop=128)
    server.turn()
    server.push_rows(1, rows, 4.0, stop=128)
    ask_save(server, 2)
    server.turn()
    ((_, saved, _),) = server.saved
    assert not saved.any()
    server.push_rows(0, rows, 2.0, start=128)
    server.turn()
    server.push_rows(1, rows, 4.0, start=128)
    server.turn()
    assert server.rows[:4, 0].tolist() == [0, -3, -3, -3]


def test_answers_to_pulls():
    server = Server(2, sync=False)
    server.rows[:] = np.arange(16).reshape(8, DIM)
    server.dense[:] = np.arange(16)
    wanted = np.array([6, 0, 3])
    deliver = server.lanes.deliver
    deliver(0, Lane.REQUEST, wanted.view(np.uint8), kind=Kind.PULL_ROWS)
    deliver(1, Lane.REQUEST, np.array([4, 9]).view(np.uint8), kind=Kind.PULL_DENSE)
    server.turn()
    reply = server.lanes.server.payload
    rows = reply(0, Lane.REPLY, 24).view(np.float32).reshape(3, DIM)
    assert rows.tolist() == [[12, 13], [0, 1], [6, 7]]
    assert reply(1, Lane.REPLY, 20).view(np.float32).tolist() == [4, 5, 6, 7, 8]


def test_who_pauses_or_stops_need_not_wait_for_a_slow_worker():
    server = Server(3, sync=True)
    announce(server, 1, Kind.PAUSE)
    server.stop(2)
    server.turn()
    assert not server.lanes.server.poll().any()
    server.push_dense(0, 2.0)
    server.turn()
    assert server.dense[0] == -1.0, "worker 0 alone is the mean"


# -- hybrid, lag, and the bound on staleness -----------------------------------------------------


def test_hybrid_applies_rows_at_once_and_the_mean_of_the_dense_part():
    server = Server(2, hybrid=True)
    server.push_dense(0, 2.0)
    server.push_rows(0, [1], 2.0)
    server.turn()
    assert server.rows[1].tolist() == [-1.0] * DIM
    assert not server.dense.any()
    server.push_dense(1, 6.0)
    server.push_rows(1, [1], 6.0)
    server.turn()
    assert server.rows[1].tolist() == [-4.0] * DIM
    assert server.dense.tolist() == [-2.0] * 16
    assert (server.version(Lane.DENSE), server.version(Lane.ROWS)) == (1, 2)


def test_hybrid_does_not_wait_for_a_worker_that_pauses():
    server = Server(2, hybrid=True)
    announce(server, 1, Kind.PAUSE)
    server.push_dense(0, 2.0)
    server.turn()
    assert server.dense[0] == -1.0
    announce(server, 1, Kind.RESUME)
    server.push_dense(0, 2.0)
    server.turn()
    assert server.dense[0] == -1.0
    server.stop(1)
    server.turn()
    assert server.dense[0] == -2.0
    server.stop(0)
    server.loop.run()


def test_versions_are_stamped_once_they_are_in_the_tables():
    server = Server(1)
    for _ in range(2):
        server.push_dense(0, 1.0)
        server.push_rows(0, [1], 1.0)
        server.turn()
    assert server.stamps == [(Lane.DENSE, 1), (Lane.ROWS, 1), (Lane.DENSE, 2), (Lane.ROWS, 2)]


def test_lag_is_the_updates_since_the_version_of_the_push():
    server = Server(2)
    for worker, version in ((0, 0), (1, 0), (0, 0), (1, 2), (0, NO_VERSION)):
        server.push_rows(worker, [1], 1.0, version=version)
        server.push_dense(worker, 1.0, version=max(version, 0))
        server.turn()
    rows, dense = server.loop.lags[Lane.ROWS], server.loop.lags[Lane.DENSE]
    assert (rows.num_pushes, rows.quantile(0.5), rows.maximum) == (4, 1, 2)  # 0 1 2 1
    assert (dense.num_pushes, dense.quantile(0.9), dense.maximum) == (5, 4, 4)  # 0 1 2 1 4


def test_answers_say_of_which_version_they_are():
    server = Server(2)
    for _ in range(3):
        server.push_rows(0, [1], 1.0)
        server.turn()
    server.push_dense(0, 1.0)
    deliver = server.lanes.deliver
    deliver(0, Lane.REQUEST, np.array([1]).view(np.uint8), kind=Kind.PULL_ROWS)
    deliver(1, Lane.REQUEST, np.array([0, 9]).view(np.uint8), kind=Kind.PULL_DENSE)
    server.turn()
    header = server.lanes.server.header
    assert header(0, Lane.REPLY).version == 3
    assert header(1, Lane.REPLY).version == 1


def test_without_a_bound_no_clock_is_kept():
    server = Server(1)
    server.push_rows(0, [1], 1.0)
    server.turn()
    assert server.slowest == 0


@pytest.mark.parametrize("hybrid", [False, True])
def test_the_clock_of_the_slowest_counts_steps_in_all_lanes(hybrid):
    server = Server(2, staleness=1, hybrid=hybrid)
    for worker in (0, 1):
        server.push_rows(worker, [1], 1.0)
        server.push_dense(worker, 1.0)
        assert server.slowest == 0
        server.turn()
    assert server.slowest == 1
    server.push_rows(0, [1], 1.0)
    server.stop(1)
    server.turn()
    assert server.slowest == 1
    server.push_dense(0, 1.0)
    server.turn()
    assert server.slowest == 2


def test_a_refused_push_is_a_step_all_the_same():
    server = Server(1, staleness=0, skip=True, specs=ROWS_ONLY)
    server.push_rows(0, [1], np.nan, argument=1)
    server.turn()
    assert server.slowest == 1


def test_who_pauses_is_not_the_slowest_and_resumes_level_with_the_furthest():
    server = Server(2, staleness=0, specs=ROWS_ONLY)
    announce(server, 1, Kind.PAUSE)
    for _ in range(3):
        server.push_rows(0, [1], 1.0)
        server.turn()
    assert server.slowest == 3
    announce(server, 0, Kind.PAUSE)
    for worker in (1, 0):
        announce(server, worker, Kind.RESUME)
        assert server.slowest == 3
    server.push_rows(1, [1], 1.0)
    server.turn()
    assert server.slowest == 3
    server.push_rows(0, [1], 1.0)
    server.turn()
    assert server.slowest == 4


def test_the_slowest_worker_is_the_one_to_name():
    server = Server(2, staleness=0, specs=ROWS_ONLY)
    server.push_rows(0, [1], 1.0)
    server.turn()
    assert server.loop._rows.awaited == 1
