"""Which rows of a server's sparse tables were written since its job saved a base or a delta."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mpifleet.checkpoint import Link
from mpifleet.partition import pieces

_MARKS_AT_ONCE = 16 << 20


@dataclass(frozen=True)
class Since:
    """The checkpoint after which rows count as changed.

    link: on the first server, once it is there; None elsewhere.
    """

    directory: Path
    link: Link | None = None


class ChangedRows:
    """Marks rows; a shard has none until a base is saved or loaded, and pays nothing till then.

    num_rows: of each table on this server.  Memory: one byte per row; zeros take none until the
    page they lie in is marked.
    """

    def __init__(self, num_rows: Sequence[int], since: Since) -> None:
        self.since = since
        self._marks = [np.zeros(count, np.bool_) for count in num_rows]

    def mark(self, table: int, rows: np.ndarray | slice) -> None:
        """These rows of a table are written. rows: int64 [n], or a range. O(n)."""
        self._marks[table][rows] = True

    def rows(self, table: int, breathe: Callable[[], None]) -> np.ndarray:
        """The marked rows of a table, int64, ascending. breathe: called between slices."""
        found = [np.empty(0, np.int64)]
        marks = self._marks[table]
        for start, stop in pieces(marks.size, _MARKS_AT_ONCE):
            found.append(np.flatnonzero(marks[start:stop]) + start)
            breathe()
        return np.concatenate(found)

    def add(self, other: "ChangedRows") -> None:
        """Mark what is marked there too."""
        for ours, theirs in zip(self._marks, other._marks, strict=True):
            ours |= theirs
