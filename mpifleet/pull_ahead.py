"""Rows of coming batches, asked for before they are needed."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from mpifleet.errors import ConfigError
from mpifleet.ps.rows_pull import PulledRows

Batch = TypeVar("Batch")
Plan = TypeVar("Plan")


@dataclass(frozen=True)
class Expected(Generic[Plan]):
    """A look-up that is to come: its ids, how its rows become its output, and the rows."""

    ids: Tensor
    offsets: Tensor | None
    plan: Plan
    rows: PulledRows

    def is_for(self, ids: Tensor, offsets: Tensor | None) -> bool:
        """Whether a look-up is this one. Compares ids, unless they are the same tensor."""
        return _same(self.ids, ids) and _same(self.offsets, offsets)


def _same(left: Tensor | None, right: Tensor | None) -> bool:
    if left is right:
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
    told: set[Any] = set()
    waiting: deque[Batch] = deque()
    try:
        for batch in batches:
            if num_batches:
                told.update(_announce(look_ups(batch)))
            waiting.append(batch)
            if len(waiting) > num_batches:
                yield waiting.popleft()
        while waiting:
            yield waiting.popleft()
    finally:
        for embedding in told:
            embedding.expect_nothing()


def _announce(look_ups: Mapping[Any, Any]) -> Mapping[Any, Any]:
    if not isinstance(look_ups, Mapping):
        raise ConfigError(
            f"look_ups gave a {type(look_ups).__name__}; give a dict {{embedding: ids}}"
        )
    for embedding, ids in look_ups.items():
        if not hasattr(embedding, "expect"):
            raise ConfigError(
                f"look_ups names {embedding!r:.100}; use fleet.SparseEmbedding modules as keys"
            )
        embedding.expect(*(ids if isinstance(ids, tuple) else (ids,)))
    return look_ups
