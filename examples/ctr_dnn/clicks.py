"""The three data sets of the example, cut into one share of batches per worker."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from mpifleet.data import criteo, criteo_synthetic, movielens
from mpifleet.data.one_at_a_time import one_at_a_time
from mpifleet.data.samples import Samples
from mpifleet.errors import DataError
from mpifleet.partition import file_shard

TABLE_ROWS = {"movielens": 65_536, "criteo": criteo.HASH_DIM, "synthetic": criteo.HASH_DIM}
DATA_DIRS = {"movielens": "ml-100k", "criteo": "criteo", "synthetic": "criteo-synthetic"}
MAKE_LIMIT_S = 600.0
TEST_BATCH = 2_000  # the same in every job, so that the same sums are made whoever evaluates

Batch = TypeVar("Batch")


class Share(NamedTuple):
    """Worker `index` of `count`."""

    index: int
    count: int


class Clicks(Protocol):
    """Training and held-out samples."""

    is_exact: bool
    """Whether num_train() is the very number."""

    def num_train(self) -> int | None:
        """Training samples of all workers in an epoch, about; None if that cannot be told."""

    def train(self, epoch: int, batch_size: int, share: Share) -> Iterator[Samples]:
        """This worker's batches of an epoch."""

    def test(self, share: Share) -> Iterator[Samples]:
        """This worker's batches of the held-out samples; together each sample once."""


def prepare(data: str, directory: Path) -> None:
    """Make the files of a data set, unless they are there.

    Call it on every rank before fleet.init(): it may start pip, and no process may be started from
    a rank once MPI runs.  Of the ranks that see the same directory one makes the files.
    """
    last_made = directory / "test" / "part-0.txt"
    if data == "movielens":
        movielens.fetch(directory)
    elif data == "synthetic" and not last_made.is_file():
        with one_at_a_time(directory, MAKE_LIMIT_S):
            if not last_made.is_file():
                criteo_synthetic.write_dataset(directory, rows=200_000, files=4, seed=0)


def open_clicks(data: str, directory: Path, seed: int) -> Clicks:
    """The data set in a prepared directory."""
    if data == "movielens":
        return InMemory(movielens.load(directory, seed), seed)
    return InFiles(_files(directory / "train"), _files(directory / "test"))


class InMemory:
    """Whole arrays, in a new order every epoch."""

    is_exact = True

    def __init__(self, samples: movielens.MovieLens, seed: int) -> None:
        if samples.num_ids > TABLE_ROWS["movielens"]:
            raise DataError(f"{samples.num_ids} ids; the table has {TABLE_ROWS['movielens']} rows")
        self._samples = samples
        self._seed = seed

    def num_train(self) -> int | None:
        """See Clicks."""
        return self._samples.train.num_samples

    def train(self, epoch: int, batch_size: int, share: Share) -> Iterator[Samples]:
        """See Clicks."""
        order = np.random.default_rng([self._seed, epoch]).permutation(self.num_train())
        rounds = deal(range(0, order.size, batch_size), share)
        return (self._samples.train.rows(order[at : at + batch_size]) for at in rounds)

    def test(self, share: Share) -> Iterator[Samples]:
        """See Clicks."""
        starts = range(0, self._samples.test.num_samples, TEST_BATCH)
        rows = (slice(at, at + TEST_BATCH) for at in starts[share.index :: share.count])
        return (self._samples.test.rows(picked) for picked in rows)


class InFiles:
    """Criteo text, read ahead of training in a thread."""

    is_exact = False

    def __init__(self, train_files: Sequence[str], test_files: Sequence[str]) -> None:
        self._train_files = train_files
        self._test_files = test_files

    def num_train(self) -> int | None:
        """See Clicks. Judged by file sizes and the first lines."""
        if any(name.endswith(".gz") for name in self._train_files):
            return None
        with open(self._train_files[0], "rb") as stream:
            first = stream.read(1 << 16)
        size_bytes = sum(Path(name).stat().st_size for name in self._train_files)
        return size_bytes * first.count(b"\n") // max(len(first), 1)

    def train(self, epoch: int, batch_size: int, share: Share) -> Iterator[Samples]:
        """See Clicks. Whole files per worker where there are enough, else single batches."""
        order = np.random.default_rng(epoch).permutation(len(self._train_files))
        files = [self._train_files[position] for position in order]
        if share.count <= len(files):
            mine = file_shard(files, share.index, share.count)
            yield from _read(mine, batch_size, lambda batches: batches)
        else:
            yield from _read(files, batch_size, lambda batches: deal(batches, share))

    def test(self, share: Share) -> Iterator[Samples]:
        """See Clicks."""
        return _read(self._test_files, TEST_BATCH, lambda batches: deal(batches, share))


def deal(batches: Iterable[Batch], share: Share) -> Iterator[Batch]:
    """Batch k goes to worker k % count; shares differ by one batch at most."""
    return itertools.islice(batches, share.index, None, share.count)


def _read(
    files: Sequence[str],
    batch_size: int,
    pick: Callable[[Iterable[Samples]], Iterable[Samples]],
) -> Iterator[Samples]:
    with criteo.read_criteo(files, batch_size) as ahead:
        yield from pick(ahead)


def _files(directory: Path) -> list[str]:
    names = sorted(str(path) for path in directory.glob("[!.]*") if path.is_file())
    if not names:
        raise DataError(f"{directory}: no files; put Criteo text files into its train and test")
    return names
