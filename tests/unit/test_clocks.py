"""Clocks of workers against a model in plain Python, and who may begin a step."""

import itertools
import random

import pytest

from mpifleet.ps.clocks import NEVER, Clocks, StalenessBound

LANES = (0, 1)


class Model:
    """Counts by (lane, worker); None for who is not waited for."""

    def __init__(self, num_workers):
        self.counts = {(lane, w): 0 for lane in LANES for w in range(num_workers)}
        self.steps = dict(self.counts)

    @property
    def slowest(self):
        return min((c for c in self.counts.values() if c is not None), default=NEVER)


@pytest.mark.parametrize("seed", range(8))
def test_the_least_count_of_all_lanes_and_active_workers_is_published(seed):
    """Any order of steps, pauses and stops; resuming as all do, together."""
    chance, num_workers = random.Random(seed), 4
    published = [0]
    clocks, model = Clocks(LANES, num_workers, 2, published.append), Model(num_workers)
    stopped = set()
    for _ in range(400):
        lane, worker = chance.choice(LANES), chance.randrange(num_workers)
        if model.counts[lane, worker] is None:
            continue
        if chance.random() < 0.05:
            clocks.rest(lane, worker)
            model.counts[lane, worker] = None
            if chance.random() < 0.1:
                stopped.add(worker)
        else:
            clocks.tick(lane, worker)
            model.counts[lane, worker] += 1
            model.steps[lane, worker] = model.counts[lane, worker]
        assert published[-1] == model.slowest
        if all(count is None for count in model.counts.values()):
            furthest = max(model.steps.values())
            for lane, worker in model.counts:
                if worker not in stopped:
                    clocks.resume(lane, worker)
                    model.counts[lane, worker] = model.steps[lane, worker] = furthest
            assert published[-1] == model.slowest
    assert all(old != new for old, new in itertools.pairwise(published))


def test_a_step_counts_when_it_is_in_every_lane():
    published = []
    clocks = Clocks(LANES, 1, 0, published.append)
    clocks.tick(0, 0)
    clocks.tick(0, 0)
    assert published == []
    clocks.tick(1, 0)
    assert published == [1]


def test_who_is_waited_for():
    clocks = Clocks((1,), 3, 1, lambda _: None)
    assert clocks.awaited is None
    clocks.tick(1, 2)
    assert clocks.awaited is None, "one step ahead is allowed"
    clocks.tick(1, 2)
    assert clocks.awaited == 0
    clocks.tick(1, 0)
    assert clocks.awaited == 1
    clocks.rest(1, 1)
    assert clocks.awaited is None
    for worker in (0, 2):
        clocks.rest(1, worker)
    assert clocks.awaited is None


class Servers:
    """Answers with the clocks it was given, one per question."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []

    def wait_slowest(self, clock):
        self.asked.append(clock)
        return self.answers.pop(0)


def test_nothing_is_asked_while_the_clock_seen_last_is_enough():
    servers = Servers(1, 5)
    bound = StalenessBound(servers, 2)
    for _ in range(7):
        bound.wait_for_turn()
    # Before steps 1 and 2 nothing need be known; 3 needs 1; 4 needs 2, and 5 lasts up to step 7.
    assert servers.asked == [1, 2]


def test_lock_step_asks_before_every_step():
    servers = Servers(1, 2, NEVER)
    bound = StalenessBound(servers, 0)
    for _ in range(5):
        bound.wait_for_turn()
    assert servers.asked == [1, 2, 3], "nobody else is left"


def test_after_a_pause_all_count_from_the_same_clock():
    servers = Servers(40, 41)
    bound = StalenessBound(servers, 1)
    bound.wait_for_turn()
    bound.resume()
    bound.wait_for_turn()
    assert servers.asked == [0]
    bound.wait_for_turn()
    assert servers.asked == [0, 41]
