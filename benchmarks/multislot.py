"""Samples as MultiSlot text, the format that PaddlePaddle's data sets read, and back.

A line is one sample: for every slot the number of its values, then the values, all separated by
one blank.  Here: 13 dense inputs, 26 slots of one id each, and the label.  Dense inputs are written
with four decimals, so that text and arrays hold the same samples; only such text is read here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mpifleet.data.columns import integers, line_fields
from mpifleet.data.criteo import NUM_DENSE, NUM_SLOTS
from mpifleet.data.prefetch import Prefetch, prefetch
from mpifleet.data.samples import Samples
from mpifleet.errors import DataError

LINE_NUMBERS = 1 + NUM_DENSE + 2 * NUM_SLOTS + 2
BLOCK_BYTES = 1 << 18
_SCALE = 10_000
_FIRST_ID = 1 + NUM_DENSE + 1
_TABS = bytes.maketrans(b" ", b"\t")


def rounded(samples: Samples) -> Samples:
    """The same samples with dense inputs that text holds exactly, as `write` wants them."""
    dense = np.rint(samples.dense.astype(np.float64) * _SCALE) / _SCALE
    return samples._replace(dense=dense.astype(np.float32))


def write(path: str | os.PathLike[str], samples: Samples) -> None:
    """Write one line per sample."""
    numbers = np.ones((samples.num_samples, LINE_NUMBERS), np.float64)
    numbers[:, 0] = NUM_DENSE
    numbers[:, 1 : 1 + NUM_DENSE] = samples.dense
    numbers[:, _FIRST_ID:-2:2] = samples.ids
    numbers[:, -1] = samples.labels
    formats = ["%d"] * LINE_NUMBERS
    formats[1 : 1 + NUM_DENSE] = ["%.4f"] * NUM_DENSE
    np.savetxt(path, numbers, fmt=" ".join(formats))


def parse_block(block: bytes) -> Samples:
    """Samples of whole lines, with a fixed number of numpy calls.

    Raises DataError where the slots are not those of this module, or a value is no number.
    """
    fields = line_fields(block.translate(_TABS, delete=b"."), LINE_NUMBERS)
    dense, _, dense_ok = integers(fields, slice(1, 1 + NUM_DENSE))
    ids, _, ids_ok = integers(fields, slice(_FIRST_ID, None, 2))
    counts = fields.text[fields.starts[:, _FIRST_ID - 1 :: 2]]
    ones = (fields.lengths[:, _FIRST_ID - 1 :: 2] == 1) & (counts == ord("1"))
    right = ones.all() and (integers(fields, slice(0, 1))[0] == NUM_DENSE).all()
    if fields.wrong_columns is not None or not (right and dense_ok.all() and ids_ok.all()):
        raise DataError(f"expected slots of {NUM_DENSE} and {NUM_SLOTS + 1} times 1 number")
    return Samples(
        ids[:, -1].copy(),
        (dense / _SCALE).astype(np.float32),
        np.ascontiguousarray(ids[:, :-1]),
    )


def read(
    path: str | os.PathLike[str], batch_size: int, index: int = 0, count: int = 1, depth: int = 4
) -> Prefetch[Samples]:
    """Batches of stretch `index` of `count` of a file, `depth` of them parsed ahead in a thread.

    The stretches are equal in bytes, and each line is in one of them; the last batch of each may
    be shorter.
    """
    return prefetch(_batches(path, batch_size, index, count), depth)


def _batches(
    path: str | os.PathLike[str], batch_size: int, index: int, count: int
) -> Iterator[Samples]:
    left: Samples | None = None
    for block in _blocks(path, index, count):
        samples = parse_block(block)
        samples = left.followed_by(samples) if left is not None else samples
        whole = samples.num_samples - samples.num_samples % batch_size
        for start in range(0, whole, batch_size):
            yield samples.rows(slice(start, start + batch_size))
        left = samples.rows(slice(whole, None))
    if left is not None and left.num_samples:
        yield left


def _blocks(path: str | os.PathLike[str], index: int, count: int) -> Iterator[bytes]:
    """Pieces of whole lines, of about BLOCK_BYTES; a line belongs to where its first byte is."""
    size = Path(path).stat().st_size
    start, end = index * size // count, (index + 1) * size // count
    with open(path, "rb") as stream:
        if start:
            stream.seek(start - 1)
            stream.readline()
        while (at := stream.tell()) < end:
            block = stream.read(min(BLOCK_BYTES, end - at))
            yield block if block.endswith(b"\n") else block + stream.readline()
