"""How old the tables were that pushes were computed from: the distribution of their lag."""

import numpy as np

MOST_LAG = 4095


class LagCount:
    """Counts pushes by lag: the updates that a server applied between the read and the push.

    Memory is MOST_LAG + 1 words whatever is counted; a larger lag counts as MOST_LAG, the maximum
    is exact.
    """

    def __init__(self) -> None:
        self.maximum = 0
        self._counts = np.zeros(MOST_LAG + 1, np.int64)

    def add(self, lag: int) -> None:
        """One more push."""
        self._counts[min(lag, MOST_LAG)] += 1
        self.maximum = max(self.maximum, lag)

    @property
    def num_pushes(self) -> int:
        """Pushes counted."""
        return int(self._counts.sum())

    def quantile(self, share: float) -> int:
        """The least lag that at least `share` of the pushes, in 0..1, do not exceed; 0 of none."""
        reached = np.cumsum(self._counts)
        return int(np.searchsorted(reached, max(share * reached[-1], 1))) if reached[-1] else 0

    def text(self) -> str:
        """For instance "p50 1, p90 2, max 5 of 2000 pushes"."""
        if not self.num_pushes:
            return "no push"
        middle, high = self.quantile(0.5), self.quantile(0.9)
        return f"p50 {middle}, p90 {high}, max {self.maximum} of {self.num_pushes} pushes"
