"""Reading ahead: same items, bounded, errors arrive, no thread stays behind."""

import gc
import threading
import time

import pytest

from mpifleet.data.prefetch import prefetch
from mpifleet.errors import ConfigError


def wait_until(condition, limit_s=10.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "condition not reached in time"
        time.sleep(0.005)


class Source:
    """Counts what was taken from it and notes its closing."""

    def __init__(self, count):
        self.taken = 0
        self.closed_in = None
        self.iterator = self._items(count)

    def _items(self, count):
        try:
            for number in range(count):
                self.taken += 1
                yield number
        finally:
            self.closed_in = threading.current_thread().name


@pytest.mark.parametrize("depth", [1, 3, 100])
def test_same_items_in_order_then_the_end_for_ever(depth):
    ahead = prefetch(range(50), depth)
    assert list(ahead) == list(range(50))
    assert list(ahead) == []
    assert not ahead._thread.is_alive()


def test_at_most_depth_items_wait():
    source = Source(1000)
    with prefetch(source.iterator, depth=3) as ahead:
        assert next(ahead) == 0
        wait_until(lambda: source.taken >= 5)
        time.sleep(0.05)
        assert source.taken == 5  # one consumed, three queued, one in the producer's hand


def test_error_comes_after_the_items_before_it():
    def broken():
        yield 1
        raise ValueError("line 2 is broken")

    ahead = prefetch(broken(), 4)
    assert next(ahead) == 1
    with pytest.raises(ValueError, match="line 2 is broken"):
        next(ahead)
    with pytest.raises(StopIteration):
        next(ahead)


def test_an_object_that_is_not_iterable_raises_in_the_consumer():
    with pytest.raises(TypeError, match="not iterable"):
        next(prefetch(7, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize("consumed", [0, 1, 5])
def test_closing_early_ends_thread_and_source(consumed):
    source = Source(10**9)
    with prefetch(source.iterator, 2) as ahead:
        for _ in range(consumed):
            next(ahead)
        wait_until(lambda: source.taken > consumed)
    assert not ahead._thread.is_alive()
    assert source.closed_in == "prefetch"
    ahead.close()
    assert list(ahead) == []


def test_dropping_the_iterator_ends_the_thread():
    ahead = prefetch(Source(10**9).iterator, 2)
    thread = ahead._thread
    next(ahead)
    del ahead
    gc.collect()
    wait_until(lambda: not thread.is_alive())


def test_depth_must_be_positive():
    with pytest.raises(ConfigError, match="depth=0"):
        prefetch([1], 0)
