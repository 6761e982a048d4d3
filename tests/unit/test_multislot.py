"""MultiSlot text of the benchmarks: the same samples again, each line read by one worker."""

import numpy as np
import pytest

from benchmarks import multislot
from mpifleet.data.criteo_synthetic import synthetic_samples
from mpifleet.data.samples import Samples
from mpifleet.errors import DataError

SAMPLES = multislot.rounded(synthetic_samples(700, seed=3))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("multislot") / "train.txt"
    multislot.write(path, SAMPLES)
    return path


def joined(batches):
    return Samples(*(np.concatenate(parts) for parts in zip(*batches, strict=True)))


def assert_same(left, right):
    for name, one, other in zip(Samples._fields, left, right, strict=True):
        assert one.dtype == other.dtype, name
        np.testing.assert_array_equal(one, other, err_msg=name)


def test_a_line_is_the_number_of_values_and_the_values_of_every_slot(text):
    words = text.read_text().splitlines()[5].split(" ")
    labels, dense, ids = (array[5] for array in SAMPLES)
    assert words[0] == "13"
    assert [float(word) for word in words[1:14]] == pytest.approx(dense.tolist())
    assert words[14:66] == [word for value in ids for word in ("1", str(value))]
    assert words[66:] == ["1", str(labels)]


def test_rounding_stays_near():
    exact = synthetic_samples(700, seed=3).dense
    assert np.abs(SAMPLES.dense - exact).max() <= 0.5e-4 + 1e-6
    assert (SAMPLES.dense != exact).any()


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("block_bytes", [100, 5_000, 1 << 18])
def test_stretches_together_hold_every_sample_once(text, monkeypatch, count, block_bytes):
    monkeypatch.setattr(multislot, "BLOCK_BYTES", block_bytes)
    parts = []
    for index in range(count):
        with multislot.read(text, 64, index, count) as batches:
            mine = list(batches)
        assert {batch.num_samples for batch in mine[:-1]} <= {64}
        assert mine[-1].num_samples <= 64
        parts.append(joined(mine))
    assert_same(joined(parts), SAMPLES)


@pytest.mark.parametrize("line", [b"13 1 2\n", b"12" + b" 1" * 67 + b"\n"])
def test_other_slots_are_refused(line):
    with pytest.raises(DataError, match="expected"):
        multislot.parse_block(line)
