"""Columns of tab-separated text as arrays, without a Python loop over lines.

A block of lines is one byte array.  Separators give the start and the length of every field; the
8 bytes that end a field are read as one 64-bit word, and the digits in it are combined with
shifts: 4 operations turn 8 digits into a number, for all fields at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpifleet.errors import DataError

__all__ = ["Fields", "check_columns", "hex_words", "integers", "line_fields"]

_PAD_BYTES = 16  # so that the two words before the end of the first field can be read
_NOT_A_DIGIT = 0x80
_TAB, _NEWLINE, _RETURN, _MINUS = b"\t\n\r-"
MAX_DIGITS = 15


def _digit_table() -> bytes:
    table = bytearray([_NOT_A_DIGIT]) * 256
    for digits in (b"0123456789abcdef", b"0123456789ABCDEF"):
        for value, digit in enumerate(digits):
            table[digit] = value
    return bytes(table)


_DIGIT_VALUE = _digit_table()
_EVERY_BYTE = np.uint64(0x0101010101010101)


class Fields(NamedTuple):
    """Where the fields of the leading well-formed lines of a block stand.

    text: uint8, the padded block.  starts, lengths: int64 [lines, columns], into `text`.
    words: uint64, for every offset into `text` the values of the 8 digits from there on.
    wrong_columns: number of columns of the first line that has not `columns`, or None.
    """

    text: NDArray[np.uint8]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    words: NDArray[np.uint64]
    wrong_columns: int | None


def line_fields(block: bytes, columns: int) -> Fields:
    """Fields of whole lines, up to the first line with another number of columns.

    Only the last line may lack its newline.
    """
    end = b"" if block.endswith(b"\n") or not block else b"\n"
    padded = b"".join([bytes(_PAD_BYTES), block, end])
    text = np.frombuffer(padded, np.uint8)
    # Overlapping words, one per byte offset: a view, only what is picked gets copied.
    words: NDArray[np.uint64] = np.ndarray(
        (len(padded) - 7,), "<u8", padded.translate(_DIGIT_VALUE), strides=(1,)
    )
    is_newline = text == _NEWLINE
    ends = np.flatnonzero(is_newline | (text == _TAB))
    at_newline = is_newline[ends]
    line_ends = np.flatnonzero(at_newline)
    columns_of = np.diff(line_ends, prepend=-1)
    wrong = np.flatnonzero(columns_of != columns)
    lines = int(wrong[0]) if wrong.size else line_ends.size
    ends = ends[: lines * columns]
    starts = np.empty_like(ends)
    starts[:1] = _PAD_BYTES
    starts[1:] = ends[:-1] + 1
    lengths = ends - starts
    # Lines of some systems end in "\r\n".
    last = slice(columns - 1, None, columns)
    lengths[last] -= (lengths[last] > 0) & (text[ends[last] - 1] == _RETURN)
    shape = (lines, columns)
    wrong_columns = int(columns_of[lines]) if wrong.size else None
    return Fields(text, starts.reshape(shape), lengths.reshape(shape), words, wrong_columns)


def integers(
    fields: Fields, columns: slice
) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]:
    """Decimal integers of up to 15 digits with an optional minus sign, 0 where blank.

    Returns (values int64, blank bool, ok bool), each [lines, columns]; blanks are ok.
    """
    starts, lengths = fields.starts[:, columns], fields.lengths[:, columns]
    blank = lengths == 0
    negative = ~blank & (fields.text[starts] == _MINUS)
    digits = lengths - negative
    values, ok = _decimal(fields.words, starts + lengths, np.minimum(digits, 8))
    if digits.size and digits.max() > 8:
        high, high_ok = _decimal(fields.words, starts + lengths - 8, np.clip(digits - 8, 0, 8))
        values += 100_000_000 * high
        ok &= high_ok
    ok &= (digits >= 1) & (digits <= MAX_DIGITS) | blank
    return np.where(negative, -values, values), blank, ok


def hex_words(
    fields: Fields, columns: slice
) -> tuple[NDArray[np.uint64], NDArray[np.bool_], NDArray[np.bool_]]:
    """The 32-bit numbers that fields of exactly 8 hex digits spell, 0 where blank.

    Returns (words uint64, blank bool, ok bool), each [lines, columns]; blanks are ok.
    """
    starts, lengths = fields.starts[:, columns], fields.lengths[:, columns]
    blank = lengths == 0
    digits = _last_digits(fields.words, starts + lengths, np.minimum(lengths, 8))
    bad = digits & (_EVERY_BYTE * np.uint64(_NOT_A_DIGIT))
    return _combine(digits, (16, 256, 65_536)), blank, ((bad == 0) & (lengths == 8)) | blank


def check_columns(
    fields: Fields,
    ok: NDArray[np.bool_],
    names: Sequence[str],
    expected: Sequence[str],
    path: str,
    first_line: int,
) -> None:
    """Raise DataError for the first broken field of a block, or for its broken line.

    ok: bool [lines, columns].  names, expected: per column, for the message.
    """
    if not ok.all():
        line, column = divmod(int(np.argmin(ok)), ok.shape[1])
        start, length = (
            int(fields.starts[line, column]),
            int(fields.lengths[line, column]),
        )
        found = fields.text[start : start + min(length, 40)].tobytes()
        raise DataError(
            f"{path}:{first_line + line}: column {names[column]} holds "
            f"{found.decode('ascii', 'backslashreplace')!r}; expected {expected[column]}"
        )
    if fields.wrong_columns is not None:
        raise DataError(
            f"{path}:{first_line + len(ok)}: {fields.wrong_columns} columns; expected {len(names)} "
            f"({names[0]}, {names[1]}..{names[-1]}, tab-separated)"
        )


def _decimal(
    words: NDArray[np.uint64], ends: NDArray[np.int64], lengths: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Numbers of the `lengths` <= 8 digits before `ends`, and whether all are 0..9."""
    digits = _last_digits(words, ends, lengths)
    # A decimal digit plus 0x76 stays below 0x80; a..f and _NOT_A_DIGIT set the top bit.
    top_bits = (digits + _EVERY_BYTE * np.uint64(0x76)) | digits
    bad = top_bits & (_EVERY_BYTE * np.uint64(0x80))
    return _combine(digits, (10, 100, 10_000)).view(np.int64), bad == 0


def _last_digits(
    words: NDArray[np.uint64], ends: NDArray[np.int64], lengths: NDArray[np.int64]
) -> NDArray[np.uint64]:
    """The `lengths` <= 8 digits before `ends`, the last one in the top byte, zeros before them."""
    # What stands before the field is in the low bytes.  Two shifts: one by 64 is undefined.
    half = (4 * (8 - lengths)).astype(np.uint64)
    keep = (~np.uint64(0) << half) << half
    return words[ends - 8].astype(np.uint64) & keep


def _combine(words: NDArray[np.uint64], bases: tuple[int, int, int]) -> NDArray[np.uint64]:
    """Pairs of digits, then of pairs, then of fours; the earlier one weighs `base` more."""
    for bits, base in zip((8, 16, 32), bases, strict=True):
        mask = np.uint64(sum(((1 << bits) - 1) << at for at in range(0, 64, 2 * bits)))
        words = (words & mask) * np.uint64(base) + ((words >> np.uint64(bits)) & mask)
    return words
