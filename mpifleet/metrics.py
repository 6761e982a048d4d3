"""Metrics counted per worker and merged exactly over all workers.

The states are sums (of counts or of errors), so merging is an elementwise sum over the workers.
Everything here is numpy only.  `util` is any object with Fleet's `all_reduce`; functions that
take it are Collective: every worker calls them, also a worker that saw no sample.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from mpifleet.errors import DataError

__all__ = ["AUC", "AllReduce", "acc", "auc", "auc_from_counts", "mae", "mse", "rmse"]


class AllReduce(Protocol):
    """What the metrics need of `fleet.util`."""

    def all_reduce(self, input: Any, mode: str = "sum") -> Any:
        """Elementwise sum of `input` over all workers, the same on every worker."""


class AUC:
    """Area under the ROC curve from counts of positives and negatives per bucket of probability.

    A probability p in [0, 1] falls into bucket int(p * (num_buckets - 1)); two samples of one
    bucket count as a tie.  States: `stat_pos`, `stat_neg`, int64 [num_buckets].
    """

    def __init__(self, num_buckets: int = 4096) -> None:
        """num_buckets: at least 2."""
        if num_buckets < 2:
            raise DataError(f"num_buckets={num_buckets} cannot order anything; use 2 or more")
        self.num_buckets = num_buckets
        self.stat_pos = np.zeros(num_buckets, np.int64)
        self.stat_neg = np.zeros(num_buckets, np.int64)

    @property
    def num_samples(self) -> int:
        """Samples counted so far."""
        return int(self.stat_pos.sum() + self.stat_neg.sum())

    def update(self, probs: ArrayLike, labels: ArrayLike) -> None:
        """Count one batch.

        probs: floats in [0, 1] [n], the probability of the positive class.
        labels: numbers [n]; > 0 is positive, 0 negative, < 0 leaves the sample out.
        Raises DataError for a probability outside [0, 1] or NaN, or when the sizes differ.
        """
        flat_probs = np.asarray(probs, np.float64).ravel()
        flat_labels = np.asarray(labels).ravel()
        if flat_probs.size != flat_labels.size:
            raise DataError(f"{flat_probs.size} probabilities for {flat_labels.size} labels")
        valid = (flat_probs >= 0.0) & (flat_probs <= 1.0)  # False for NaN too
        if not valid.all():
            at = int(np.argmin(valid))
            raise DataError(
                f"probability {flat_probs[at]} at position {at} of the batch; expected [0, 1]"
            )
        buckets = (flat_probs * (self.num_buckets - 1)).astype(np.int64)
        self.stat_pos += np.bincount(buckets[flat_labels > 0], minlength=self.num_buckets)
        self.stat_neg += np.bincount(buckets[flat_labels == 0], minlength=self.num_buckets)

    def reset(self) -> None:
        """Forget every sample."""
        self.stat_pos[:] = 0
        self.stat_neg[:] = 0

    def merged(self, util: AllReduce) -> AUC:
        """A new AUC over the samples of all workers; `self` stays as it is.  Collective."""
        states = np.stack([self.stat_pos, self.stat_neg])
        total = AUC(self.num_buckets)
        total.stat_pos, total.stat_neg = np.asarray(util.all_reduce(states, mode="sum"))
        return total

    def compute(self) -> float:
        """The area; 0.5 when one of the two classes is missing."""
        return auc_from_counts(self.stat_pos, self.stat_neg)


def auc_from_counts(stat_pos: ArrayLike, stat_neg: ArrayLike) -> float:
    """Area under the ROC curve of counts per bucket, lowest probability first.

    Swept from the top bucket down, each bucket adds the trapezoid
    neg * (positives above + positives up to here) / 2; divided by all pos * neg pairs
    (the sweep of PaddlePaddle's auc operator).  0.5 when one class is missing.
    """
    pos = np.asarray(stat_pos, np.float64).ravel()[::-1]
    neg = np.asarray(stat_neg, np.float64).ravel()[::-1]
    pos_up_to_here = np.cumsum(pos)
    # Twice the area is a sum of integers, so float64 holds it exactly up to 2**53 pairs.
    twice_area = float(np.sum(neg * (2.0 * pos_up_to_here - pos)))
    pairs = float(pos.sum() * neg.sum())
    return twice_area / (2.0 * pairs) if pairs else 0.5


def auc(stat_pos: ArrayLike, stat_neg: ArrayLike, util: AllReduce) -> float:
    """Global AUC of per-worker bucket counts (any shape, lowest bucket first).  Collective."""
    states = np.stack([np.asarray(stat_pos).ravel(), np.asarray(stat_neg).ravel()])
    pos, neg = np.asarray(util.all_reduce(states, mode="sum"))
    return auc_from_counts(pos, neg)


def acc(correct: ArrayLike, total: ArrayLike, util: AllReduce) -> float:
    """Global accuracy: correct samples / samples.  Collective."""
    return _global_ratio("acc", correct, total, util)


def mae(abserr: ArrayLike, total_ins_num: ArrayLike, util: AllReduce) -> float:
    """Global mean absolute error: sum of absolute errors / samples.  Collective."""
    return _global_ratio("mae", abserr, total_ins_num, util)


def mse(sqrerr: ArrayLike, total_ins_num: ArrayLike, util: AllReduce) -> float:
    """Global mean squared error: sum of squared errors / samples.  Collective."""
    return _global_ratio("mse", sqrerr, total_ins_num, util)


def rmse(sqrerr: ArrayLike, total_ins_num: ArrayLike, util: AllReduce) -> float:
    """Square root of the global mean squared error.  Collective."""
    return math.sqrt(_global_ratio("rmse", sqrerr, total_ins_num, util))


def _global_ratio(name: str, part: ArrayLike, count: ArrayLike, util: AllReduce) -> float:
    local = np.array([np.sum(np.asarray(part)), np.sum(np.asarray(count))], np.float64)
    total_part, total_count = np.asarray(util.all_reduce(local, mode="sum"))
    if total_count <= 0:
        raise DataError(f"{name} over {total_count:g} samples of all workers; expected 1 or more")
    return float(total_part / total_count)
