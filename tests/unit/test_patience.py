"""Waiting: quick when it is short, reported when it is long, ended when it is too long."""

import itertools
import time

import pytest

from mpifleet import patience
from mpifleet.errors import StallError
from mpifleet.patience import Backoff, Doze, Patience


class Clock:
    """Time that passes only while something sleeps."""

    def __init__(self, monkeypatch):
        self.now_s = 100.0
        self.naps_s = []
        monkeypatch.setattr(patience.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(patience.time, "sleep", self.sleep)

    def sleep(self, seconds):
        self.naps_s.append(seconds)
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.fixture
def warnings(monkeypatch):
    lines = []

    class Lines:
        def warning(self, text, *values):
            lines.append(text % values)

    monkeypatch.setattr(patience, "get_logger", Lines)
    return lines


def never():
    return False


def test_what_is_ready_is_not_waited_for(clock, warnings):
    Patience().wait(lambda: True, lambda: pytest.fail("nothing is missing"))
    assert not clock.naps_s


def test_a_short_wait_is_quick(clock, warnings):
    polls = itertools.count()
    Patience().wait(lambda: next(polls) >= 100, lambda: pytest.fail("nothing is missing"))
    assert next(polls) == 101
    assert clock.now_s - 100 < 0.02
    assert not warnings


def test_a_long_wait_is_reported_with_what_is_missing(clock, warnings):
    end_s = clock.now_s + 9.5
    Patience(report_s=3, end_s=60).wait(lambda: clock.now_s > end_s, lambda: "server 1 starting")
    assert warnings == [f"{seconds} s without: server 1 starting" for seconds in (3, 6, 9)]


def test_the_end_of_patience_names_what_is_missing(clock, warnings):
    started_s = clock.now_s
    missing = iter(["worker 3 pulling", "worker 2 pulling", "worker 1 pulling"])
    with pytest.raises(StallError, match=r"gave up after 10 s .*stall_end_s.*: worker 1 pulling"):
        Patience(report_s=4, end_s=10).wait(never, lambda: next(missing))
    assert len(warnings) == 2
    assert clock.now_s - started_s == pytest.approx(10, abs=0.01)


def test_real_time_runs_out_too(warnings):
    started_s = time.monotonic()
    with pytest.raises(StallError, match="server 0"):
        Patience(report_s=60, end_s=0.05).wait(never, lambda: "server 0")
    assert 0.05 <= time.monotonic() - started_s < 5


def test_an_error_while_waiting_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        Patience().wait(lambda: 1 / 0, lambda: "")


def test_backoff_naps_then_sleeps(clock):
    backoff = Backoff(long_sleep_s=0.5)
    for _ in range(1000 + 1000 + 2):
        backoff.pause()
    assert clock.naps_s == [patience.SHORT_SLEEP_S] * 1000 + [0.5] * 1000 + [2.0] * 2
    backoff.reset()
    backoff.pause()
    assert clock.naps_s[-1] == patience.SHORT_SLEEP_S


def test_a_doze_ends_at_most_a_quarter_late_and_looks_seldom(clock):
    doze, begin_s, looks = Doze(), clock.now_s, 0
    while clock.now_s - begin_s < 10e-3:
        doze.pause()
        looks += 1
        late_s = clock.naps_s[-1] if clock.naps_s else 0.0
        waited_s = clock.now_s - begin_s
        assert late_s <= max(patience.SHORT_SLEEP_S, 0.25 * waited_s)
        assert late_s <= 200e-6
    assert looks < 90
    clock.now_s += 1.0
    doze.pause()
    assert clock.naps_s[-1] == 800e-6


def test_short_sleeps_become_short():
    patience.sharpen_sleep()
    naps = []
    for _ in range(50):
        started_s = time.perf_counter()
        time.sleep(20e-6)
        naps.append(time.perf_counter() - started_s)
    # The kernel's usual slack alone would make it 70 us.
    assert min(naps) < 65e-6


def test_a_pulse_keeps_patience_alive_until_it_stops(clock):
    started_s = clock.now_s
    beats = iter([1, 2, 3, 3])
    with pytest.raises(StallError):
        Patience(4, 10).wait(lambda: False, lambda: "a save", lambda: next(beats))
    assert 30 < clock.now_s - started_s < 31, "three times as long: it beat twice"
