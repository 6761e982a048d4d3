"""Arrays as JSON-able facts and plain bytes, to travel or to be kept, and back. No pickle."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np


def fact_of(array: np.ndarray) -> list[Any]:
    """[dtype, shape] of an array of booleans or numbers."""
    return [array.dtype.str, list(array.shape)]


def bytes_of(arrays: Iterable[np.ndarray]) -> bytes:
    """The elements of all arrays, one array after the other, each in C order; a copy."""
    return b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)


def arrays_of(facts: Iterable[Any], data: Any, start: int = 0) -> list[np.ndarray]:
    """The arrays that `fact_of` described, from byte `start` of what `bytes_of` gave on; views.

    data: a buffer.  Raises ValueError where it ends before the arrays do.
    """
    arrays = []
    for code, shape in facts:
        dtype, count = np.dtype(code), int(np.prod(shape, dtype=np.int64))
        arrays.append(np.frombuffer(data, dtype, count, start).reshape(shape))
        start += arrays[-1].nbytes
    return arrays
