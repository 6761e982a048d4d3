"""Run an iterator ahead of its consumer in a background thread.

A thread, never a process: forking after MPI_Init is not safe.  The thread pays off where the
producer releases the GIL for most of its time, as file reads, zlib and numpy do.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Generic, TypeVar

from mpifleet.errors import ConfigError

__all__ = ["Prefetch", "prefetch"]

Item = TypeVar("Item")
_JOIN_TIMEOUT_S = 10.0


class _End:
    """Last entry of the queue: the source ended, by itself or through `error`."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def prefetch(iterable: Iterable[Item], depth: int = 2) -> Prefetch[Item]:
    """Iterate over `iterable` with at most `depth` items read ahead, in the same order.

    An exception of the source is raised in the consumer, after the items before it.  Use it in a
    `with` block, or call `close()`, when the consumer may stop early.
    """
    return Prefetch(iterable, depth)


class Prefetch(Generic[Item]):
    """Iterator over what a background thread reads ahead; for one consumer.

    The thread ends with the source, on `close()`, or when this object is dropped; the source's
    own `close` (a generator's `finally`) then runs in that thread.
    """

    def __init__(self, iterable: Iterable[Item], depth: int) -> None:
        """depth: bound on the items held, 1 or more."""
        if depth < 1:
            raise ConfigError(f"depth={depth} reads nothing ahead; use 1 or more")
        self._items: queue.Queue[Any] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._ended = False
        # The thread must not refer to self: dropping the last outside reference has to stop it.
        self._thread = threading.Thread(
            target=_produce,
            args=(iterable, self._items, self._stop),
            name="prefetch",
            daemon=True,
        )
        self._finalizer = weakref.finalize(self, _release, self._items, self._stop)
        self._thread.start()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        if self._ended:
            raise StopIteration
        item = self._items.get()
        if not isinstance(item, _End):
            return item
        self.close()
        if item.error is not None:
            raise item.error
        raise StopIteration

    def close(self) -> None:
        """Stop reading ahead and wait for the thread; calling it again does nothing.

        A source stuck in one long read is waited for 10 s and then left to end by itself.
        """
        self._ended = True
        self._finalizer()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_TIMEOUT_S)

    def __enter__(self) -> Prefetch[Item]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _produce(iterable: Iterable[Any], items: queue.Queue[Any], stop: threading.Event) -> None:
    error: BaseException | None = None
    source: Iterator[Any] | None = None
    try:
        source = iter(iterable)
        while not stop.is_set():
            try:
                item = next(source)
            except StopIteration:
                break
            items.put(item)
    except BaseException as raised:  # the consumer gets it, or would wait for ever
        error = raised
    finally:
        close = getattr(source, "close", None)
        if callable(close):
            try:
                close()
            except BaseException as raised:
                error = error or raised
        if not stop.is_set():
            items.put(_End(error))


def _release(items: queue.Queue[Any], stop: threading.Event) -> None:
    """Stop the producer, which may be waiting for room: after this it has room for one more put.

    The producer looks at `stop` between two puts, so one place is all that it can still need.
    """
    stop.set()
    while True:
        try:
            items.get_nowait()
        except queue.Empty:
            return
