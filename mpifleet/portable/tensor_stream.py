"""A tensor that is written piece by piece, so that it need not fit into memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mpifleet.errors import CheckpointError

PIECE_BYTES = 16 << 20
"""About the size of a piece, but for a single row that is larger."""

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        *(getattr(torch, name) for name in ("uint16", "uint32", "uint64") if hasattr(torch, name)),
    )
}
"""Element types by torch's names for them, which are also numpy's, but for bfloat16."""


def dtype_of(name: str, owner: str) -> torch.dtype:
    """torch's dtype of a name like "float32" or numpy's "<f4". Raises CheckpointError."""
    with_name = name if name in DTYPES else np.dtype(name).name
    if with_name not in DTYPES:
        raise CheckpointError(f"{owner!r} has dtype {name}; use one of {', '.join(DTYPES)}")
    return DTYPES[with_name]


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class TensorStream:
    """name, dtype and shape of a tensor, and `pieces`, which gives its elements in their order.

    pieces: a fresh iterator over tensors at each call; together they have the shape's elements.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[Tensor]]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> TensorStream:
        """A tensor that is in memory."""
        values = tensor.detach()
        return cls(name, values.dtype, tuple(values.shape), lambda: iter((values,)))

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def buffers(self) -> Iterator[memoryview]:
        """The elements' bytes. Raises CheckpointError where they are not what was promised."""
        count = 0
        for piece in self.pieces():
            if piece.dtype != self.dtype:
                raise CheckpointError(f"{self.name!r} is {piece.dtype}, not {self.dtype}")
            count += piece.numel()
            if piece.numel():
                flat = piece.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                yield memoryview(flat.numpy().data)
        if count != math.prod(self.shape):
            raise CheckpointError(f"{self.name!r} has {count} elements, not {self.shape}")

    def tensor(self) -> Tensor:
        """All of it in memory, a copy."""
        whole = torch.empty(math.prod(self.shape), dtype=self.dtype)
        memory, start = memoryview(whole.view(torch.uint8).numpy().data), 0
        for data in self.buffers():
            memory[start : start + len(data)] = data
            start += len(data)
        return whole.reshape(self.shape)
