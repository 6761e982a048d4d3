"""Messages: what is decoded is what was encoded, and every section starts on a cache line."""

import numpy as np
import pytest

from mpifleet.ps.message import (
    HEADER_BYTES,
    Header,
    Kind,
    decode_dense,
    decode_rows,
    dense_arrays,
    join,
    lay_out,
    rows_arrays,
)
from mpifleet.ps.rule_spec import HYPER_SIZE
from mpifleet.ps.spec import TableSpecs, layouts
from tests.unit.table_examples import dense_spec, sparse_spec, two_and_two

SPECS = two_and_two()


@pytest.mark.parametrize("kind", Kind)
def test_a_header_comes_back(kind):
    header = Header(kind, 3, 2**40, 2**41, 2**33, 17, 2**42)
    words = header.encode()
    assert words.nbytes == HEADER_BYTES
    lane = np.concatenate([words.view(np.uint8), np.full(100, 255, np.uint8)])
    assert Header.decode(lane) == header


def test_an_unknown_kind_is_no_header():
    with pytest.raises(ValueError, match="99"):
        Header.decode(np.full(8, 99, np.int64).view(np.uint8))


@pytest.mark.parametrize("sizes", [(), (0,), (1,), (64,), (65, 0, 3), (128, 1, 0, 0, 7)])
def test_sections_start_on_cache_lines_in_order(sizes):
    arrays = [np.full(size, i + 1, np.uint8) for i, size in enumerate(sizes)]
    sections, total_bytes = lay_out(arrays)
    whole = join(sections, total_bytes)
    assert whole.size == total_bytes
    assert total_bytes % 64 == 0
    end = 0
    for (offset, _), array in zip(sections, arrays, strict=True):
        assert offset % 64 == 0
        assert end <= offset < end + 64
        np.testing.assert_array_equal(whole[offset : offset + array.size], array)
        end = offset + array.size
    assert int(whole.sum()) == sum(int(array.sum()) for array in arrays), "padding is zero"


def test_encoding_copies_nothing():
    array = np.arange(4.0)
    sections, _ = lay_out([array])
    assert sections[0][1] is array


def random_dense(rng, specs):
    hypers = rng.normal(size=(len(specs.dense), HYPER_SIZE))
    present = [rng.integers(0, 2, len(spec.params)).astype(np.uint8) for spec in specs.dense]
    flats = [rng.normal(size=spec.size).astype(spec.dtype) for spec in specs.dense]
    return hypers, present, flats


@pytest.mark.parametrize("num_servers", [1, 2, 3, 7])
@pytest.mark.parametrize("seed", range(5))
def test_dense_messages_round_trip(seed, num_servers):
    rng = np.random.default_rng(seed)
    sizes = [tuple(rng.integers(0, 50, rng.integers(1, 6)).tolist()) for _ in range(2)]
    specs = TableSpecs((dense_spec("a", sizes[0]), dense_spec("b", sizes[1], dtype="float64")), ())
    hypers, present, flats = random_dense(rng, specs)
    received = [np.full_like(flat, np.nan) for flat in flats]
    for layout in layouts(specs, num_servers):
        message = join(*lay_out(dense_arrays(layout, hypers, present, flats)))
        assert message.size == layout.dense_message_bytes
        for table, gradient in enumerate(decode_dense(layout, message)):
            np.testing.assert_array_equal(gradient.hyper, hypers[table])
            np.testing.assert_array_equal(gradient.present, present[table])
            part = layout.dense[table]
            received[table][part.start : part.stop] = gradient.values
            assert gradient.values.dtype == flats[table].dtype
    for flat, got in zip(flats, received, strict=True):
        np.testing.assert_array_equal(got, flat)


@pytest.mark.parametrize("seed", range(12))
def test_rows_messages_round_trip(seed):
    rng = np.random.default_rng(seed)
    specs = TableSpecs(
        (),
        tuple(
            sparse_spec(f"t{i}", 1000, int(rng.integers(1, 70)), dtype=dtype)
            for i, dtype in enumerate(
                rng.choice(["float32", "float64"], rng.integers(1, 5)).tolist()
            )
        ),
    )
    hypers = rng.normal(size=(len(specs.sparse), HYPER_SIZE))
    counts = rng.integers(0, 40, len(specs.sparse)).tolist()
    rows = [rng.permutation(1000)[:count] for count in counts]
    values = [
        rng.normal(size=(count, spec.dim)).astype(spec.dtype)
        for spec, count in zip(specs.sparse, counts, strict=True)
    ]
    num_pushed = rng.integers(0, 2**40, len(specs.sparse)).tolist()
    message = join(*lay_out(rows_arrays(hypers, rows, values, num_pushed)))
    gradients = decode_rows(specs, message)
    for table, gradient in enumerate(gradients):
        np.testing.assert_array_equal(gradient.hyper, hypers[table])
        np.testing.assert_array_equal(gradient.rows, rows[table])
        assert gradient.num_pushed == num_pushed[table]
        np.testing.assert_array_equal(gradient.values, values[table])
        assert gradient.values.dtype == values[table].dtype
        assert gradient.values.shape == values[table].shape
        assert np.shares_memory(gradient.values, message) == bool(values[table].size)


def test_a_push_of_no_rows():
    empties = [np.empty((0, spec.dim), spec.dtype) for spec in SPECS.sparse]
    none = [np.empty(0, np.int64) for _ in SPECS.sparse]
    message = join(*lay_out(rows_arrays(np.zeros((2, HYPER_SIZE)), none, empties, [0, 9])))
    assert [g.values.shape for g in decode_rows(SPECS, message)] == [(0, 10), (0, 3)]


def test_a_job_without_sparse_tables():
    message = join(*lay_out(rows_arrays(np.zeros((0, HYPER_SIZE)), [], [], [])))
    assert message.size == 0
    assert decode_rows(TableSpecs(SPECS.dense, ()), message) == []
