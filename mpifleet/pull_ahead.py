"""Rows of coming batches, asked for before they are needed."""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from mpifleet.errors import ConfigError, KeyRangeError, TableError
from mpifleet.log import get_logger
from mpifleet.ps.rows_pull import PulledRows

Batch = TypeVar("Batch")
Plan = TypeVar("Plan")
Announced = list[tuple[Any, Any]]
"""Embeddings, each with a look-up that it expects."""


@dataclass
class Expected(Generic[Plan]):
    """A look-up that is to come: a copy of its ids, how its rows become its output, the rows.

    make_plan: what gives its plan.  plan: None where it is made while a step waits.  rows: None
    where they are pulled when the look-up comes.
    """

    ids: Tensor
    offsets: Tensor | None
    make_plan: Callable[[], Plan]
    plan: Plan | None = None
    rows: PulledRows | None = None
    last_step: int = sys.maxsize
    """The step of its table up to which its rows are as fresh as was promised."""

    def progress(self) -> None:
        """Do now what can be done before the look-up comes."""
        if self.rows is not None:
            self.rows.read_near()
        elif self.plan is None:
            with suppress(KeyRangeError, TableError):  # raised by the look-up, where it belongs
                self.plan = self.make_plan()

    def is_for(self, ids: Tensor, offsets: Tensor | None) -> bool:
        """Whether a look-up is this one, by its ids: a tensor may have changed meanwhile."""
        return _same(self.ids, ids) and _same(self.offsets, offsets)


def _same(left: Tensor | None, right: Tensor | None) -> bool:
    if left is None and right is None:
        return True
    if left is None or right is None or left.is_floating_point() or right.is_floating_point():
        return False
    return torch.equal(left.long(), right.to(left.device).long())


class ExpectedLookUps(Generic[Plan]):
    """The look-ups of one table that are to come, in their order."""

    def __init__(self) -> None:
        self._queue: deque[Expected[Plan]] = deque()
        self.steps = 0
        """Calls of `read_near`: one per step of the worker."""

    def add(self, expected: Expected[Plan]) -> None:
        """One more, after all others."""
        self._queue.append(expected)

    def take(self, ids: Tensor, offsets: Tensor | None) -> Expected[Plan] | None:
        """The look-up of these ids, and forget those before it; None where nobody expected it, or
        where so many steps were made since that its rows are older than was promised.
        """
        for number, expected in enumerate(self._queue):
            if expected.is_for(ids, offsets):
                for _ in range(number + 1):
                    self._queue.popleft()
                return expected if self.steps <= expected.last_step else None
        return None

    def discard(self, expected: Expected[Plan]) -> bool:
        """Expect this look-up no more; whether it had not been taken."""
        if any(each is expected for each in self._queue):
            self._queue = deque(each for each in self._queue if each is not expected)
            return True
        return False

    def read_near(self) -> None:
        """A step was made: read what this rank can read itself for the look-up that comes next,
        or sort its keys.
        """
        self.steps += 1
        if self._queue:
            self._queue[0].progress()

    def clear(self) -> None:
        """Expect nothing any more."""
        self._queue.clear()


def ahead(
    batches: Iterable[Batch],
    look_ups: Callable[[Batch], Mapping[Any, Any]],
    num_batches: int,
) -> Iterator[Batch]:
    """The same batches; `num_batches` before its turn each one's look-ups are announced.

    With 0 one batch before its turn, for its keys alone: they are sorted while a step waits.
    look_ups: gives {embedding: ids or (ids, offsets)} of a batch, what its forward will look up.
    Raises ConfigError where it gives something else.
    """
    waiting: deque[tuple[Batch, Announced]] = deque()
    source, error = iter(batches), None
    try:
        while True:
            try:
                batch = next(source)
                announced = _announce(look_ups(batch), num_batches)
            except StopIteration:
                break
            except Exception as failure:
                error = failure  # what was delivered before is trained first, as without this
                break
            waiting.append((batch, announced))
            if len(waiting) > max(num_batches, 1):
                yield waiting[0][0]
                _forget(waiting.popleft()[1])
        while waiting:
            yield waiting[0][0]
            _forget(waiting.popleft()[1])
    finally:
        for _, announced in waiting:
            for embedding, expected in announced:
                embedding.forget_expected(expected)
    if error is not None:
        raise error


_told: set[str] = set()
"""Tables of which it was said that an announced look-up was not made."""


def _forget(announced: Announced) -> None:
    """Forget what a batch announced and did not look up; say so once per table."""
    for embedding, expected in announced:
        unused = embedding.forget_expected(expected) and expected.rows is not None
        if unused and embedding.name not in _told:
            _told.add(embedding.name)
            get_logger().warning(
                "table %r: a look-up announced to fleet.pull_ahead was not made by the training of "
                "its batch; its rows were pulled for nothing",
                embedding.name,
            )


def _announce(look_ups: Mapping[Any, Any], num_batches: int) -> Announced:
    if not isinstance(look_ups, Mapping):
        raise ConfigError(
            f"look_ups gave a {type(look_ups).__name__}; give a dict {{embedding: ids}}"
        )
    expected = []
    for embedding, ids in look_ups.items():
        if not hasattr(embedding, "expect"):
            raise ConfigError(
                f"look_ups names {embedding!r:.100}; use fleet.SparseEmbedding modules as keys"
            )
        what = ids if isinstance(ids, tuple) else (ids, None)
        announced = embedding.expect(*what, num_steps=num_batches)
        expected.append((embedding, announced))
    return expected
