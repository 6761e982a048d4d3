"""Gradients that are not finite never reach a table."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from mpifleet.errors import NonFiniteGradient
from mpifleet.log import get_logger
from mpifleet.partition import chunks


def is_finite(values: torch.Tensor, breathe: Callable[[], None] = lambda: None) -> bool:
    """Whether no element is NaN or infinite. One pass; a second only where a sum overflows.

    breathe: called between chunks.
    """
    flat = values.reshape(-1)
    for start, stop in chunks(flat.numel(), flat.itemsize):
        part = flat[start:stop]
        if not torch.isfinite(part.sum()) and not torch.isfinite(part).all():
            return False
        breathe()
    return True


def first_nonfinite(
    arrays: Sequence[np.ndarray], breathe: Callable[[], None] = lambda: None
) -> int:
    """1 + index of the first array that holds NaN or infinity, 0 where all are finite."""
    for index, values in enumerate(arrays):
        if not is_finite(torch.from_numpy(values), breathe):
            return 1 + index
    return 0


class FiniteGuard:
    """Refuses non-finite gradients.

    skip: counts them and leaves them out instead of raising; breathe: called between chunks.
    """

    def __init__(self, skip: bool, breathe: Callable[[], None] = lambda: None) -> None:
        self._skip = skip
        self._breathe = breathe
        self.skipped = 0

    def accept(
        self,
        tables: Sequence[Any],
        gradients: Sequence[Any],
        worker: int,
        step: int,
        told: str = "",
    ) -> bool:
        """Whether all of one push may be applied; nothing of it was touched yet.

        tables: specs with a name; gradients: with `values`, one per table.  told: the table in
        which the worker itself found such a number, perhaps in what went to another server.
        Raises NonFiniteGradient naming worker, table and step, unless skipping.
        """
        bad = first_nonfinite([gradient.values for gradient in gradients], self._breathe)
        name = told or (tables[bad - 1].name if bad else "")
        if not name:
            return True
        text = (
            f"worker {worker} pushed NaN or infinity for table {name!r} at step {step}; "
            "nothing of this push was applied"
        )
        if not self._skip:
            raise NonFiniteGradient(f"{text} (strategy.nonfinite = 'skip' goes on without it)")
        self.skipped += 1
        if self.skipped & (self.skipped - 1) == 0:  # the 1st, 2nd, 4th, 8th ...
            get_logger().warning("%s (skipped, number %d)", text, self.skipped)
        return False
