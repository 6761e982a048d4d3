"""Reading and writing rows of a table by number, in slices."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from mpifleet.partition import row_chunk


def gather_rows(
    table: torch.Tensor,
    rows: np.ndarray,
    breathe: Callable[[], None],
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[i] = table[rows[i]], a new [n, dim] by default; rows: int64 [n]. O(bytes moved).

    breathe: called after every slice.
    """
    if out is None:
        out = table.new_empty((rows.size, table.shape[1]))
    size = row_chunk(table.shape[1] * table.itemsize)
    for chunk, target in zip(torch.from_numpy(rows).split(size), out.split(size), strict=True):
        torch.index_select(table, 0, chunk, out=target)
        breathe()
    return out


def write_rows(
    table: torch.Tensor,
    rows: np.ndarray,
    changed: torch.Tensor,
    breathe: Callable[[], None],
    lock: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """table[rows[i]] = changed[i]; rows: int64 [n], distinct. O(bytes moved).

    breathe: called after every slice.  lock: held around the writing of each.
    """
    size = row_chunk(table.shape[1] * table.itemsize)
    for start in range(0, rows.size, size):
        part = slice(start, start + size)
        with lock():
            put_rows(table.numpy(), rows[part], changed[part].numpy())
        breathe()


def put_rows(table: np.ndarray, rows: np.ndarray, values: np.ndarray) -> None:
    """table[rows[i]] = values[i]; table [num_rows, dim] and values [n, dim] C-contiguous.

    rows: int64 [n], distinct, each in [0, num_rows).  O(bytes moved).
    A row is copied as one item: 1.2 to 3.5 times as fast as torch's index_copy_.
    """
    if rows.size:
        item = np.dtype((np.void, table.shape[1] * table.itemsize))
        # mode="clip" spares numpy a copy of the indices; none is outside.
        np.put(table.view(item)[:, 0], rows, values.view(item)[:, 0], mode="clip")
