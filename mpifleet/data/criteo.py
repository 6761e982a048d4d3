"""Read the Criteo display-advertising text format in whole blocks of lines.

One line is one impression, tab-separated: label (0 or 1), I1..I13 (integers, blanks allowed),
C1..C26 (8 hex digits, blanks allowed).  A block of some MiB becomes arrays with a fixed number of
numpy calls; only the batches and the blocks are a Python loop.

Normalisation is that of PaddlePaddle's distributed CTR example: (x - minimum) / range per integer
column with the 95 % points as maxima (larger values stay larger than 1), blank -> 0, and one
shared space of 1,000,001 ids for all 26 columns.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from mpifleet.data.columns import (
    check_columns,
    hex_words,
    integers,
    line_fields,
)
from mpifleet.data.prefetch import Prefetch, prefetch
from mpifleet.data.samples import Samples
from mpifleet.errors import ConfigError, DataError

__all__ = [
    "DENSE_MAX",
    "DENSE_MIN",
    "HASH_DIM",
    "NUM_DENSE",
    "NUM_SLOTS",
    "hash_ids",
    "normalise_dense",
    "parse_block",
    "read_criteo",
]

NUM_DENSE = 13
NUM_SLOTS = 26
HASH_DIM = 1_000_001
DENSE_MIN = np.array([0, -3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], np.float64)
DENSE_MAX = np.array([20, 600, 100, 50, 64000, 500, 100, 50, 500, 10, 10, 10, 50], np.float64)
BLOCK_BYTES = 1 << 20
COLUMN_NAMES = (
    ["label"]
    + [f"I{i}" for i in range(1, NUM_DENSE + 1)]
    + [f"C{i}" for i in range(1, NUM_SLOTS + 1)]
)


def read_criteo(
    paths: Iterable[str | os.PathLike[str]],
    batch_size: int,
    *,
    hash_dim: int = HASH_DIM,
    depth: int = 4,
    drop_last: bool = False,
    block_bytes: int = BLOCK_BYTES,
) -> Prefetch[Samples]:
    """Batches of the files in order, `depth` of them parsed ahead in a background thread.

    Names ending in .gz are decompressed.  Batches run on over block and file ends; the last one is
    shorter unless `drop_last`.  Close the result (or use `with`) when stopping early.
    Raises DataError, naming file and line, where a line is broken, and OSError for a file that
    cannot be opened, both in the consumer and after the batches of the blocks before it.
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size}; use 1 or more")
    if hash_dim < 1:
        raise ConfigError(f"hash_dim={hash_dim}; use 1 or more")
    blocks = _read_blocks([Path(path) for path in paths], hash_dim, block_bytes)
    return prefetch(_rebatch(blocks, batch_size, drop_last), depth)


def parse_block(
    block: bytes, path: str = "<bytes>", first_line: int = 1, hash_dim: int = HASH_DIM
) -> Samples:
    """Arrays of the whole lines in `block`, of which only the last may lack its newline.

    path, first_line: where the block stands, for DataError about a broken line.
    """
    fields = line_fields(block, len(COLUMN_NAMES))
    values, blank, integer_ok = integers(fields, slice(0, 1 + NUM_DENSE))
    words, absent, hex_ok = hex_words(fields, slice(1 + NUM_DENSE, None))
    label_ok = integer_ok[:, :1] & (fields.lengths[:, :1] == 1) & (values[:, :1] <= 1)
    check_columns(
        fields,
        np.hstack([label_ok, integer_ok[:, 1:], hex_ok]),
        COLUMN_NAMES,
        ["0 or 1"]
        + ["an integer or a blank"] * NUM_DENSE
        + ["8 hex digits or a blank"] * NUM_SLOTS,
        path,
        first_line,
    )
    return Samples(
        values[:, 0].copy(),
        normalise_dense(values[:, 1:], blank[:, 1:]),
        hash_ids(words, absent, hash_dim),
    )


def normalise_dense(
    values: NDArray[np.int64], blank: NDArray[np.bool_] | None = None
) -> NDArray[np.float32]:
    """(value - DENSE_MIN) / (DENSE_MAX - DENSE_MIN) per column, 0 where `blank`; both [n, 13]."""
    scaled = (values - DENSE_MIN) / (DENSE_MAX - DENSE_MIN)
    if blank is not None:
        scaled[blank] = 0.0
    return scaled.astype(np.float32)


def hash_ids(
    words: NDArray[np.uint64], blank: NDArray[np.bool_], hash_dim: int = HASH_DIM
) -> NDArray[np.int64]:
    """Id in [0, hash_dim) of every categorical value, the same in every process and machine.

    words: uint64 [n, slots], the 32-bit number that the 8 hex digits spell; blank: bool, same
    shape.  The key (slot << 33 | blank << 32 | word) goes through the finaliser of splitmix64
    (Steele, Lea, Flood 2014), so the id of a word differs between slots, and a blank has an id.
    """
    slots = np.arange(words.shape[1], dtype=np.uint64) << np.uint64(33)
    mixed = (words | (blank.astype(np.uint64) << np.uint64(32))) + slots
    mixed += np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    mixed %= np.uint64(hash_dim)
    return mixed.view(np.int64)


def _read_blocks(paths: list[Path], hash_dim: int, block_bytes: int) -> Iterator[Samples]:
    for path in paths:
        next_line = 1
        for block in _line_blocks(path, block_bytes):
            yield parse_block(block, str(path), next_line, hash_dim)
            next_line += block.count(b"\n")


def _line_blocks(path: Path, block_bytes: int) -> Iterator[bytes]:
    """The bytes of a file cut after line ends, in blocks of about block_bytes."""
    rest = b""
    with _open(path) as stream:
        while chunk := _read_chunk(stream, path, block_bytes):
            chunk = rest + chunk
            cut = chunk.rfind(b"\n") + 1
            if not cut and len(chunk) > block_bytes:
                raise DataError(f"{path}: no line end in {len(chunk)} bytes; is this a text file?")
            rest = chunk[cut:]
            if cut:
                yield chunk[:cut]
    if rest:
        yield rest


def _open(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    return open(path, "rb")


def _read_chunk(stream: BinaryIO, path: Path, size: int) -> bytes:
    try:
        return stream.read(size)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}: not a whole gzip file: {error}") from error


def _rebatch(blocks: Iterable[Samples], batch_size: int, drop_last: bool) -> Iterator[Samples]:
    rest: Samples | None = None
    for block in blocks:
        ready = block if rest is None else rest.followed_by(block)
        whole = ready.num_samples // batch_size * batch_size
        for start in range(0, whole, batch_size):
            yield ready.rows(slice(start, start + batch_size))
        rest = ready.rows(slice(whole, None))
    if rest is not None and rest.num_samples and not drop_last:
        yield rest
