"""Freed memory kept by the process, because a training step asks for the same amounts again."""

import ctypes
import os

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
KEEP_BYTES = 256 << 20
LARGEST_BYTES = 32 << 20
"""The most that every glibc accepts: larger blocks are given back when they are freed."""
_OURS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")


def keep_freed_memory() -> bool:
    """Have glibc reuse blocks of up to LARGEST_BYTES instead of giving them back; whether it will.

    By itself it gives blocks of 128 KiB and more back when they are freed; the temporaries of a
    step then cost a page fault for every 4 KiB, 700 in a step of CTR-DNN with batches of 1,000, a
    tenth of its time.  At most KEEP_BYTES of free memory at the end of the heap stay; free memory
    below a block that lives on stays too.  Left alone where the environment already chooses:
    MALLOC_MMAP_THRESHOLD_ and its like, or GLIBC_TUNABLES with glibc.malloc.
    """
    chosen = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if chosen or any(name in os.environ for name in _OURS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wanted = (
        (_M_MMAP_THRESHOLD, LARGEST_BYTES),
        (_M_TRIM_THRESHOLD, KEEP_BYTES),
        (_M_TOP_PAD, LARGEST_BYTES),
    )
    return all(mallopt(name, value) == 1 for name, value in wanted)
