"""First rows: independent of chunks, servers and order; right distribution; stable bits."""

import math
import statistics
import subprocess
import sys

import numpy as np
import pytest

from mpifleet.errors import ConfigError, TableError
from mpifleet.ps import initializers
from mpifleet.ps.initializers import KINDS, fill_shard, initial_rows, table_seed

# Written down once; a change of any of them breaks every checkpoint that relies on the seed.
GOLDEN_UNIFORM = [
    [0.90032276387137, 0.7593739618097486, 0.8022166860583384],
    [0.21878904913635, -0.18164100279054973, 0.9934743612477377],
    [-0.13937710982350704, 0.20250810726454804, 0.4637124413429128],
]
GOLDEN_NORMAL = [
    [1.6464203990201953, 1.173423449430695, 1.2878927087066292],
    [0.27774130482670867, -0.2296561167684488, 2.72012933283381],
    [-0.17558130555792956, 0.25659440740749895, 0.618436629258798],
]
GOLDEN_KEYS = [0, 1, 1_000_000_007]


def reference_mix(number):
    """splitmix64's mixer on a Python integer, after its authors' description."""
    mask = (1 << 64) - 1
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & mask
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & mask
    return number ^ (number >> 31)


def test_golden_values():
    for kind, golden in (("uniform", GOLDEN_UNIFORM), ("normal", GOLDEN_NORMAL)):
        rows = initial_rows(kind, GOLDEN_KEYS, 3, seed=7, scale=1.0, dtype=np.float64)
        assert rows.tolist() == golden
    assert table_seed(0, "emb") == 7324830163670612826
    assert table_seed(1, "emb") == 8680214522935060729


@pytest.mark.parametrize("seed", [0, 7, -1, 2**63 - 1])
def test_uniform_equals_plain_integer_arithmetic(seed):
    golden = 0x9E3779B97F4A7C15
    mask = (1 << 64) - 1
    keys = [0, 5, 2**40 + 3, 2**62]
    wanted = []
    for key in keys:
        row = reference_mix((key * golden + reference_mix((seed + golden) & mask)) & mask)
        bits = [reference_mix((row + column * golden) & mask) >> 12 for column in (1, 2, 3)]
        wanted.append([((2 * b + 1) / 2**53 - 0.5) * 2 * 0.3 for b in bits])
    rows = initial_rows("uniform", keys, 3, seed=seed, scale=0.3, dtype=np.float64)
    assert rows.tolist() == wanted


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_depend_on_servers_chunks_or_order(kind, dtype, monkeypatch):
    options = {"seed": table_seed(3, "t"), "scale": 0.05}
    num_rows, dim = 1_001, 7
    whole = initial_rows(kind, np.arange(num_rows), dim, dtype=dtype, **options)
    shuffled = np.random.default_rng(0).permutation(num_rows)
    np.testing.assert_array_equal(
        initial_rows(kind, shuffled, dim, dtype=dtype, **options), whole[shuffled]
    )
    for block_values in (1, 50, 1 << 20):
        monkeypatch.setattr(initializers, "_BLOCK_VALUES", block_values)
        for num_servers in (1, 3):
            for server in range(num_servers):
                mine = whole[server::num_servers]
                shard = np.full_like(mine, np.nan)
                fill_shard(shard, kind, server, num_servers, **options)
                np.testing.assert_array_equal(shard, mine)


def test_more_columns_keep_the_first_ones_and_seeds_differ():
    narrow = initial_rows("normal", [4, 9], 3, seed=1, scale=1.0)
    np.testing.assert_array_equal(
        initial_rows("normal", [4, 9], 8, seed=1, scale=1.0)[:, :3], narrow
    )
    other = initial_rows("normal", [4, 9], 3, seed=2, scale=1.0)
    assert not np.any(other == narrow)
    seeds = {table_seed(seed, name) for seed in range(50) for name in ("a", "b", "1:a", "")}
    assert len(seeds) == 200
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_moments_and_range():
    size = 400_000
    uniform = initial_rows("uniform", np.arange(size // 8), 8, seed=11, scale=2.0, dtype=float)
    assert -2.0 < uniform.min() < -1.9999
    assert 1.9999 < uniform.max() < 2.0
    normal = initial_rows("normal", np.arange(size // 8), 8, seed=11, scale=0.5, dtype=float) / 0.5
    for values, variance, fourth in ((uniform / 2.0, 1 / 3, 1 / 5), (normal, 1.0, 3.0)):
        error = 5 / math.sqrt(size)  # five standard errors, up to a constant near 1
        assert abs(values.mean()) < error * math.sqrt(variance)
        assert abs((values**2).mean() - variance) < error * math.sqrt(fourth)
        assert abs((values**3).mean()) < error * 4
        assert abs((values**4).mean() - fourth) < error * 10
    counts = np.histogram(uniform, bins=64, range=(-2, 2))[0]
    chi2 = ((counts - size / 64) ** 2 / (size / 64)).sum()
    assert chi2 < 63 + 5 * math.sqrt(2 * 63)


@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_neighbours_are_uncorrelated(kind):
    rows = initial_rows(kind, np.arange(100_000), 4, seed=0, scale=1.0, dtype=float)
    other = initial_rows(kind, np.arange(100_000), 4, seed=1, scale=1.0, dtype=float)
    for one, two in (
        (rows[:-1], rows[1:]),
        (rows[:-2], rows[2:]),
        (rows[:, :-1], rows[:, 1:]),
        (rows[1:, :-1], rows[:-1, 1:]),
        (rows, other),
    ):
        correlation = np.corrcoef(one.ravel(), two.ravel())[0, 1]
        assert abs(correlation) < 5 / math.sqrt(one.size)


def test_normal_quantile_equals_the_inverse_of_erf():
    central = np.linspace(-0.4999, 0.4999, 4_001)
    tails = 0.5 - 2.0 ** -np.arange(2.0, 53.0)
    q = np.concatenate([central, tails, -tails])
    wanted = np.array([statistics.NormalDist().inv_cdf(value + 0.5) for value in q])
    got = q.copy()
    initializers._normal_quantile(got)
    np.testing.assert_allclose(got, wanted, rtol=1e-14, atol=1e-15)
    below = np.array([math.erfc(-value / math.sqrt(2)) / 2 for value in got])
    np.testing.assert_allclose(below, q + 0.5, rtol=1e-12)


def test_the_same_in_another_process():
    code = (
        "from mpifleet.ps.initializers import *; "
        "print(initial_rows('normal', [12, 5], 2, seed=table_seed(4, 'emb'), scale=0.1).tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    here = initial_rows("normal", [12, 5], 2, seed=table_seed(4, "emb"), scale=0.1).tolist()
    assert done.stdout.strip() == str(here)


def test_bad_arguments_are_named():
    good = {"seed": 0, "scale": 1.0}
    with pytest.raises(ConfigError, match="xavier"):
        initial_rows("xavier", [1], 2, **good)
    with pytest.raises(ConfigError, match="scale"):
        initial_rows("uniform", [1], 2, seed=0, scale=float("nan"))
    with pytest.raises(ConfigError, match="scale=-1"):
        initial_rows("normal", [1], 2, seed=0, scale=-1.0)
    with pytest.raises(ConfigError, match="int32"):
        initial_rows("zeros", [1], 2, dtype=np.int32, **good)
    with pytest.raises(TableError, match="key -3"):
        initial_rows("uniform", [1, -3], 2, **good)
    with pytest.raises(TableError, match="float64"):
        initial_rows("uniform", [1.5], 2, **good)
    with pytest.raises(TableError, match="stride=0"):
        fill_shard(np.empty((2, 2), np.float32), "uniform", 0, 0, **good)


def test_nothing_to_fill():
    for kind in KINDS:
        assert initial_rows(kind, [], 4, seed=0, scale=1.0).shape == (0, 4)
        fill_shard(np.empty((0, 4), np.float32), kind, 0, 1, seed=0, scale=1.0)
    assert initial_rows("constant", [3], 2, seed=0, scale=-0.5).tolist() == [[-0.5, -0.5]]
