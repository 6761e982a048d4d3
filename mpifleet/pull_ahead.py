"""Rows of coming batches, asked for before they are needed."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from mpifleet.errors import ConfigError
from mpifleet.log import get_logger
from mpifleet.ps.rows_pull import PulledRows

Batch = TypeVar("Batch")
Plan = TypeVar("Plan")
Announced = list[tuple[Any, Any]]
"""Embeddings, each with a look-up that it expects."""


@dataclass(frozen=True)
class Expected(Generic[Plan]):
    """A look-up that is to come: a copy of its ids, how its rows become its output, the rows."""

    ids: Tensor
    offsets: Tensor | None
    plan: Plan
    rows: PulledRows

    def is_for(self, ids: Tensor, offsets: Tensor | None) -> bool:
        """Whether a look-up is this one, by its ids: a tensor may have changed meanwhile."""
        return _same(self.ids, ids) and _same(self.offsets, offsets)


def _same(left: Tensor | None, right: Tensor | None) -> bool:
    if left is None and right is None:
        return True
    if left is None or right is None or left.dtype != right.dtype:
        return False
    return torch.equal(left, right.to(left.device))


class ExpectedLookUps(Generic[Plan]):
    """The look-ups of one table that are to come, in their order."""

    def __init__(self) -> None:
        self._queue: deque[Expected[Plan]] = deque()

    def add(self, expected: Expected[Plan]) -> None:
        """One more, after all others."""
        self._queue.append(expected)

    def take(self, ids: Tensor, offsets: Tensor | None) -> Expected[Plan] | None:
        """The look-up of these ids, and forget those before it; None where nobody expected it."""
        for number, expected in enumerate(self._queue):
            if expected.is_for(ids, offsets):
                for _ in range(number + 1):
                    self._queue.popleft()
                return expected
        return None

    def discard(self, expected: Expected[Plan]) -> bool:
        """Expect this look-up no more; whether it had not been taken."""
        if any(each is expected for each in self._queue):
            self._queue = deque(each for each in self._queue if each is not expected)
            return True
        return False

    def read_near(self) -> None:
        """Read what this rank can read itself for the look-up that comes next."""
        if self._queue:
            self._queue[0].rows.read_near()

    def clear(self) -> None:
        """Expect nothing any more."""
        self._queue.clear()


def ahead(
    batches: Iterable[Batch],
    look_ups: Callable[[Batch], Mapping[Any, Any]],
    num_batches: int,
) -> Iterator[Batch]:
    """The same batches; `num_batches` before its turn each one's look-ups are announced.

    look_ups: gives {embedding: ids or (ids, offsets)} of a batch, what its forward will look up.
    Raises ConfigError where it gives something else.
    """
    waiting: deque[tuple[Batch, Announced]] = deque()
    forget = _Forget()
    try:
        for batch in batches:
            waiting.append((batch, _announce(look_ups(batch)) if num_batches else []))
            if len(waiting) > num_batches:
                yield waiting[0][0]
                forget(waiting.popleft()[1])
        while waiting:
            yield waiting[0][0]
            forget(waiting.popleft()[1])
    finally:
        for _, announced in waiting:
            for embedding, expected in announced:
                embedding.forget_expected(expected)


class _Forget:
    """Forgets what a batch announced and did not look up; says so once."""

    def __init__(self) -> None:
        self._has_told = False

    def __call__(self, announced: Announced) -> None:
        unused = [e for e, expected in announced if e.forget_expected(expected)]
        if unused and not self._has_told:
            self._has_told = True
            get_logger().warning(
                "table %r: a look-up announced to fleet.pull_ahead was not made by the training of "
                "its batch; its rows were pulled for nothing",
                unused[0].name,
            )


def _announce(look_ups: Mapping[Any, Any]) -> Announced:
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
        announced = embedding.expect(*(ids if isinstance(ids, tuple) else (ids,)))
        expected.append((embedding, announced))
    return expected
