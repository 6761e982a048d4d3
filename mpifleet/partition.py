"""Pure index arithmetic: who owns which piece of what. No communication, numpy only."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from mpifleet.errors import ConfigError, KeyRangeError, TableError

Item = TypeVar("Item")

ALIGN_BYTES = 64
CHUNK_BYTES = 1 << 20
"""About a millisecond of an update's arithmetic, with all the state that goes along."""
CHUNK_ROWS = 4096
"""Scattered rows cost by their number, however short: each may be the first touch of a page."""
_BLOCK = 16  # dense cuts fall on multiples of 16 elements: one cache line of float32


def align(num_bytes: int) -> int:
    """num_bytes rounded up to a whole number of cache lines."""
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def block(total: int, num_parts: int, part: int) -> tuple[int, int]:
    """Range [start, stop) of part `part` when `total` elements are cut evenly.

    Cuts fall on multiples of 16 elements, and parts differ by at most 16: the last block, which may
    be shorter, goes to a part that has one block more than others.
    """
    least, rest = divmod(-(-total // _BLOCK), num_parts)
    first, last = (n * least + max(0, n - (num_parts - rest)) for n in (part, part + 1))
    return min(first * _BLOCK, total), min(last * _BLOCK, total)


def owner(keys: np.ndarray, num_servers: int) -> tuple[np.ndarray, np.ndarray]:
    """Server and row of each key: key % num_servers, key // num_servers.

    keys: int64 [n], >= 0.  Returns (servers, rows), both int64 [n].
    """
    return keys % num_servers, keys // num_servers


def shard_rows(num_rows: int, num_servers: int, server: int) -> int:
    """How many of the keys 0..num_rows-1 server `server` owns."""
    return max(0, -(-(num_rows - server) // num_servers))


def shard_range(first: int, last: int, num_servers: int, server: int) -> slice:
    """Rows on server `server` of the keys [first, last)."""
    return slice(
        max(0, -(-(first - server) // num_servers)), max(0, -(-(last - server) // num_servers))
    )


def pieces(total: int, limit: int) -> Iterator[tuple[int, int]]:
    """Ranges [start, stop) of at most `limit` that cover `total`, in order."""
    for start in range(0, total, limit):
        yield start, min(start + limit, total)


def file_shard(files: Sequence[Item] | np.ndarray, index: int, count: int) -> list[Item]:
    """The contiguous share of `files` for worker `index` of `count`.

    The first len(files) % count workers get one more: 5 files over 2 workers are 3 and 2,
    2 files over 3 workers are 1, 1 and 0 (Fleet's split_files). An array of names is a list too.
    Raises ConfigError for what has no order, and for one name alone.
    """
    if isinstance(files, np.ndarray) and files.ndim == 1:
        files = files.tolist()
    if isinstance(files, str | bytes) or not isinstance(files, Sequence):
        shape = f" of shape {files.shape}" if isinstance(files, np.ndarray) else ""
        raise ConfigError(
            f"files = {files!r:.100} is of type {type(files).__name__}{shape}; use a list of names"
        )
    if not 0 <= index < count:
        raise ConfigError(f"worker index {index} is outside 0..{count - 1}")
    base, extra = divmod(len(files), count)
    start = index * base + min(index, extra)
    return list(files[start : start + base + (1 if index < extra else 0)])


def chunks(count: int, item_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges [start, stop) of items worked on between two looks at MPI: CHUNK_BYTES each."""
    return pieces(count, max(1, CHUNK_BYTES // item_bytes))


def row_chunk(row_bytes: int) -> int:
    """How many scattered rows are read or written between two looks at MPI."""
    return max(1, min(CHUNK_ROWS, CHUNK_BYTES // row_bytes))


@dataclass(frozen=True)
class UniqueKeys:
    """The distinct keys of one look-up, in server-major order, and the way back to positions.

    keys: int64 [u], distinct; rows: int64 [u], each key's row on its server, increasing there;
    bounds: int64 [num_servers + 1], keys[bounds[s]:bounds[s + 1]] live on server s;
    order: int64 [n], positions of the look-up sorted by key, stable;
    starts: int64 [u], where each key's positions begin in `order`;
    inverse: int64 [n], index into `keys` of every position.
    """

    keys: np.ndarray
    rows: np.ndarray
    bounds: np.ndarray
    order: np.ndarray
    starts: np.ndarray
    inverse: np.ndarray

    @property
    def num_servers(self) -> int:
        """Number of servers the keys are split over."""
        return self.bounds.size - 1

    def share(self, server: int) -> slice:
        """Where server `server`'s keys lie in `keys` and `rows`."""
        return slice(int(self.bounds[server]), int(self.bounds[server + 1]))


def unique_keys(keys: np.ndarray, num_rows: int, num_servers: int, table: str) -> UniqueKeys:
    """Sort, deduplicate and split by server the keys of one look-up.

    keys: integers of any shape, each in [0, num_rows).  Costs one sort of n int64.
    Raises KeyRangeError naming a key outside the table, TableError for a dtype that is not integer.
    """
    flat = _checked(keys, num_rows, table)
    stride = shard_rows(num_rows, num_servers, 0)
    code = flat if num_servers == 1 else (flat % num_servers) * stride + flat // num_servers
    sorted_code, order = _sorted(code, num_servers * stride)
    is_first = np.empty(flat.size, bool)
    is_first[:1] = True
    np.not_equal(sorted_code[1:], sorted_code[:-1], out=is_first[1:])
    starts = np.flatnonzero(is_first)
    inverse = np.empty(flat.size, np.int64)
    inverse[order] = np.cumsum(is_first) - 1
    unique = sorted_code[starts]
    bounds = np.searchsorted(unique, np.arange(num_servers + 1) * stride)
    if num_servers == 1:
        return UniqueKeys(unique, unique, bounds, order, starts, inverse)
    servers, rows = np.divmod(unique, stride)
    return UniqueKeys(rows * num_servers + servers, rows, bounds, order, starts, inverse)


def _checked(keys: np.ndarray, num_rows: int, table: str) -> np.ndarray:
    if keys.dtype.kind not in "iu":
        raise TableError(f"table {table!r}: keys must be integers, not {keys.dtype}")
    if keys.size:
        low, high = int(keys.min()), int(keys.max())
        if low < 0 or high >= num_rows:
            wrong = low if low < 0 else high
            raise KeyRangeError(f"table {table!r}: key {wrong} is outside [0, {num_rows})")
    return np.ascontiguousarray(keys, dtype=np.int64).reshape(-1)


def _sorted(code: np.ndarray, bound: int) -> tuple[np.ndarray, np.ndarray]:
    """Stable sort of int64 codes in [0, bound): (sorted codes, order).

    Code and position are packed into one word where they fit, because a plain sort is about
    three times as fast as an argsort; the argsort gives the same answer beyond that.
    """
    bits = int(code.size).bit_length()
    if bound >> (62 - bits):
        order = np.argsort(code, kind="stable")
        return code[order], order
    packed = (code << bits) | np.arange(code.size, dtype=np.int64)
    packed.sort()
    return packed >> bits, packed & ((1 << bits) - 1)
