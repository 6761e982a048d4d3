"""Opening a checkpoint to read it; a delta is read together with all that it follows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np

from mpifleet.checkpoint.chain import about_of, members
from mpifleet.checkpoint.digests import check
from mpifleet.checkpoint.directory import is_checkable, newest
from mpifleet.checkpoint.layout import SparseShape
from mpifleet.checkpoint.reader import Checkpoint, open_file
from mpifleet.errors import CheckpointError
from mpifleet.partition import pieces


def open_checkpoint(path: str | os.PathLike[str], checked: bool = False) -> Checkpoint:
    """Open `path`, a checkpoint file or a directory of them, whose newest counts; with `with`.

    checked: its digests were looked at already, and those of all that it follows.  Raises
    CheckpointError where one of them is missing, truncated, damaged, incomplete, of another version
    or no checkpoint at all.
    """
    chain = members(newest(Path(path)))
    for where in chain:
        if is_checkable(where) and not checked:
            check(where)
    with ExitStack() as stack:
        earlier = [stack.enter_context(_open_one(where)) for where in chain[:-1]]
        found = _open_one(chain[-1], earlier)
        stack.pop_all()
    return found


def is_begun(where: Path) -> bool:
    """Whether there is anything that may be a checkpoint: False where training begins.

    True for a file, also one that is missing, as its name says what was meant.
    """
    if not where.is_dir():
        return where.exists() or where.suffix == ".h5"
    return any(where.glob("model*.h5"))


def _open_one(where: Path, earlier: list[Checkpoint] | None = None) -> Checkpoint:
    file = open_file(where)
    try:
        is_old = not is_checkable(where)
        found = Delta(file, where, earlier) if earlier else Checkpoint(file, where, is_old)
        if not is_old and found.about != about_of(where):
            raise CheckpointError(
                f"checkpoint {where} is {found.about}, its digests are of {about_of(where)}"
            )
        return found
    except BaseException:
        file.close()
        raise


class Delta(Checkpoint):
    """An open delta and what it follows: the tables as they were when it was written.

    Closing it closes all.  Memory: 8 bytes for each changed key of the tables read.
    """

    def __init__(self, file: h5py.File, path: Path, earlier: list[Checkpoint]) -> None:
        super().__init__(file, path, is_old=False)
        self._base = earlier[0]
        self._deltas = [*earlier[1:], self]
        self._changes: dict[str, list[Changes]] = {}
        for name in self.sparse_names:
            kept, own = _kept(self._base.stored(name)), _kept(self.stored(name))
            if kept != own:
                raise CheckpointError(
                    f"checkpoint {path} cannot follow {self._base.path}: table {name!r} is "
                    f"{own} there, {kept} here"
                )

    def close(self) -> None:
        """Close all files; may be called again."""
        super().close()
        for checkpoint in (self._base, *self._deltas[:-1]):
            checkpoint.close()

    @property
    def members(self) -> tuple[Path, ...]:
        """The files that it is read from, base first."""
        return (self._base.path, *(delta.path for delta in self._deltas))

    def sparse(self, name: str) -> SparseShape:
        """One sparse table without its rows, in the stretches of the base."""
        return replace(self._base.stored(name), attrs=self.stored(name).attrs)

    def read_rows(
        self, table: SparseShape, shard: int, first: int, out: Mapping[str, np.ndarray]
    ) -> None:
        """Read rows of one stretch: the base's, and over them those of each delta in order."""
        self._base.read_rows(table, shard, first, out)
        if table.name not in self._changes:
            self._changes[table.name] = [Changes(d, table.name) for d in self._deltas]
        for changes in self._changes[table.name]:
            changes.put_over(table, shard, first, out)


def _kept(table: SparseShape) -> tuple[object, ...]:
    """What stays the same from a base on."""
    return (table.num_rows, table.dim, table.dtype, table.state_names)


class Changes:
    """The changed rows of one table in one delta. Raises CheckpointError where keys are wrong."""

    def __init__(self, delta: Checkpoint, name: str) -> None:
        self._delta, self._table = delta, delta.stored(name)
        if self._table.stretches is None:
            raise CheckpointError(f"checkpoint {delta.path}: table {name!r} has no stretches")
        keys = np.empty(self._table.stored_rows, np.int64)
        delta.read_stored(name, 0, {"keys": keys})
        self._keys = np.split(keys, np.cumsum(self._table.stretches)[:-1])
        for stretch, part in enumerate(self._keys):
            self._check(stretch, part)

    def _check(self, stretch: int, keys: np.ndarray) -> None:
        is_right = not keys.size or (
            keys[0] >= 0
            and keys[-1] < self._table.num_rows
            and (np.diff(keys) > 0).all()
            and (keys % self._table.num_shards == stretch).all()
        )
        if not is_right:
            raise CheckpointError(
                f"checkpoint {self._delta.path}: the keys of stretch {stretch} of table "
                f"{self._table.name!r} are not its own, ascending"
            )

    def put_over(
        self, table: SparseShape, shard: int, first: int, out: Mapping[str, np.ndarray]
    ) -> None:
        """Replace the changed ones among rows of a stretch of another layout; see read_rows."""
        count = len(out["rows"])
        low = first * table.num_shards + shard
        high = (first + count) * table.num_shards + shard
        for stretch, keys in enumerate(self._keys):
            if self._table.num_shards == table.num_shards and stretch != shard:
                continue
            start, stop = np.searchsorted(keys, [low, high]).tolist()
            for begin, end in pieces(stop - start, max(1, count)):
                self._put(table, shard, first, stretch, slice(start + begin, start + end), out)

    def _put(
        self,
        table: SparseShape,
        shard: int,
        first: int,
        stretch: int,
        part: slice,
        out: Mapping[str, np.ndarray],
    ) -> None:
        keys = self._keys[stretch][part]
        mine = np.flatnonzero(keys % table.num_shards == shard)
        if not mine.size:
            return
        rows = keys[mine] // table.num_shards - first
        found = {slot: np.empty((keys.size, table.dim), table.dtype) for slot in out}
        start = self._table.first_row(stretch) + part.start
        self._delta.read_stored(table.name, start, found)
        for slot, values in found.items():
            out[slot][rows] = values[mine]
