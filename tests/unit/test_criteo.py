"""The Criteo text format against a line-by-line reader written without the package."""

import gzip
import threading

import numpy as np
import pytest

from mpifleet.data import criteo
from mpifleet.errors import ConfigError, DataError

MINIMUM = [0, -3] + [0] * 11
RANGE = [20, 603, 100, 50, 64000, 500, 100, 50, 500, 10, 10, 10, 50]
BITS = 2**64 - 1


def splitmix64(key):
    mixed = (key + 0x9E3779B97F4A7C15) & BITS
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & BITS
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & BITS
    return mixed ^ (mixed >> 31)


def read_line(line, hash_dim=1_000_001):
    fields = line.rstrip("\r\n").split("\t")
    dense = [
        0.0 if text == "" else (float(text) - low) / span
        for text, low, span in zip(fields[1:14], MINIMUM, RANGE, strict=True)
    ]
    ids = [
        splitmix64((slot << 33) | ((text == "") << 32) | int(text or "0", 16)) % hash_dim
        for slot, text in enumerate(fields[14:])
    ]
    return int(fields[0]), np.float32(dense), ids


def make_lines(count, seed=0):
    rng = np.random.default_rng(seed)
    widest = 10 ** rng.integers(1, 15, (count, 13))
    numbers = rng.integers(-3, widest)
    words = rng.integers(0, 2**32, (count, 26))
    blanks = rng.random((count, 39)) < 0.2
    return [
        "\t".join(
            [str(label)]
            + ["" if blank else str(n) for n, blank in zip(ints, empty[:13], strict=True)]
            + ["" if blank else f"{w:08x}" for w, blank in zip(hexes, empty[13:], strict=True)]
        )
        + "\n"
        for label, ints, hexes, empty in zip(
            rng.integers(0, 2, count), numbers, words, blanks, strict=True
        )
    ]


def assert_equal_to_lines(samples, lines, hash_dim=1_000_001):
    labels, dense, ids = zip(*(read_line(line, hash_dim) for line in lines), strict=True)
    np.testing.assert_array_equal(samples.labels, labels)
    np.testing.assert_array_equal(samples.dense, np.stack(dense))
    np.testing.assert_array_equal(samples.ids, ids)
    assert [array.dtype for array in samples] == [np.int64, np.float32, np.int64]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_block_equals_reading_line_by_line(end):
    lines = make_lines(200)
    block = "".join(lines).replace("\n", end).encode()
    assert_equal_to_lines(criteo.parse_block(block), lines)
    assert_equal_to_lines(criteo.parse_block(block[: -len(end)]), lines)


def test_extreme_lines():
    blank = "0" + "\t" * 39 + "\n"
    full = "\t".join(["1"] + ["-123456789012345"] * 13 + ["FFFFffff"] * 26) + "\n"
    block = (blank + full + blank).encode()
    assert_equal_to_lines(criteo.parse_block(block), [blank, full, blank])
    assert criteo.parse_block(b"").num_samples == 0


def test_ids_are_pinned_and_differ_by_slot_and_blank():
    words, blank = np.zeros((2, 26), np.uint64), np.zeros((2, 26), bool)
    blank[1] = True
    ids = criteo.hash_ids(words, blank)
    assert ids[0, 0] == splitmix64(0) % 1_000_001 == 16294208416658607535 % 1_000_001
    assert np.unique(ids).size == 52
    assert criteo.hash_ids(words, blank, 7).max() < 7


@pytest.mark.parametrize("batch_size", [1, 7, 64, 1000])
@pytest.mark.parametrize("block_bytes", [400, 5000, 1 << 20])
def test_batches_run_over_blocks_and_files(tmp_path, batch_size, block_bytes):
    lines = make_lines(150)
    (tmp_path / "a.txt").write_text("".join(lines[:70]))
    with gzip.open(tmp_path / "b.txt.gz", "wt") as stream:
        stream.write("".join(lines[70:]).rstrip("\n"))
    (tmp_path / "empty.txt").write_text("")
    paths = [tmp_path / name for name in ("a.txt", "empty.txt", "b.txt.gz")]
    batches = list(criteo.read_criteo(paths, batch_size, block_bytes=block_bytes))
    assert {b.num_samples for b in batches[:-1]} <= {batch_size}
    joined = batches[0]
    for batch in batches[1:]:
        joined = joined.followed_by(batch)
    assert_equal_to_lines(joined, lines)
    kept = list(criteo.read_criteo(paths, batch_size, block_bytes=block_bytes, drop_last=True))
    assert sum(b.num_samples for b in kept) == 150 // batch_size * batch_size


@pytest.mark.parametrize(
    ("column", "text", "message"),
    [
        (0, "2", "column label holds '2'; expected 0 or 1"),
        (0, "", "column label holds ''; expected 0 or 1"),
        (0, "-1", "column label holds '-1'"),
        (0, "01", "column label holds '01'"),
        (3, "1.5", "column I3 holds '1.5'; expected an integer or a blank"),
        (1, "a", "column I1 holds 'a'"),
        (13, "-", "column I13 holds '-'"),
        (13, "1-2", "column I13 holds '1-2'"),
        (5, "1234567890123456", "column I5 holds '1234567890123456'"),
        (5, "x23456789", "column I5 holds 'x23456789'"),
        (14, "0123456g", "column C1 holds '0123456g'; expected 8 hex digits or a blank"),
        (39, "0123456", "column C26 holds '0123456'"),
        (39, "012345678", "column C26 holds '012345678'"),
        (20, "\xe9" * 4, "column C7 holds"),
        (20, "00000000\t", "41 columns; expected 40"),
    ],
)
def test_broken_line_is_named_after_the_good_batches(tmp_path, column, text, message):
    lines = make_lines(30)
    fields = lines[16].rstrip("\n").split("\t")
    fields[column] = text
    path = tmp_path / "day_0.txt"
    broken = [*lines[:16], "\t".join(fields) + "\n", *lines[17:20], "two\tcolumns\n", *lines[20:]]
    path.write_text("".join(broken), encoding="utf-8")
    for block_bytes in (400, 1 << 20):
        ahead = criteo.read_criteo([path], 1, block_bytes=block_bytes)
        read = []
        with pytest.raises(DataError) as raised:
            read.extend(ahead)
        assert f"{path}:17: " in str(raised.value)
        assert message in str(raised.value)
        assert len(read) <= 16
    assert all(thread.name != "prefetch" for thread in threading.enumerate())


def test_files_that_are_not_text_are_refused(tmp_path):
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress("".join(make_lines(100)).encode())[:-200])
    with pytest.raises(DataError, match=r"x\.gz: not a whole gzip file"):
        list(criteo.read_criteo([path], 10))
    path = tmp_path / "zeros.bin"
    path.write_bytes(bytes(3000))
    with pytest.raises(DataError, match=r"zeros\.bin: no line end"):
        list(criteo.read_criteo([path], 10, block_bytes=1000))
    with pytest.raises(FileNotFoundError):
        list(criteo.read_criteo([tmp_path / "absent"], 10))


def test_sizes_must_be_positive():
    with pytest.raises(ConfigError, match="batch_size=0"):
        criteo.read_criteo([], 0)
    with pytest.raises(ConfigError, match="hash_dim=0"):
        criteo.read_criteo([], 1, hash_dim=0)
