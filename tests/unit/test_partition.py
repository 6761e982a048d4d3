"""Index arithmetic: every element has one owner, and look-ups agree with np.unique."""

import itertools

import numpy as np
import pytest

from mpifleet import partition
from mpifleet.errors import ConfigError, KeyRangeError, TableError
from mpifleet.partition import (
    block,
    file_shard,
    owner,
    pieces,
    shard_range,
    shard_rows,
    unique_keys,
)

COUNTS = (1, 2, 3, 7, 16)


@pytest.mark.parametrize(("num_bytes", "aligned"), [(0, 0), (1, 64), (64, 64), (65, 128)])
def test_align_goes_up_to_whole_cache_lines(num_bytes, aligned):
    assert partition.align(num_bytes) == aligned


@pytest.mark.parametrize("num_parts", COUNTS)
@pytest.mark.parametrize("total", [0, 1, 15, 16, 17, 100, 4096, 100_003])
def test_blocks_cover_every_element_once(total, num_parts):
    times_covered = np.zeros(total, np.int64)
    stops = [0]
    for part in range(num_parts):
        start, stop = block(total, num_parts, part)
        assert start == stops[-1], "parts are neighbours, in order"
        times_covered[start:stop] += 1
        stops.append(stop)
    assert (times_covered == 1).all()
    assert stops[-1] == total
    assert all(stop % 16 == 0 for stop in stops if stop != total)


@pytest.mark.parametrize("num_parts", COUNTS)
def test_blocks_are_even(num_parts):
    sizes = [
        stop - start for start, stop in (block(100_003, num_parts, p) for p in range(num_parts))
    ]
    assert max(sizes) <= 100_003 / num_parts + 16


@pytest.mark.parametrize("num_servers", COUNTS)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 16, 101])
def test_every_key_has_one_row_on_one_server(num_rows, num_servers):
    servers, rows = owner(np.arange(num_rows), num_servers)
    assert len(set(zip(servers.tolist(), rows.tolist(), strict=True))) == num_rows
    for server in range(num_servers):
        mine = np.sort(rows[servers == server])
        assert mine.tolist() == list(range(shard_rows(num_rows, num_servers, server)))


@pytest.mark.parametrize("num_servers", COUNTS)
@pytest.mark.parametrize(("first", "last"), [(0, 0), (0, 1), (5, 5), (3, 20), (16, 17), (0, 101)])
def test_a_range_of_keys_is_a_range_of_rows_on_each_server(first, last, num_servers):
    servers, rows = owner(np.arange(first, last), num_servers)
    for server in range(num_servers):
        mine = np.arange(101)[shard_range(first, last, num_servers, server)]
        np.testing.assert_array_equal(mine, rows[servers == server])


@pytest.mark.parametrize(("total", "limit"), [(0, 7), (1, 7), (6, 7), (7, 7), (8, 7), (15, 7)])
def test_pieces_cover_the_range_in_order(total, limit):
    ranges = list(pieces(total, limit))
    assert [i for start, stop in ranges for i in range(start, stop)] == list(range(total))
    assert all(0 < stop - start <= limit for start, stop in ranges)


def check_unique(keys, num_rows, num_servers):
    """Everything UniqueKeys promises, with np.unique as the oracle."""
    found = unique_keys(keys, num_rows, num_servers, "emb")
    flat = keys.reshape(-1).astype(np.int64)
    # Server-major: the distinct keys of server 0 in order, then those of server 1, ...
    distinct = np.unique(flat)
    by_server = [distinct[distinct % num_servers == s] for s in range(num_servers)]
    np.testing.assert_array_equal(found.keys, np.concatenate(by_server))
    np.testing.assert_array_equal(found.bounds, np.cumsum([0, *map(len, by_server)]))
    np.testing.assert_array_equal(found.rows, found.keys // num_servers)
    np.testing.assert_array_equal(found.keys[found.inverse], flat)
    for server, mine in enumerate(by_server):
        np.testing.assert_array_equal(found.keys[found.share(server)], mine)
    stops = [*found.starts.tolist(), flat.size]
    for i, (start, stop) in enumerate(itertools.pairwise(stops)):
        # The positions of each key, increasing: the sort is stable.
        expected = np.flatnonzero(flat == found.keys[i])
        np.testing.assert_array_equal(found.order[start:stop], expected)
    for array in (found.keys, found.rows, found.bounds, found.order, found.starts, found.inverse):
        assert array.dtype == np.int64
    return found


@pytest.mark.parametrize("num_servers", [1, 2, 3, 5])
@pytest.mark.parametrize(("num_keys", "num_rows"), [(1, 1), (40, 3), (200, 100), (50, 10**6)])
def test_unique_keys_agree_with_numpy(num_keys, num_rows, num_servers):
    rng = np.random.default_rng(num_keys + num_servers)
    check_unique(rng.integers(0, num_rows, num_keys), num_rows, num_servers)


@pytest.mark.parametrize("num_servers", [1, 3])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 100])
def test_a_look_up_of_nothing(num_rows, num_servers):
    found = check_unique(np.empty(0, np.int64), num_rows, num_servers)
    assert found.bounds.tolist() == [0] * (num_servers + 1)


def test_more_servers_than_rows():
    check_unique(np.array([1, 0, 1]), 2, 5)


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.uint32, np.uint64])
def test_any_integers_are_keys(dtype):
    check_unique(np.array([[5, 3, 5], [0, 9, 3]], dtype), 10, 3)


@pytest.mark.parametrize(
    "keys",
    [np.arange(24).reshape(4, 6).T, np.arange(24)[::-3], np.asfortranarray([[4, 1], [2, 1]])],
)
def test_keys_in_any_memory_order(keys):
    check_unique(keys, 24, 2)


@pytest.mark.parametrize("num_servers", [1, 2, 3])
@pytest.mark.parametrize("num_rows", [2**55, 2**59, 2**61])
def test_huge_tables_sort_the_other_way_with_the_same_result(num_rows, num_servers):
    rng = np.random.default_rng(1)
    keys = rng.choice(rng.integers(0, num_rows, 40), 300)
    keys[:2] = 0, num_rows - 1
    check_unique(keys, num_rows, num_servers)


def test_packed_sort_and_argsort_are_the_same_sort():
    code = np.random.default_rng(2).integers(0, 50, 1000)
    bits = (1000).bit_length()
    packed, fallback = partition._sorted(code, 50), partition._sorted(code, 1 << (62 - bits))
    largest_packed = partition._sorted(code, (1 << (62 - bits)) - 1)
    for other in (fallback, largest_packed):
        np.testing.assert_array_equal(packed[0], other[0])
        np.testing.assert_array_equal(packed[1], other[1])
    np.testing.assert_array_equal(packed[1], np.argsort(code, kind="stable"))


def test_the_largest_packed_code_keeps_its_bits():
    bound = (1 << 60) - 1  # of 2 keys: 2 bits of position, 60 of code
    sorted_code, order = partition._sorted(np.array([bound - 1, 0]), bound)
    assert sorted_code.tolist() == [0, bound - 1]
    assert order.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("keys", "wrong"),
    [
        (np.array([3, -1, 2]), -1),
        (np.array([3, 100]), 100),
        (np.array([2**63 + 5], np.uint64), 2**63 + 5),
        (np.array([-7], np.int8), -7),
    ],
)
def test_a_key_outside_the_table_is_named(keys, wrong):
    with pytest.raises(KeyRangeError, match=rf"table 'emb': key {wrong} is outside \[0, 100\)"):
        unique_keys(keys, 100, 2, "emb")
    with pytest.raises(IndexError):
        unique_keys(keys, 100, 2, "emb")


@pytest.mark.parametrize("keys", [np.array([1.0]), np.empty(0), np.array([True])])
def test_keys_that_are_no_integers_are_refused(keys):
    with pytest.raises(TableError, match=rf"table 'emb': keys must be integers, not {keys.dtype}"):
        unique_keys(keys, 10, 1, "emb")


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("num_files", [0, 1, 2, 5, 16])
def test_file_shares_are_those_of_fleet(num_files, count):
    files = [f"part-{i:03d}" for i in range(num_files)]
    # Fleet's util.get_file_shard: blocks of len // n, the first len % n get one more.
    size, rest = num_files // count, num_files % count
    sizes = [size + 1] * rest + [size] * (count - rest)
    shares = [file_shard(files, index, count) for index in range(count)]
    assert [len(share) for share in shares] == sizes
    assert list(itertools.chain(*shares)) == files


def test_file_shares_of_what_is_no_list_of_files():
    with pytest.raises(ConfigError, match=r"files = 'a\.txt' is of type str; use a list of names"):
        file_shard("a.txt", 0, 1)
    with pytest.raises(ConfigError, match=r"files = \{'a\.txt'\} is of type set; "):
        file_shard({"a.txt"}, 0, 1)
    with pytest.raises(ConfigError, match=r"is of type ndarray of shape \(1, 1\); "):
        file_shard(np.array([["a.txt"]]), 0, 1)
    with pytest.raises(ConfigError, match=r"worker index 2 is outside 0\.\.1"):
        file_shard(["a", "b"], 2, 2)


def test_an_array_of_files_is_a_list_of_plain_names():
    share = file_shard(np.array(["a", "b", "c"]), 0, 2)
    assert share == ["a", "b"]
    assert {type(name) for name in share} == {str}
