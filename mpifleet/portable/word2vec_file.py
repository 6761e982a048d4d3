"""Vectors by word in the two formats of the word2vec tool, as it and gensim read and write them.

Both begin with "N D\\n", the numbers of words and of elements.  Text: a line per word, word and
numbers with single spaces.  Binary: the word, a space, D float32 (little-endian) and a newline,
which some writers leave out.  Words are bytes, without spaces and newlines.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from mpifleet.errors import CheckpointError, ConfigError, DataError
from mpifleet.partition import pieces

Block = tuple[list[bytes], np.ndarray]
"""Words, and their rows [n, D]."""
READ_BYTES = 16 << 20
MAX_WORD_BYTES = 1 << 16
_LINES_AT_ONCE_BYTES = 4 << 20
_VALUES_AT_ONCE = 1 << 17


def write_vectors(
    file: BinaryIO,
    binary: bool,
    count: int,
    dim: int,
    blocks: Iterable[Block],
    told: Callable[[int], object] | None = None,
) -> None:
    """Write `count` words with rows of `dim` floats. Memory: one block, several times in text.

    Text has as many digits as give the same bits again.  told: called with bytes of rows.
    Raises ConfigError for a word that the format cannot hold or, in binary, rows of float64.
    """
    file.write(f"{count} {dim}\n".encode())
    done = 0
    for words, rows in blocks:
        check_words(words)
        if binary and rows.dtype != np.float32:
            raise ConfigError(f"rows are {rows.dtype}, the binary format has float32; use text")
        file.write(_binary(words, rows) if binary else _text(words, rows))
        done += len(words)
        if told is not None:
            told(rows.nbytes)
    if done != count:
        raise CheckpointError(f"{done} words were written, {count} announced")


def check_words(words: list[bytes]) -> None:
    """Raise ConfigError naming a word that is empty or holds white space."""
    # One split of all of them: it gives as many words as there were only where all are whole.
    if b"\n".join(words).split() != words:
        odd = next(word for word in words if word.split() != [word])
        raise ConfigError(f"{_shown(odd)} cannot be a word: use no empty ones and no white space")


def _text(words: list[bytes], rows: np.ndarray) -> bytes:
    """Formatted in pieces, each by one call; so many digits always give the same bits again."""
    number = b"%.9g" if rows.dtype == np.float32 else b"%.17g"
    line = b" ".join([b"%b", *[number] * rows.shape[1]]) + b"\n"
    at_once = max(1, _VALUES_AT_ONCE // max(1, rows.shape[1]))
    texts = []
    for start, stop in pieces(len(words), at_once):
        columns = [words[start:stop], *rows[start:stop].T.tolist()]
        cells = itertools.chain.from_iterable(zip(*columns, strict=True))
        texts.append(line * (stop - start) % tuple(cells))
    return b"".join(texts)


def _binary(words: list[bytes], rows: np.ndarray) -> bytes:
    little = np.ascontiguousarray(rows, "<f4")
    width = little.shape[1] * 4
    vectors = little.view(f"V{width}").reshape(-1).tolist() if width else [b""] * len(words)
    starts = [word + b" " for word in words]
    records = zip(starts, vectors, itertools.repeat(b"\n"), strict=False)
    return b"".join(itertools.chain.from_iterable(records))


class VectorFile:
    """An open file of vectors: `count` words with rows of `dim`; a context manager.

    Raises DataError, naming file and place, where it is not what the format says.
    """

    def __init__(self, path: Path, binary: bool) -> None:
        self.path, self._binary = path, binary
        try:
            self._file = open(path, "rb")  # noqa: SIM115 -- closed by __exit__
        except OSError as cause:
            raise DataError(f"{path} cannot be read: {cause.strerror}") from cause
        try:
            head = self._file.readline(100).split()
            self.count, self.dim = (int(number) for number in head)
            if self.count < 0 or self.dim < 1:
                raise ValueError(head)
        except ValueError as cause:
            self._file.close()
            raise DataError(
                f"{path}: line 1 must be two numbers, of words and of elements; it is {head!r:.60}"
            ) from cause

    def __enter__(self) -> VectorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def blocks(self) -> Iterator[Block]:
        """All words with their rows, float32 in binary and float64 in text, in pieces."""
        try:
            yield from self._binary_blocks() if self._binary else self._text_blocks()
        except OSError as cause:
            raise DataError(f"{self.path} cannot be read: {cause.strerror}") from cause

    def _text_blocks(self) -> Iterator[Block]:
        done, at_once = 0, max(1, _LINES_AT_ONCE_BYTES // (12 * self.dim))
        while lines := list(itertools.islice(self._file, at_once)):
            first = done + 2
            while done + len(lines) > self.count and not lines[-1].strip():
                lines.pop()  # blank lines at the end
            if not lines:
                continue
            cells = list(map(bytes.split, lines))
            lengths = np.fromiter(map(len, cells), np.int64, len(cells))
            odd = np.flatnonzero(lengths != self.dim + 1)
            if odd.size:
                raise DataError(
                    f"{self.path}: line {first + odd[0]} has {lengths[odd[0]]} parts, not a word "
                    f"and {self.dim} numbers"
                )
            done += len(lines)
            if done > self.count:
                break
            yield [row[0] for row in cells], self._numbers(cells, first)
        if done != self.count:
            raise DataError(
                f"{self.path} has {'more' if done > self.count else done} words, its first line "
                f"says {self.count}"
            )

    def _numbers(self, cells: list[list[bytes]], first_line: int) -> np.ndarray:
        flat = b" ".join(itertools.chain.from_iterable(row[1:] for row in cells))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # what numpy cannot read it only warns of
            try:
                return np.fromstring(flat.decode("ascii"), np.float64, sep=" ").reshape(
                    len(cells), self.dim
                )
            except (ValueError, DeprecationWarning) as cause:
                line = first_line + next(n for n, row in enumerate(cells) if not _are_numbers(row))
                raise DataError(f"{self.path}: line {line} holds what is no number") from cause

    def _binary_blocks(self) -> Iterator[Block]:
        rest, done = b"", 0
        while done < self.count:
            data = self._file.read(READ_BYTES)
            buffer = rest + data
            words, starts, end = self._records(buffer, self.count - done)
            if not words and not data:
                raise DataError(
                    f"{self.path} ends inside word {done + 1} of {self.count}: it was cut, or its "
                    "vectors are not float32"
                )
            if not words and len(buffer) > MAX_WORD_BYTES + 4 * self.dim + READ_BYTES:
                raise DataError(f"{self.path}: word {done + 1} has no end; is the file binary?")
            done += len(words)
            rest = buffer[end:]
            if words:
                windows = sliding_window_view(np.frombuffer(buffer, np.uint8), 4 * self.dim)
                rows = windows[starts].view("<f4")
                yield words, rows.astype(np.float32, copy=False)
        if (rest + self._file.read(64)).strip(b"\n"):
            raise DataError(f"{self.path} goes on after its {self.count} words")

    def _records(self, buffer: bytes, most: int) -> tuple[list[bytes], list[int], int]:
        """Whole records of the buffer: words, where their vectors begin, and where the rest does.

        A loop over words: where a record begins is only known when the one before was read.
        """
        words: list[bytes] = []
        starts: list[int] = []
        position, width, find = 0, 4 * self.dim, buffer.find
        while len(words) < most:
            space = find(b" ", position)
            if space < 0 or space + 1 + width > len(buffer):
                break
            words.append(buffer[position:space].lstrip(b"\n"))
            starts.append(space + 1)
            position = space + 1 + width
        return words, starts, position


def _are_numbers(cells: list[bytes]) -> bool:
    try:
        return bool([float(cell) for cell in cells[1:]])
    except ValueError:
        return False


def read_words(path: Path) -> list[bytes]:
    """The words of a vocabulary file, one a line: the word of line i, from 0, is that of key i.

    What follows a word on its line (word2vec writes its count) is not looked at.  Raises DataError
    for an empty line or a word that stands twice.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as cause:
        raise DataError(f"{path} cannot be read: {cause.strerror}") from cause
    parts = [line.split(maxsplit=1) for line in lines]
    if not all(parts):
        raise DataError(f"{path}: line {parts.index([]) + 1} has no word")
    words = [part[0] for part in parts]
    if len(set(words)) < len(words):
        seen: set[bytes] = set()
        for number, word in enumerate(words, 1):
            if word in seen:
                raise DataError(f"{path}: line {number} has {_shown(word)} a second time")
            seen.add(word)
    return words


def _shown(word: bytes) -> str:
    return repr(word.decode("utf-8", "backslashreplace"))
