"""One step's gradients as bytes: pure encoding and decoding, no communication.

A message is a list of sections, each an array that starts on a cache line. A lane carries it behind
a header of int64 words. Nothing is copied while encoding: the sections are the caller's arrays.

Dense message, per dense table: hyper float64 [HYPER_SIZE], present uint8 [num_params],
gradient elements of the server's slice.
Rows message: counts int64 [2, num_sparse] (rows to this server, rows to all servers),
hyper float64 [num_sparse, HYPER_SIZE], then per sparse table: rows int64 [n] (distinct),
gradients [n, dim].
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpifleet.partition import align
from mpifleet.ps.rule_spec import HYPER_SIZE
from mpifleet.ps.spec import ShardLayout, TableSpecs

NO_VERSION = -1
"""In a header: what it says depends on no version of the tables, or on an unknown one."""
HEADER_WORDS = 8
HEADER_BYTES = HEADER_WORDS * 8


class Kind(enum.IntEnum):
    """What a lane carries."""

    STEP = 1
    STOP = 2
    PULL_ROWS = 3
    PULL_DENSE = 4
    SAVE = 5
    LOAD = 6
    PAUSE = 7
    RESUME = 8


class Word(enum.IntEnum):
    """Where the words of a Header stand."""

    KIND = 0
    STEP = 1
    ARGUMENT = 2
    TOTAL_BYTES = 3
    START = 4
    NUM_BYTES = 5
    VERSION = 6


@dataclass(frozen=True)
class Header:
    """First words of a lane: what it is, of which step, and which piece of how much.

    argument: what the kind needs, for instance a table number.  total_bytes: the whole message;
    start: where this piece begins in it; num_bytes: of this piece.
    version: of a push, the count of updates in the tables that it was computed from; of the answer
    to a pull, that of the tables it was read from.
    """

    kind: Kind
    step: int
    argument: int
    total_bytes: int
    start: int
    num_bytes: int
    version: int = NO_VERSION

    def encode(self) -> np.ndarray:
        """int64 [HEADER_WORDS]."""
        words = np.zeros(HEADER_WORDS, np.int64)
        words[:7] = (
            self.kind, self.step, self.argument, self.total_bytes, self.start, self.num_bytes,
            self.version,
        )  # fmt: skip
        return words

    @classmethod
    def decode(cls, lane: np.ndarray) -> "Header":
        """From a lane's first bytes (uint8)."""
        kind, *rest = lane[:HEADER_BYTES].view(np.int64)[:7].tolist()
        return cls(Kind(kind), *rest)


Sections = list[tuple[int, np.ndarray]]
"""(byte offset within the message, C-contiguous array), in order."""


def lay_out(arrays: Sequence[np.ndarray]) -> tuple[Sections, int]:
    """Give every array its offset. Returns (sections, total_bytes)."""
    sections, offset = [], 0
    for array in arrays:
        sections.append((offset, array))
        offset += align(array.nbytes)
    return sections, offset


def join(sections: Sections, total_bytes: int) -> np.ndarray:
    """The message in one piece, uint8 [total_bytes]; copies."""
    whole = np.zeros(total_bytes, np.uint8)
    for offset, array in sections:
        whole[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
    return whole


class _Cursor:
    """Takes arrays off a message one after the other."""

    def __init__(self, message: np.ndarray) -> None:
        self._message = message
        self._offset = 0

    def take(self, dtype: np.dtype | type, count: int) -> np.ndarray:
        num_bytes = count * np.dtype(dtype).itemsize
        part = self._message[self._offset : self._offset + num_bytes].view(dtype)
        self._offset += align(num_bytes)
        return part


@dataclass(frozen=True)
class DenseGradient:
    """One dense table's part of a message: views, valid as long as the message is."""

    hyper: np.ndarray
    present: np.ndarray
    values: np.ndarray


@dataclass(frozen=True)
class RowsGradient:
    """One sparse table's part of a message: views, valid as long as the message is.

    num_pushed: rows of the whole push, on all servers together. Every server counts an update of
    the table where it is not 0, else the count would depend on which servers own the rows.
    """

    hyper: np.ndarray
    rows: np.ndarray
    values: np.ndarray
    num_pushed: int


def dense_arrays(
    layout: ShardLayout, hypers: np.ndarray, present: list[np.ndarray], flats: list[np.ndarray]
) -> list[np.ndarray]:
    """The arrays of a dense message for one server.

    hypers: float64 [num_dense, HYPER_SIZE]; present: uint8 [num_params] and flats: gradient
    [size], one per dense table.
    """
    arrays: list[np.ndarray] = []
    for table, part in enumerate(layout.dense):
        arrays += (hypers[table], present[table], flats[table][part.start : part.stop])
    return arrays


def decode_dense(layout: ShardLayout, message: np.ndarray) -> list[DenseGradient]:
    """The inverse of `dense_arrays`, one entry per dense table."""
    cursor = _Cursor(message)
    return [
        DenseGradient(
            cursor.take(np.float64, HYPER_SIZE),
            cursor.take(np.uint8, len(spec.params)),
            cursor.take(np.dtype(spec.dtype), part.stop - part.start),
        )
        for spec, part in zip(layout.specs.dense, layout.dense, strict=True)
    ]


def rows_arrays(
    hypers: np.ndarray,
    rows: list[np.ndarray],
    values: list[np.ndarray],
    num_pushed: list[int],
) -> list[np.ndarray]:
    """The arrays of a rows message for one server.

    hypers: float64 [num_sparse, HYPER_SIZE]; rows: int64 [n], values: [n, dim] and num_pushed, the
    rows for all servers, per sparse table.
    """
    counts = np.array([[part.size for part in rows], num_pushed], np.int64)
    arrays = [counts, hypers]
    for part, gradients in zip(rows, values, strict=True):
        arrays += (part, gradients)
    return arrays


def decode_rows(specs: TableSpecs, message: np.ndarray) -> list[RowsGradient]:
    """The inverse of `rows_arrays`, one entry per sparse table."""
    cursor = _Cursor(message)
    counts = cursor.take(np.int64, 2 * len(specs.sparse)).reshape(2, -1).T.tolist()
    hypers = cursor.take(np.float64, len(specs.sparse) * HYPER_SIZE).reshape(-1, HYPER_SIZE)
    parts = []
    for spec, (count, num_pushed), hyper in zip(specs.sparse, counts, hypers, strict=True):
        rows = cursor.take(np.int64, count)
        values = cursor.take(np.dtype(spec.dtype), count * spec.dim).reshape(count, spec.dim)
        parts.append(RowsGradient(hyper, rows, values, num_pushed))
    return parts
