"""Gradients that are not finite never reach a table."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mpifleet.errors import NonFiniteGradient
from mpifleet.log import get_logger
from mpifleet.partition import chunks


def is_finite(values: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite. One pass; a second only where a sum overflows."""
    flat = values.reshape(-1)
    for start, stop in chunks(flat.numel(), flat.itemsize):
        part = flat[start:stop]
        if not torch.isfinite(part.sum()) and not torch.isfinite(part).all():
            return False
    return True


def first_nonfinite(arrays: Sequence[np.ndarray]) -> int:
    """1 + index of the first array that holds NaN or infinity, 0 where all are finite."""
    for index, values in enumerate(arrays):
        if not is_finite(torch.from_numpy(values)):
            return 1 + index
    return 0


class FiniteGuard:
    """Refuses pushes with gradients that are not finite.

    Whoever pushes looks at its gradients (`first_nonfinite`); who applies them is told.
    skip: counts such pushes and leaves them out instead of raising.
    """

    def __init__(self, skip: bool) -> None:
        self._skip = skip
        self.skipped = 0

    def accept(self, bad: int, tables: Sequence[Any], worker: int, step: int) -> bool:
        """Whether all of one push may be applied; nothing of it was touched yet.

        bad: 1 + index of the first of `tables` (specs with a name) whose gradient is not finite, 0
        for none.  Raises NonFiniteGradient naming worker, table and step, unless skipping.
        """
        if not bad:
            return True
        text = (
            f"worker {worker} pushed NaN or infinity for table {tables[bad - 1].name!r} at step "
            f"{step}; nothing of this push was applied"
        )
        if not self._skip:
            raise NonFiniteGradient(f"{text} (strategy.nonfinite = 'skip' goes on without it)")
        self.skipped += 1
        if self.skipped & (self.skipped - 1) == 0:  # the 1st, 2nd, 4th, 8th ...
            get_logger().warning("%s (skipped, number %d)", text, self.skipped)
        return False
