"""Samples of a click-through model as three arrays: labels, dense inputs and ids."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Samples"]


class Samples(NamedTuple):
    """labels int64 [n], 0 or 1; dense float32 [n, num_dense]; ids int64 [n, num_slots]."""

    labels: NDArray[np.int64]
    dense: NDArray[np.float32]
    ids: NDArray[np.int64]

    @property
    def num_samples(self) -> int:
        """Number of samples (`len` of the tuple is 3)."""
        return len(self.labels)

    def rows(self, picked: Any) -> Samples:
        """The samples at `picked`: a slice (a view) or an index or mask array (a copy)."""
        return Samples(self.labels[picked], self.dense[picked], self.ids[picked])

    def followed_by(self, other: Samples) -> Samples:
        """These samples, then the other ones."""
        return Samples(
            np.concatenate([self.labels, other.labels]),
            np.concatenate([self.dense, other.dense]),
            np.concatenate([self.ids, other.ids]),
        )
