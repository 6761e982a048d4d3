"""Tables' descriptions and where their parts lie in the servers' memory."""

import dataclasses
import json

import numpy as np
import pytest

from mpifleet.ps.rule_spec import RuleSpec
from mpifleet.ps.spec import DenseSpec, TableSpecs, layouts
from tests.unit.table_examples import dense_spec, sparse_spec, two_and_two

SPECS = two_and_two()


def test_sizes():
    assert dense_spec("d", (5, 40, 1)).size == 46
    assert DenseSpec("empty", "float32", RuleSpec("sgd"), ()).size == 0


def test_facts_are_text_by_table():
    facts = SPECS.facts()
    assert list(facts) == ["table 'dense0'", "table 'dense1'", "table 'emb'", "table 'wide'"]
    emb = json.loads(facts["table 'emb'"])
    assert (emb["num_rows"], emb["dim"], emb["rule"]["name"]) == (101, 10, "sgd")


CHANGES = {"name": "x", "num_rows": 5, "dim": 2, "dtype": "float64", "scale": 0.1, "seed": 1}


@pytest.mark.parametrize("field", CHANGES)
def test_every_difference_shows_in_the_facts(field):
    changed = dataclasses.replace(SPECS.sparse[0], **{field: CHANGES[field]})
    other = TableSpecs(SPECS.dense, (changed, *SPECS.sparse[1:]))
    assert other.facts() != SPECS.facts()
    assert two_and_two().facts() == SPECS.facts()


@pytest.mark.parametrize("num_servers", [1, 2, 3, 5, 120])
def test_parts_of_all_servers_hold_every_element_once(num_servers):
    dense = [np.zeros(spec.size, int) for spec in SPECS.dense]
    sparse = [0 for _ in SPECS.sparse]
    for layout in layouts(SPECS, num_servers):
        for times, part in zip(dense, layout.dense, strict=True):
            times[part.start : part.stop] += 1
        sparse = [a + b for a, b in zip(sparse, layout.sparse_rows, strict=True)]
    assert all((times == 1).all() for times in dense)
    assert sparse == [spec.num_rows for spec in SPECS.sparse]


@pytest.mark.parametrize("num_servers", [1, 2, 3, 5, 120])
def test_views_are_aligned_and_do_not_overlap(num_servers):
    for layout in layouts(SPECS, num_servers):
        memory = np.zeros(layout.num_bytes, np.uint8)
        views = [layout.dense_view(memory, t) for t in range(len(SPECS.dense))]
        views += [layout.sparse_view(memory, t) for t in range(len(SPECS.sparse))]
        offsets = [part.offset for part in layout.dense] + layout.sparse_offsets
        assert all(offset % 64 == 0 for offset in offsets)
        for number, view in enumerate(views, start=1):
            assert (view == 0).all(), "no other view covers this one"
            view[...] = number
        for number, view in enumerate(views, start=1):
            assert (view == number).all()
        assert layout.num_bytes % 64 == 0
        padding = layout.num_bytes - sum(view.nbytes for view in views)
        assert 0 <= padding < 64 * len(views)


def test_views_have_the_tables_shapes_and_dtypes():
    layout = layouts(SPECS, 3)[2]
    memory = np.zeros(layout.num_bytes, np.uint8)
    assert layout.sparse_view(memory, 0).shape == (33, 10)
    assert layout.sparse_view(memory, 1).shape == (2, 3)
    assert layout.sparse_view(memory, 1).dtype == np.float64
    assert layout.dense_view(memory, 0).shape == (46 - 32,)
    assert layout.dense_view(memory, 1).dtype == np.float64


def test_a_server_may_have_nothing():
    layout = layouts(TableSpecs((dense_spec("d", (3,)),), (sparse_spec("e", 1, 4),)), 3)[1]
    assert layout.num_bytes == 0
    assert layout.sparse_view(np.zeros(0, np.uint8), 0).shape == (0, 4)
    assert layout.dense_view(np.zeros(0, np.uint8), 0).shape == (0,)


@pytest.mark.parametrize("num_servers", range(1, 10))
@pytest.mark.parametrize("size", [1, 15, 16, 17, 33, 100, 272, 1023, 431_202])
def test_servers_hold_equal_parts_of_every_table(size, num_servers):
    """Within 16 elements, a cache line of float32, and within one row."""
    tables = TableSpecs((dense_spec("d", (size,)),), (sparse_spec("s", size, 3),))
    parts = layouts(tables, num_servers)
    sizes = [part.dense[0].stop - part.dense[0].start for part in parts]
    assert max(sizes) - min(sizes) <= 16
    rows = [part.sparse_rows[0] for part in parts]
    assert max(rows) - min(rows) <= 1
    memory = [part.num_bytes for part in parts]
    assert max(memory) - min(memory) <= 2 * 64, "a line of each table"


def test_servers_hold_equal_parts_of_many_odd_tables():
    rng = np.random.default_rng(5)
    sizes = rng.integers(1, 100_000, 20).tolist()
    tables = TableSpecs(
        tuple(dense_spec(f"d{size}", (size,), dtype="float64") for size in sizes),
        tuple(sparse_spec(f"s{size}", size, 10) for size in sizes),
    )
    memory = [layout.num_bytes for layout in layouts(tables, 7)]
    assert max(memory) - min(memory) <= len(sizes) * (16 * 8 + 10 * 4 + 64)
