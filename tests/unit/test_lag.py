"""The distribution of lags against numpy on all of them."""

import numpy as np
import pytest

from mpifleet.ps.lag import MOST_LAG, LagCount


def counted(lags):
    count = LagCount()
    for lag in lags:
        count.add(int(lag))
    return count


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.9, 0.99, 1.0])
def test_quantiles_are_those_of_the_sorted_lags(seed, share):
    rng = np.random.default_rng(seed)
    lags = rng.geometric(0.3, int(rng.integers(1, 300))) - 1
    count = counted(lags)
    assert count.quantile(share) == np.quantile(lags, share, method="inverted_cdf")
    assert (count.num_pushes, count.maximum) == (lags.size, lags.max())


def test_memory_is_bounded_and_the_maximum_exact():
    count = counted([0, 10 * MOST_LAG, 3])
    assert count.maximum == 10 * MOST_LAG
    assert count.quantile(1.0) == MOST_LAG
    assert count.num_pushes == 3


def test_words():
    assert LagCount().text() == "no push"
    assert LagCount().quantile(0.5) == 0
    assert counted([0, 1, 1, 2, 7]).text() == "p50 1, p90 7, max 7 of 5 pushes"
