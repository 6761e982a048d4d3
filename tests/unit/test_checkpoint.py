"""Checkpoints: round trips bit for bit, the format as documented, and what cannot be written."""

import json
import os
import re
import stat
from dataclasses import replace

import h5py
import numpy as np
import pytest

from mpifleet.checkpoint import (
    CHECKPOINT_FORMAT,
    DenseEntry,
    Keep,
    Newcomer,
    SparseShape,
    digests,
    lay_out,
    newest,
    open_checkpoint,
    write_checkpoint,
    write_parts,
)
from mpifleet.errors import CheckpointError
from mpifleet.ps.saving import SaveOptions
from mpifleet.states import SavedState, State
from tests.unit.checkpoint_content import (
    NUM_ROWS,
    REPOSITORY,
    content,
    leftovers,
    table,
    value_in,
)
from tests.unit.delta_jobs import BASE, DELTA, Job


def same_bits(one, two):
    return one.dtype == two.dtype and one.shape == two.shape and one.tobytes() == two.tobytes()


@pytest.mark.parametrize("block_bytes", [10_000, 1 << 30])
def test_round_trip_is_bitwise(tmp_path, monkeypatch, block_bytes):
    monkeypatch.setattr(digests, "BLOCK_BYTES", block_bytes)
    shape, arrays = table()
    written = content()
    written["sparse"] = [(shape, arrays), table("none", num_rows=0)]
    path = write_checkpoint(tmp_path / "new" / "deep", **written)
    assert path == tmp_path / "new" / "deep" / "model-000001.h5"
    with open_checkpoint(path.parent) as checkpoint:
        assert checkpoint.meta == written["meta"]
        assert checkpoint.dense_names == tuple(each.name for each in written["dense"])
        for wanted in written["dense"]:
            got = checkpoint.dense(wanted.name)
            assert same_bits(got.value, wanted.value)
            assert (got.step, got.attrs) == (wanted.step, wanted.attrs)
            assert got.state.keys() == wanted.state.keys()
            assert all(same_bits(got.state[slot], wanted.state[slot]) for slot in got.state)
        buffers = checkpoint.buffers()
        assert list(buffers) == list(written["buffers"])
        assert all(same_bits(buffers[name], written["buffers"][name]) for name in buffers)
        assert checkpoint.sparse_names == ("emb", "none")
        assert checkpoint.sparse("emb") == shape
        for first, last in ((0, NUM_ROWS), (5, 6), (99, 201), (7, 7)):
            block = checkpoint.sparse_block("emb", first, last)
            assert block.keys() == arrays.keys()
            assert all(same_bits(block[slot], arrays[slot][first:last]) for slot in arrays)


@pytest.mark.parametrize("shards", [1, 2, 5, NUM_ROWS + 3])
def test_rows_lie_in_stretches_and_are_read_in_order(tmp_path, shards):
    """As so many servers would write them: each its own keys, in one piece."""
    shape, arrays = table()
    shape = replace(shape, num_shards=shards)
    order = np.concatenate([np.arange(s, NUM_ROWS, shards) for s in range(shards)])
    newcomer = Newcomer(tmp_path)
    places = lay_out(newcomer, [], [shape], {}, {})
    parts = [(places[shape.path("keys")], order)]
    parts += [(places[shape.path(slot)], a[order]) for slot, a in arrays.items()]
    newcomer.publish(write_parts(newcomer.descriptor, parts), Keep())
    newcomer.close()
    with open_checkpoint(tmp_path) as checkpoint:
        for first, last in ((0, NUM_ROWS), (5, 6), (99, 201), (7, 7)):
            block = checkpoint.sparse_block("emb", first, last)
            assert all(same_bits(block[slot], arrays[slot][first:last]) for slot in arrays)
        some = min(shards, 3) - 1
        own = checkpoint.shard_block("emb", some, 1, 3 if shards < 10 else 1)
        keys = np.arange(some, NUM_ROWS, shards)[1 : 3 if shards < 10 else 1]
        assert same_bits(own["exp_avg"], arrays["exp_avg"][keys])
        with pytest.raises(CheckpointError, match="outside"):
            checkpoint.shard_block("emb", 0, 0, NUM_ROWS // shards + 2)


def test_plain_h5py_reads_it_and_the_file_has_the_usual_mode(tmp_path):
    mask = os.umask(0o027)
    try:
        path = write_checkpoint(tmp_path, **content())
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert leftovers(tmp_path) == []
    with h5py.File(path, "r") as file:
        assert file.attrs["format_version"] == CHECKPOINT_FORMAT == 2
        np.testing.assert_array_equal(file["sparse/emb/keys"][()], np.arange(NUM_ROWS))
        assert json.loads(file["sparse/emb"].attrs["attributes"])["rule"] == {"name": "adam"}
        assert file["dense/net.weight/value"].shape == (4, 3)


def test_the_document_names_every_field_of_a_file_and_no_other(tmp_path):
    found = set()

    def visit(path, item):
        parts = path.split("/")
        if parts[0] != "meta":
            if len(parts) > 1:
                parts[1] = "<name>"
            if parts[0] == "states":
                parts[2:3] = ["<worker>"] * (len(parts) > 2)
                parts[4:5] = ["<array>"] * (len(parts) > 4)
            elif len(parts) > 3:
                parts[3] = "<slot>"
            found.update(item.attrs)
        found.add("/" + "/".join(parts))

    job = Job()
    for options in (BASE, DELTA):
        job.face.save(tmp_path / "chain", options)
    job.face.save(tmp_path / "one", SaveOptions(table="one", level=1))
    states = [SavedState("s", True, [State({}, {"x": np.zeros(2)})])]
    written = write_checkpoint(tmp_path, **content(), states=states)
    for path in (written, newest(tmp_path / "chain"), newest(tmp_path / "one")):
        with h5py.File(path, "r") as file:
            found.update(file.attrs)
            file.visititems(visit)
    text = (REPOSITORY / "docs" / "checkpoint-format.md").read_text()
    missing = {name for name in found if f"`{name}`" not in text}
    assert missing == set()
    listed = set(re.findall(r"^\| `([^`]+)` \|", text, flags=re.MULTILINE))
    assert listed - found == set()


def bad_rows(change):
    shape, arrays = table()
    return {"sparse": [(shape, change(arrays))]}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"dense": [DenseEntry("x", np.array(["text"]))]}, "only numbers"),
        ({"dense": [DenseEntry("x", np.array([{}]))]}, "only numbers"),
        ({"dense": [DenseEntry("x", np.ones(2), {"sum": np.ones(3)})]}, "they must agree"),
        ({"dense": [DenseEntry("x", np.ones(1))] * 2}, "'x' appears twice"),
        ({"dense": [DenseEntry("", np.ones(1))]}, "cannot be the name"),
        ({"meta": {"loss": float("nan")}}, "'loss' is not JSON-able"),
        ({"meta": {"when": np.int64(3)}}, "'when' is not JSON-able"),
        ({"sparse": [(SparseShape("e", 1, 1, "float32", ("rows",), {}), {})]}, "rows"),
        (bad_rows(lambda arrays: {"rows": arrays["rows"]}), "missing"),
        (bad_rows(lambda arrays: {k: a[1:] for k, a in arrays.items()}), "1002"),
        (bad_rows(lambda arrays: {k: a.astype(float) for k, a in arrays.items()}), "float64"),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path, override, message):
    write_checkpoint(tmp_path, **content(1.0))
    with pytest.raises(CheckpointError, match=message):
        write_checkpoint(tmp_path, **content(2.0) | override)
    assert value_in(tmp_path) == 1.0
    assert leftovers(tmp_path) == []


def test_a_path_that_cannot_be_looked_at_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"a{300} cannot be read: File name too long"):
        open_checkpoint(tmp_path / ("a" * 300))
