"""AUC against a direct count of pairs; merging shards is exact."""

import numpy as np
import pytest

from mpifleet import metrics
from mpifleet.errors import DataError


class SummedWith:
    """Stands for `fleet.util` of a worker whose peers hold `others`."""

    def __init__(self, others=()):
        self.others = list(others)

    def all_reduce(self, input, mode="sum"):
        assert mode == "sum"
        return np.sum([np.asarray(input), *self.others], axis=0)


def pairwise_auc(scores, labels):
    pos, neg = scores[labels > 0], scores[labels == 0]
    wins = (pos[:, None] > neg[None, :]).sum() + 0.5 * (pos[:, None] == neg[None, :]).sum()
    return wins / (pos.size * neg.size)


@pytest.fixture
def batch():
    rng = np.random.default_rng(3)
    labels = rng.integers(0, 2, 700)
    return np.clip(0.3 * labels + rng.random(700), 0.0, 1.0), labels


@pytest.mark.parametrize("num_buckets", [2, 11, 4096])
def test_auc_is_the_share_of_ordered_pairs(batch, num_buckets):
    probs, labels = batch
    metric = metrics.AUC(num_buckets)
    metric.update(probs, labels)
    buckets = np.floor(probs * (num_buckets - 1))
    assert metric.compute() == pairwise_auc(buckets, labels)
    assert metric.num_samples == 700


def test_bucket_edges():
    metric = metrics.AUC(4096)
    metric.update([0.0, 1.0, 0.5], [0, 1, 1])
    assert metric.stat_neg[0] == 1
    assert metric.stat_pos[4095] == 1
    assert metric.stat_pos[2047] == 1
    assert metric.compute() == 1.0


def test_merged_shards_equal_the_whole_exactly(batch):
    probs, labels = batch
    whole = metrics.AUC()
    whole.update(probs, labels)
    shards = [metrics.AUC() for _ in range(4)]
    for index, (start, end) in enumerate([(0, 10), (10, 10), (10, 601), (601, 700)]):
        shards[index].update(probs[start:end], labels[start:end])
    others = [np.stack([s.stat_pos, s.stat_neg]) for s in shards[1:]]
    merged = shards[0].merged(SummedWith(others))
    np.testing.assert_array_equal(merged.stat_pos, whole.stat_pos)
    np.testing.assert_array_equal(merged.stat_neg, whole.stat_neg)
    assert merged.compute() == whole.compute()
    assert shards[0].num_samples == 10
    pos, neg = shards[0].stat_pos[None], shards[0].stat_neg[None]
    assert metrics.auc(pos, neg, util=SummedWith(others)) == whole.compute()


def test_one_class_is_half_and_negative_labels_are_left_out():
    metric = metrics.AUC()
    assert metric.compute() == 0.5
    metric.update([0.1, 0.9], [1, 1])
    assert metric.compute() == 0.5
    metric.update([0.95], [-1])
    assert metric.num_samples == 2
    metric.reset()
    assert metric.num_samples == 0


@pytest.mark.parametrize("bad", [1.5, -0.1, float("nan")])
def test_a_probability_outside_its_range_is_named(bad):
    with pytest.raises(DataError, match="position 1"):
        metrics.AUC().update([0.5, bad], [0, 1])


def test_sizes_must_agree():
    with pytest.raises(DataError, match="2 probabilities for 1 labels"):
        metrics.AUC().update([0.5, 0.5], [0])


def test_ratios_are_global():
    peers = SummedWith([np.array([6.0, 2.0])])
    assert metrics.acc(1, 2, util=peers) == 7 / 4
    assert metrics.mae([1.0, 2.0], [2], util=peers) == 9 / 4
    assert metrics.mse(10.0, 2, util=peers) == 4.0
    assert metrics.rmse(10.0, 2, util=peers) == 2.0
    with pytest.raises(DataError, match="0 samples"):
        metrics.acc(0, 0, util=SummedWith())
