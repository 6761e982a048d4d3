"""Freed memory kept by the process, because a training step asks for the same amounts again."""

import ctypes
import os

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
KEEP_BYTES = 256 << 20
_LARGEST_BYTES = 1 << 30
_GROW_BYTES = 32 << 20


def keep_freed_memory() -> bool:
    """Have the C library reuse large blocks instead of giving them back; whether it will.

    glibc takes blocks of 128 KiB and more from the system and gives them back when they are freed;
    the temporaries of a step then cost a page fault for every 4 KiB, 800 in a step of CTR-DNN with
    batches of 1,000, a tenth of its time.  At most KEEP_BYTES of free memory at the end of the heap
    stay.  Left alone where the environment sets MALLOC_... or another C library serves malloc.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wanted = (
        (_M_MMAP_THRESHOLD, _LARGEST_BYTES),
        (_M_TRIM_THRESHOLD, KEEP_BYTES),
        (_M_TOP_PAD, _GROW_BYTES),
    )
    return all(mallopt(name, value) == 1 for name, value in wanted)
