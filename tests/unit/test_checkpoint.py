"""Checkpoints: round trips bit for bit, and a previous file that survives every failure."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest

from mpifleet.checkpoint import (
    CHECKPOINT_FORMAT,
    DenseEntry,
    SparseEntry,
    open_checkpoint,
    write_checkpoint,
)
from mpifleet.checkpoint import writer as writer_module
from mpifleet.errors import CheckpointError, StallError

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_ROWS, DIM = 1_003, 4
ODD_NAMES = ["a/b", "..", "100%", "%2F", "fc.1 ü"]


def table(name="emb", *, num_rows=NUM_ROWS, fail_at=None, seed=0):
    generator = np.random.default_rng(seed)
    arrays = {
        slot: generator.normal(size=(num_rows, DIM)).astype(np.float32)
        for slot in ("rows", "exp_avg", "exp_avg_sq")
    }
    asked = []

    def block(first, last):
        asked.append((first, last))
        if fail_at is not None and first >= fail_at:
            raise StallError("server 1 is silent")
        return {slot: array[first:last] for slot, array in arrays.items()}

    attrs = {"seed": 2**62, "initializer": "uniform", "updates": 9, "rule": {"name": "adam"}}
    entry = SparseEntry(name, num_rows, DIM, "float32", ("exp_avg", "exp_avg_sq"), attrs, block)
    return entry, arrays, asked


def content(value=1.0, **table_options):
    weight = np.arange(12, dtype=np.float32).reshape(3, 4).T * np.float32(value)
    dense = [
        DenseEntry("net.weight", weight, {"exp_avg": weight * 2}, 7, {"lr": 0.1}),
        DenseEntry("empty", np.empty((0, 3), np.float64)),
        DenseEntry("scalar", np.float32(np.nan) * np.ones(())),
        *(DenseEntry(name, np.full(2, np.finfo(float).tiny)) for name in ODD_NAMES),
    ]
    buffers = {
        "norm.running_mean": np.array([-0.0, np.inf, 5e-324]),
        "norm.num_batches_tracked": np.array(3, dtype=np.int64),
        "mask": np.array([True, False]),
    }
    meta = {"version": "0.1", "strategy": {"a_sync": True, "k": [1, 2]}, "a/b": None}
    return {
        "dense": dense,
        "sparse": [table(**table_options)[0]],
        "buffers": buffers,
        "meta": meta,
    }


def same_bits(one, two):
    return one.dtype == two.dtype and one.shape == two.shape and one.tobytes() == two.tobytes()


def value_in(directory):
    with open_checkpoint(directory) as checkpoint:
        return checkpoint.dense("net.weight").value[1, 0]


def leftovers(directory):
    return sorted(path.name for path in directory.iterdir() if path.name != "model.h5")


def test_round_trip_is_bitwise(tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "BLOCK_BYTES", 100 * (8 + 3 * DIM * 4))
    entry, arrays, asked = table()
    written = content()
    written["sparse"] = [entry, table("none", num_rows=0)[0]]
    path = write_checkpoint(tmp_path / "new" / "deep", **written)
    assert path == tmp_path / "new" / "deep" / "model.h5"
    assert asked == [(first, min(first + 100, NUM_ROWS)) for first in range(0, NUM_ROWS, 100)]
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
        assert checkpoint.sparse_attrs("emb") == entry.attrs
        for first, last in ((0, NUM_ROWS), (5, 6), (99, 201), (7, 7)):
            block = checkpoint.sparse_block("emb", first, last)
            assert block.keys() == arrays.keys()
            assert all(same_bits(block[slot], arrays[slot][first:last]) for slot in arrays)
        again = checkpoint.sparse("emb")
        assert (again.num_rows, again.dim, again.dtype) == (NUM_ROWS, DIM, "float32")
        assert again.state_names == entry.state_names
        copy = write_checkpoint(tmp_path / "copy", dense=[], sparse=[again], buffers={}, meta={})
    with open_checkpoint(copy) as checkpoint:
        assert same_bits(checkpoint.sparse_block("emb", 0, NUM_ROWS)["rows"], arrays["rows"])


def test_blocks_are_bounded():
    wide = SparseEntry("wide", 10**9, 64, "float32", ("sum",), {}, lambda *_: {})
    first, last = next(writer_module.block_bounds(wide))
    row_bytes = 8 + 2 * 64 * 4
    assert first == 0
    assert 0.99 * (64 << 20) < last * row_bytes <= 64 << 20


def test_plain_h5py_reads_it_and_the_file_has_the_usual_mode(tmp_path):
    mask = os.umask(0o027)
    try:
        path = write_checkpoint(tmp_path, **content())
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert leftovers(tmp_path) == []
    with h5py.File(path, "r") as file:
        assert file.attrs["format_version"] == CHECKPOINT_FORMAT == 1
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
            if len(parts) > 3:
                parts[3] = "<slot>"
            found.update(item.attrs)
        found.add("/" + "/".join(parts))

    with h5py.File(write_checkpoint(tmp_path, **content()), "r") as file:
        found.update(file.attrs)
        file.visititems(visit)
    text = (REPOSITORY / "docs" / "checkpoint-format.md").read_text()
    missing = {name for name in found if f"`{name}`" not in text}
    assert missing == set()
    listed = set(re.findall(r"^\| `([^`]+)` \|", text, flags=re.MULTILINE))
    assert listed - found == set()


def test_a_save_stopped_before_the_rename_leaves_the_previous_file(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, **content(1.0))

    def refuse(source, target):
        with open_checkpoint(source) as whole:  # the temporary was complete by then
            assert whole.dense("net.weight").value[1, 0] == 2.0
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(CheckpointError, match=r"model\.h5.*No space left"):
        write_checkpoint(tmp_path, **content(2.0))
    assert value_in(tmp_path) == 1.0
    assert leftovers(tmp_path) == []


def test_errors_of_a_block_pass_through(tmp_path):
    write_checkpoint(tmp_path, **content(1.0))
    with pytest.raises(StallError, match="server 1 is silent"):
        write_checkpoint(tmp_path, **content(2.0, fail_at=0))
    assert value_in(tmp_path) == 1.0
    assert leftovers(tmp_path) == []


def run_script(body, *arguments, **options):
    """Start `body` in a process that can import this test's content()."""
    head = f"""
        import importlib.util, os, resource, signal, sys
        sys.path.insert(0, {str(REPOSITORY)!r})
        spec = importlib.util.spec_from_file_location("case", {__file__!r})
        case = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(case)
        from mpifleet.checkpoint import write_checkpoint, writer
    """
    code = textwrap.dedent(head) + textwrap.dedent(body)
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


def test_a_writer_killed_half_way_leaves_the_previous_file(tmp_path):
    write_checkpoint(tmp_path, **content(1.0))
    process = run_script(
        """
        writer.BLOCK_BYTES = 4096
        written = case.content(2.0)
        entry = written["sparse"][0]
        read = entry.block
        def block(first, last):
            if first > 500:
                print("half way", flush=True)
                signal.pause()
            return read(first, last)
        entry.block = block
        write_checkpoint(sys.argv[1], **written)
        """,
        tmp_path,
    )
    try:
        assert process.stdout.readline() == "half way\n"
        assert len(leftovers(tmp_path)) == 1
        write_checkpoint(tmp_path, **content(3.0))
        assert len(leftovers(tmp_path)) == 1, "the file of a living writer was removed"
        process.send_signal(signal.SIGKILL)
        assert process.wait(timeout=30) == -signal.SIGKILL
    finally:
        process.kill()
        process.communicate(timeout=30)
    assert value_in(tmp_path) == 3.0
    private = tmp_path / leftovers(tmp_path)[0]
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    with pytest.raises(CheckpointError):
        open_checkpoint(private)
    write_checkpoint(tmp_path, **content(4.0))
    assert leftovers(tmp_path) == []


def test_a_disk_that_fills_up_leaves_the_previous_file(tmp_path):
    write_checkpoint(tmp_path, **content(1.0))
    process = run_script(
        """
        size = os.path.getsize(sys.argv[1] + "/model.h5")
        for limit in range(0, size, size // 40):  # bytes beyond which no file may grow
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            try:
                write_checkpoint(sys.argv[1], **case.content(2.0))
            except case.CheckpointError as error:
                print(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        assert case.value_in(sys.argv[1]) == 1.0
        assert case.leftovers(case.Path(sys.argv[1])) == []
        write_checkpoint(sys.argv[1], **case.content(5.0))
        """,
        tmp_path,
    )
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    lines = len(output.splitlines())
    assert lines > 40, output
    assert output.count(f"cannot write checkpoint {tmp_path}/model.h5: ") == lines, output
    assert output.count("File too large") == lines, output
    assert value_in(tmp_path) == 5.0


def test_too_little_space_is_found_before_writing(tmp_path, monkeypatch):
    monkeypatch.setattr(
        writer_module.os, "statvfs", lambda _: SimpleNamespace(f_bavail=10, f_frsize=512)
    )
    # Three float32 arrays of [1003, 4] and int64 keys, two of [4, 3], a float64, names, buffers.
    needed = 1003 * (8 + 3 * 16) + 2 * 48 + 8 + len(ODD_NAMES) * 16 + (3 * 8 + 8 + 2)
    message = f"model.h5: it needs {needed:,} bytes, 5,120 bytes are free"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        write_checkpoint(tmp_path, **content())
    assert leftovers(tmp_path) == []


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/sub/model\.h5"):
        write_checkpoint(tmp_path / "file" / "sub", **content())
    process = run_script(
        """
        import tempfile
        closed = tempfile.mkdtemp(dir="/tmp")
        os.chmod(closed, 0o555)
        if os.geteuid() == 0:
            os.seteuid(65534)  # root may write everywhere
        try:
            write_checkpoint(closed, **case.content())
        except case.CheckpointError as error:
            print(error)
            assert closed in str(error) and "Permission denied" in str(error)
        else:
            sys.exit("no error")
        finally:
            os.seteuid(os.getuid())
            os.rmdir(closed)
        """
    )
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output


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


def bad_block(change):
    entry, arrays, _ = table()
    entry.block = lambda first, last: change({k: a[first:last] for k, a in arrays.items()})
    return {"sparse": [entry]}


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
        ({"sparse": [SparseEntry("e", 1, 1, "float32", ("rows",), {}, lambda *_: {})]}, "rows"),
        (bad_block(lambda arrays: {"rows": arrays["rows"]}), "block"),
        (bad_block(lambda arrays: {k: a[1:] for k, a in arrays.items()}), "block"),
        (bad_block(lambda arrays: {k: a.astype(float) for k, a in arrays.items()}), "float64"),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path, override, message):
    write_checkpoint(tmp_path, **content(1.0))
    with pytest.raises(CheckpointError, match=message):
        write_checkpoint(tmp_path, **content(2.0) | override)
    assert value_in(tmp_path) == 1.0
    assert leftovers(tmp_path) == []
