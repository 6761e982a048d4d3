"""Files that are damaged, foreign or not what was asked for are refused, with what is wrong."""

import re

import h5py
import numpy as np
import pytest

from mpifleet.checkpoint import check, digests, open_checkpoint, write_checkpoint
from mpifleet.checkpoint.digests import Sums, digest_rest, sums_path
from mpifleet.errors import CheckpointError
from tests.unit.checkpoint_content import DIM, NUM_ROWS, content


def edit(path, change):
    """Change the file and let its digests follow: what is left to find is not mere damage."""
    with h5py.File(path, "r+") as file:
        change(file)
    with open(path, "rb") as file:
        sums = Sums.of_blocks(digest_rest(file.fileno(), []))
    sums_path(path).write_text(sums.text())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.attrs.__setitem__("format_version", 3), "version 3.*reads versions 1, 2"),
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
        (lambda f: replace_rows(f, [b"text"] * NUM_ROWS), "block", "rows and state"),
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


def test_truncation_anywhere_is_refused(tmp_path):
    path = write_checkpoint(tmp_path, **content())
    whole = path.read_bytes()
    for percent in range(100):
        path.write_bytes(whole[: len(whole) * percent // 100])
        with pytest.raises(CheckpointError, match=f"{path.name} is truncated: it has "):
            open_checkpoint(tmp_path)
    path.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match="truncated"):
        open_checkpoint(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(CheckpointError, match="too long"):
        open_checkpoint(path)


def test_any_flipped_bit_is_refused_before_hdf5_sees_it(tmp_path, monkeypatch):
    path = write_checkpoint(tmp_path, **content())
    whole = path.read_bytes()
    monkeypatch.setattr(h5py, "File", lambda *_, **__: pytest.fail("HDF5 was asked"))
    generator = np.random.default_rng(3)
    for at in generator.integers(0, 8 * len(whole), 300).tolist():
        flipped = bytearray(whole)
        flipped[at // 8] ^= 1 << at % 8
        path.write_bytes(flipped)
        with pytest.raises(CheckpointError, match="is damaged: bytes"):
            open_checkpoint(path)


@pytest.mark.parametrize("share", range(3))
def test_ranks_that_share_the_check_find_what_is_in_theirs(tmp_path, monkeypatch, share):
    monkeypatch.setattr(digests, "BLOCK_BYTES", 4096)
    path = write_checkpoint(tmp_path, **content())
    blocks = Sums.read(path).blocks
    assert len(blocks) > 6
    whole = bytearray(path.read_bytes())
    whole[blocks[3 + share].start] ^= 1
    path.write_bytes(whole)
    for rank in range(3):
        if rank == share:
            with pytest.raises(CheckpointError, match=f"bytes {blocks[3 + share].start} to"):
                check(path, rank, 3)
        else:
            check(path, rank, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: "", "damaged"),
        (lambda _: "[]", "damaged"),
        (lambda text: text.replace('"format": 1', '"format": 9'), "format 9"),
        (lambda text: text.replace('"size": ', '"size": 1'), "its blocks have"),
        (lambda text: text.replace("[\n[0, ", "[\n[1, "), "have no digest"),
        (lambda text: text.replace('"hash": "xxh3-128"', '"hash": "md5"'), "md5"),
    ],
)
def test_damaged_digests_are_named(tmp_path, change, message):
    path = write_checkpoint(tmp_path, **content())
    sums = sums_path(path)
    text = sums.read_text()
    assert change(text) != text
    sums.write_text(change(text))
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(path)
    assert sums.name in str(caught.value)


def test_missing_and_foreign_files(tmp_path):
    path = write_checkpoint(tmp_path, **content())
    whole = path.read_bytes()
    sums_path(path).unlink()
    with pytest.raises(CheckpointError, match=r"incomplete: its digests \(.*\.sums\) are missing"):
        open_checkpoint(path)
    with pytest.raises(CheckpointError, match="holds no complete"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.h5").write_bytes(whole)
    with pytest.raises(CheckpointError, match="incomplete"):
        open_checkpoint(tmp_path / "model.h5")
    (tmp_path / "model.h5").write_text("epoch 3\n" * 100)
    with pytest.raises(CheckpointError, match="not HDF5"):
        open_checkpoint(tmp_path)
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
