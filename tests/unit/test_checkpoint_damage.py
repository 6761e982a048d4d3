"""Files that are damaged, foreign or not what was asked for are refused, with what is wrong."""

import re

import h5py
import numpy as np
import pytest

from mpifleet.checkpoint import (
    open_checkpoint,
    write_checkpoint,
)
from mpifleet.errors import CheckpointError
from tests.unit.checkpoint_content import DIM, NUM_ROWS, content


def edit(path, change):
    with h5py.File(path, "r+") as file:
        change(file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.attrs.__setitem__("format_version", 2), "version 2.*reads version 1"),
        (lambda f: f.attrs.__setitem__("complete", 0), "incomplete"),
        (lambda f: f.attrs.__delitem__("complete"), "incomplete"),
        (lambda f: f.attrs.__setitem__("format", "other"), "not a checkpoint"),
        (lambda f: f.attrs.__delitem__("format"), "not a checkpoint"),
        (lambda f: f.__delitem__("sparse"), "table of contents"),
        (lambda f: f["dense/net.weight"].attrs.__delitem__("index"), "table of contents"),
        (lambda f: f["meta"].attrs.__setitem__("version", "{"), "table of contents"),
    ],
)
def test_files_that_must_be_refused_at_opening(tmp_path, change, message):
    path = write_checkpoint(tmp_path, **content())
    edit(path, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)


def replace_rows(file, data):
    del file["sparse/emb/rows"]
    file["sparse/emb/rows"] = data


@pytest.mark.parametrize(
    ("change", "read", "message"),
    [
        (lambda f: f.__delitem__("dense/net.weight/value"), "dense", "damaged at dense"),
        (
            lambda f: f.__setitem__("dense/net.weight/state/sum", np.ones(5)),
            "dense",
            "state 'sum'.*shape",
        ),
        (lambda f: f.__delitem__("sparse/emb/keys"), "block", "damaged at sparse"),
        (lambda f: f["sparse/emb/keys"].__setitem__(3, 99), "block", "in order"),
        (lambda f: replace_rows(f, np.ones((3, DIM))), "sparse", "num_rows=1003"),
        (lambda f: replace_rows(f, [b"text"] * NUM_ROWS), "block", "not an array of numbers"),
    ],
)
def test_damage_inside_is_named(tmp_path, change, read, message):
    path = write_checkpoint(tmp_path, **content())
    edit(path, change)
    reads = {
        "dense": lambda c: c.dense("net.weight"),
        "sparse": lambda c: c.sparse("emb"),
        "block": lambda c: c.sparse_block("emb", 0, NUM_ROWS),
    }
    with open_checkpoint(path) as checkpoint, pytest.raises(CheckpointError, match=message):
        reads[read](checkpoint)


def test_truncated_missing_and_foreign_files(tmp_path):
    path = write_checkpoint(tmp_path, **content())
    whole = path.read_bytes()
    for length in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="truncated"):
            open_checkpoint(tmp_path)
    path.write_text("epoch 3\n" * 100)
    with pytest.raises(CheckpointError, match="not HDF5"):
        open_checkpoint(path)
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        open_checkpoint(tmp_path / "nowhere")


def test_names_and_bounds_are_checked_when_reading(tmp_path):
    with open_checkpoint(write_checkpoint(tmp_path, **content())) as checkpoint:
        with pytest.raises(CheckpointError, match=r"no dense entry 'bias'.*net\.weight"):
            checkpoint.dense("bias")
        with pytest.raises(CheckpointError, match="no sparse entry 'x'; it has 'emb'"):
            checkpoint.sparse_block("x", 0, 1)
        for first, last in ((-1, 2), (5, 4), (0, NUM_ROWS + 1)):
            with pytest.raises(CheckpointError, match=re.escape(f"[{first}, {last})")):
                checkpoint.sparse_block("emb", first, last)
    checkpoint.close()
