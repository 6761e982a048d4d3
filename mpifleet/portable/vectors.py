"""A table's rows as vectors by word, out of a table and back into one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mpifleet.errors import ConfigError, DataError
from mpifleet.portable.sources import TableSource
from mpifleet.portable.word2vec_file import (
    Block,
    VectorFile,
    check_words,
    read_words,
    write_vectors,
)
from mpifleet.portable.written_file import replacing

Told = Callable[[int], object]
_FIRST_SHOWN = 5
_KEY_DIGITS = 18


def export_vectors(
    path: Path,
    table: TableSource,
    binary: bool,
    vocab: Path | None = None,
    told: Told | None = None,
) -> int:
    """Write rows in word2vec's format and return how many.

    vocab: the word of key k is that on its line k, and only keys with a word are written; without
    it all are, key k under the word "k".  Memory: the words, one piece of rows.
    Raises ConfigError, DataError for the vocabulary, CheckpointError.
    """
    words = None if vocab is None else _words_of(vocab, table)
    count = table.num_rows if words is None else len(words)

    def blocks() -> Iterator[Block]:
        for keys, rows in table.blocks(np.arange(count)):
            first, last = int(keys[0]), int(keys[-1]) + 1
            own = _decimal(first, last) if words is None else words[first:last]
            yield own, rows

    with replacing(path) as file:
        write_vectors(file, binary, count, table.dim, blocks(), told)
    return count


def _decimal(first: int, last: int) -> list[bytes]:
    return np.arange(first, last).astype("S20").tolist()


def _words_of(vocab: Path, table: TableSource) -> list[bytes]:
    words = read_words(vocab)
    if len(words) > table.num_rows:
        raise ConfigError(
            f"{vocab} has {len(words):,} words, table {table.name!r} has {table.num_rows:,} rows"
        )
    check_words(words)
    return words


@dataclass(frozen=True)
class VectorsReport:
    """What became of a file's words.

    taken: rows that were set.  unknown: words that the vocabulary lacks (or that are no key).
    repeated: words that had stood before; the first counts.  missing: words of the vocabulary that
    the file lacks.  first_missing: some of them.
    """

    taken: int
    unknown: int
    repeated: int
    missing: int
    first_missing: tuple[str, ...]

    def text(self) -> str:
        """One line."""
        parts = [f"{self.taken:,} rows taken"]
        if self.missing:
            some = ", ".join(map(repr, self.first_missing))
            more = ", ..." if self.missing > len(self.first_missing) else ""
            parts.append(f"{self.missing:,} words not found ({some}{more})")
        if self.unknown:
            parts.append(f"{self.unknown:,} words of the file not wanted")
        if self.repeated:
            parts.append(f"{self.repeated:,} repeated words left out")
        return "; ".join(parts)


@dataclass(frozen=True)
class ReadVectors:
    """rows: [num_rows, dim]; is_taken: bool [num_rows], the rows that the file had."""

    rows: np.ndarray
    is_taken: np.ndarray
    report: VectorsReport


def read_vectors(
    path: Path,
    binary: bool,
    num_rows: int,
    dim: int,
    dtype: str,
    vocab: Path | None = None,
    told: Told | None = None,
) -> ReadVectors:
    """Read vectors for a table of `num_rows` rows. Memory: all rows, and the vocabulary.

    vocab: line k has the word of key k; without it a word must be a key in decimal.
    Raises DataError for a damaged file or another dimension, ConfigError for too long a vocabulary.
    """
    words = None if vocab is None else read_words(vocab)
    if words is not None and len(words) > num_rows:
        raise ConfigError(f"{vocab} has {len(words):,} words, the table has {num_rows:,} rows")
    key_of = None if words is None else dict(zip(words, itertools.count(), strict=False))
    rows, is_taken = np.zeros((num_rows, dim), dtype), np.zeros(num_rows, bool)
    unknown = repeated = 0
    with VectorFile(path, binary) as file:
        if file.dim != dim:
            raise DataError(f"{path} has vectors of {file.dim} elements, the table rows of {dim}")
        for block, values in file.blocks():
            keys = _keys(block, key_of, num_rows)
            places = np.flatnonzero(keys >= 0)
            unknown += keys.size - places.size
            distinct, first = np.unique(keys[places], return_index=True)
            is_new = ~is_taken[distinct]
            repeated += int(places.size - is_new.sum())
            rows[distinct[is_new]] = values[places[first[is_new]]]
            is_taken[distinct[is_new]] = True
            if told is not None:
                told(values.nbytes)
    return ReadVectors(
        rows, is_taken, _report(is_taken, num_rows if words is None else words, unknown, repeated)
    )


def _keys(words: list[bytes], key_of: dict[bytes, int] | None, num_rows: int) -> np.ndarray:
    """The key of each word, -1 for those without."""
    if key_of is not None:
        known = map(key_of.get, words, itertools.repeat(-1))
        return np.fromiter(known, np.int64, len(words))
    # Nothing but "0" or digits without a leading zero: one key has one word.
    lengths = np.fromiter(map(len, words), np.int64, len(words))
    texts = np.array(words, f"S{_KEY_DIGITS}")  # the rest of a longer one is cut off
    is_key = np.char.isdigit(texts) & (np.char.str_len(texts) == lengths)
    is_key &= (lengths == 1) | ~np.char.startswith(texts, b"0")
    keys = np.where(is_key, texts, b"-1").astype(np.int64)
    return np.where(keys < num_rows, keys, -1)


def _report(
    is_taken: np.ndarray, words: list[bytes] | int, unknown: int, repeated: int
) -> VectorsReport:
    wanted = words if isinstance(words, int) else len(words)
    missing = np.flatnonzero(~is_taken[:wanted])
    some = missing[:_FIRST_SHOWN].tolist()
    shown = [
        str(key) if isinstance(words, int) else words[key].decode("utf-8", "backslashreplace")
        for key in some
    ]
    return VectorsReport(int(is_taken.sum()), unknown, repeated, missing.size, tuple(shown))
