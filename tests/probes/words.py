"""Single int64 words in MPI windows, and windows a component may refuse: what all probes share.

Raw mpi4py on purpose: a probe must tell what MPI does, not what the package makes of it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np
import pytest
from mpi4py import MPI

WORD_BYTES = 8
_IGNORED = np.zeros(1, np.int64)  # origin of a NO_OP: never read, but mpi4py wants a buffer


def read_word(win: MPI.Win, rank: int, word: int = 0) -> int:
    """The int64 at word `word` of rank's window memory, read atomically (displacement unit 8)."""
    value = np.empty(1, np.int64)
    win.Fetch_and_op(_IGNORED, value, rank, word, MPI.NO_OP)
    win.Flush(rank)
    return int(value[0])


def read_words(win: MPI.Win, rank: int, count: int) -> np.ndarray:
    """The first `count` int64 words of rank's window memory, each read atomically."""
    values = np.empty(count, np.int64)
    target = [0, count, MPI.INT64_T]
    win.Get_accumulate([_IGNORED, 0, MPI.INT64_T], values, rank, target, MPI.NO_OP)
    win.Flush(rank)
    return values


def write_word(win: MPI.Win, rank: int, value: int, word: int = 0) -> None:
    """Store one int64 atomically and wait until it stands at the target."""
    target = [word, 1, MPI.INT64_T]
    win.Accumulate(np.array([value], np.int64), rank, target, MPI.REPLACE)
    win.Flush(rank)


def wait_until(happened: Callable[[], bool], what: str, limit_s: float) -> None:
    """Ask `happened` again and again until it is true; fails after `limit_s` seconds."""
    end = time.monotonic() + limit_s
    while not happened():
        assert time.monotonic() < end, f"{what}: not within {limit_s} s"
        os.sched_yield()  # more ranks than cores: let the awaited one run


def shared_or_skip(comm: MPI.Comm, bytes_here: int) -> MPI.Win:
    """An Allocate_shared window, or a skip where MPI's chosen component has none. Collective."""
    try:
        return MPI.Win.Allocate_shared(bytes_here, 1, MPI.INFO_NULL, comm)
    except MPI.Exception as refusal:  # every rank gets it: the choice is made together
        pytest.skip(f"no shared window with these components: {refusal}")


def memory_of(win: MPI.Win, dtype: type[np.generic]) -> np.ndarray:
    """This rank's own window memory as a flat array; drop it before `win.Free()`."""
    return np.frombuffer(win.tomemory(), dtype)
