"""`mpifleet inspect`: contents, statistics, rows and differences, as numpy has them."""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace

import h5py
import numpy as np
import pytest

from mpifleet.checkpoint import (
    Checkpoint,
    DenseEntry,
    Keep,
    Newcomer,
    SparseShape,
    blocks,
    check,
    digests,
    lay_out,
    write_checkpoint,
    write_parts,
)
from mpifleet.cli import bytes_read, inspect
from mpifleet.cli import main as cli
from mpifleet.cli.bytes_read import BytesRead
from mpifleet.cli.printed import Columns, show
from mpifleet.cli.row_statistics import RowStatistics
from mpifleet.states import SavedState, State
from mpifleet.strategy import DistributedStrategy
from tests.unit.checkpoint_content import DIM, NUM_ROWS, content, table

ANSI = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")
ALL = Keep(last=9)


def save(directory, **changes):
    return write_checkpoint(directory, **{**content(), **changes}, keep=ALL)


def save_in_stretches(directory, shape, arrays, shards):
    """As so many servers would write a table: each its own keys, in one piece."""
    shape = replace(shape, num_shards=shards)
    order = np.concatenate([np.arange(s, shape.num_rows, shards) for s in range(shards)])
    newcomer = Newcomer(directory)
    places = lay_out(newcomer, [], [shape], {}, {})
    parts = [(places[shape.path("keys")], order)]
    parts += [(places[shape.path(slot)], a[order]) for slot, a in arrays.items()]
    path = newcomer.publish(write_parts(newcomer.descriptor, parts), ALL)
    newcomer.close()
    return path


def save_version_1(directory):
    path = save(directory)
    with h5py.File(path, "r+") as file:
        file.attrs["format_version"] = 1
        del file["sparse/emb"].attrs["num_shards"]
    for other in ("latest", path.name + ".sums"):
        (directory / other).unlink()
    return path.rename(directory / "model.h5")


def save_array(directory, values, name="w"):
    return save(directory, dense=[DenseEntry(name, values)], sparse=[])


@pytest.fixture
def inspected(capsys):
    """(exit status, stdout) of `mpifleet inspect` with these words, nothing on stderr."""

    def call(*words):
        status = cli.main(["inspect", *map(str, words)])
        captured = capsys.readouterr()
        assert captured.err == ""
        return status, captured.out

    return call


@pytest.fixture
def found(inspected):
    """The object that --json prints, strictly JSON; status 0, or 1 for a difference."""

    def call(*words, status=0):
        got, out = inspected(*words, "--json")
        assert got == status
        return json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))

    return call


@pytest.fixture
def refused(capsys):
    """The one line on stderr of a command that ends with status 2 and prints nothing else."""

    def call(*words):
        assert cli.main(["inspect", *map(str, words)]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("mpifleet: error: ")
        assert captured.err.count("\n") == 1
        return captured.err

    return call


def cells(text, first):
    """The words of the line that begins with `first`, columns two blanks apart."""
    line = next(line for line in text.splitlines() if line.startswith(first))
    return re.split(r"  +", line)


# What it holds.


def test_contents_as_json(tmp_path, found):
    path = save(tmp_path)
    got = found(path)
    assert got["path"] == str(path)
    assert got["bytes"] == path.stat().st_size
    assert got["format_version"] == 2
    assert got["meta"] == content()["meta"]
    assert "complete" not in got, "a file was asked for"
    weight = got["dense"][0]
    assert weight["name"] == "net.weight"
    assert (weight["shape"], weight["dtype"], weight["updates"]) == ([4, 3], "float32", 7)
    assert (weight["state"], weight["bytes"]) == (["exp_avg"], 2 * 4 * 3 * 4)
    assert [each["name"] for each in got["dense"]] == [e.name for e in content()["dense"]]
    assert {e["name"]: e["shape"] for e in got["dense"]}["scalar"] == []
    (emb,) = got["sparse"]
    assert (emb["rows"], emb["dim"], emb["dtype"]) == (NUM_ROWS, DIM, "float32")
    assert (emb["stretches"], emb["rule"]) == (1, {"name": "adam"})
    assert emb["bytes"] == NUM_ROWS * (8 + 3 * DIM * 4)
    assert {e["name"]: (e["dtype"], e["bytes"]) for e in got["buffers"]} == {
        "norm.running_mean": ("float64", 24),
        "norm.num_batches_tracked": ("int64", 8),
        "mask": ("bool", 2),
    }


def test_contents_as_text(tmp_path, inspected):
    shape, arrays = table()
    shape = replace(shape, attrs={"rule": "adam", "step": 1234})
    path = save(tmp_path, sparse=[(shape, arrays)])
    os.utime(path, (0, 86_400))
    status, text = inspected(path)
    assert status == 0
    assert cells(text, "file")[1] == str(path)
    assert cells(text, "format") == ["format", "version 2"]
    assert cells(text, "written") == ["written", "1970-01-02 00:00:00 UTC"]
    assert cells(text, "net.weight") == [
        *("net.weight", "4 x 3", "float32", "7", "-", "exp_avg", "96 B")
    ]
    assert cells(text, "emb") == [
        *("emb", "1,003", "4", "float32", "1", "1,234", "adam", "exp_avg, exp_avg_sq", "54.9 KiB")
    ]
    assert cells(text, "norm.num") == ["norm.num_batches_tracked", "scalar", "int64", "8 B"]
    assert not ANSI.search(text)


def test_a_table_in_stretches_says_so(tmp_path, found):
    path = save_in_stretches(tmp_path, *table(), shards=5)
    assert found(path)["sparse"][0]["stretches"] == 5


def test_a_directory_names_its_complete_checkpoints_and_the_newest_counts(tmp_path, inspected):
    paths = [save(tmp_path) for _ in range(4)]
    (tmp_path / (paths[1].name + ".sums")).unlink()
    (tmp_path / "latest").write_text(paths[2].name)
    _, text = inspected(tmp_path)
    assert cells(text, "complete") == ["complete", "1, 3, 4"]
    assert cells(text, "file")[1] == str(paths[2])


def test_the_strategy_is_told_by_what_differs(tmp_path, inspected, found):
    strategy = DistributedStrategy()
    strategy.pull_ahead = 3
    strategy.a_sync_configs = {"staleness": 2}
    saved = strategy.to_dict() | {"of_a_later_version": [1]}
    path = save(tmp_path, meta={"strategy": saved, "package": "9.8"})
    _, text = inspected(path)
    lines = {line.split("  ")[-1] for line in text.splitlines() if " = " in line}
    assert lines == {"pull_ahead = 3", "a_sync_configs.staleness = 2", "of_a_later_version = [1]"}
    assert cells(text, "package")[1] == "9.8"
    assert found(path)["meta"]["strategy"] == saved
    plain = save(tmp_path, meta={"strategy": DistributedStrategy().to_dict()})
    assert cells(inspected(plain)[1], "strategy") == ["strategy", "all defaults"]


def test_names_cannot_command_the_terminal(tmp_path, inspected):
    path = save(tmp_path, buffers={"\x1b[31mred": np.ones(1)}, meta={"note": "\x1b]0;x\x07"})
    _, text = inspected(path)
    assert "\\x1b[31mred" in text
    assert "\x1b" not in text
    assert "\x07" not in text


def test_version_1_is_shown(tmp_path, found):
    save_version_1(tmp_path)
    got = found(tmp_path)
    assert (got["format_version"], got["complete"]) == (1, [])
    assert got["sparse"][0]["stretches"] == 1
    assert found(tmp_path, "--table", "emb")["statistics"]["rows"]["count"] == NUM_ROWS


def test_on_a_terminal_nothing_is_wider_than_80_columns(tmp_path, inspected, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")
    long = "tower.of.many.layers.0.block.attention.projection.of.the.values.weight"
    shape, arrays = table(long)
    shape = replace(shape, attrs={"rule": "momentum", "step": 123_456_789})
    dense = [DenseEntry(long, np.ones((300, 200, 3, 3)), {}, 123_456, {"rule": "adagrad"})]
    monkeypatch.chdir(tmp_path)
    for add in (0, 1):
        changed = {slot: a + np.float32(add) for slot, a in arrays.items()}
        save(tmp_path / "c", sparse=[(shape, changed)], dense=dense)
    for words in ([], ["--table", long], ["--diff", "c/model-000001.h5"]):
        _, colored = inspected("c", *words)
        text = ANSI.sub("", colored)
        assert max(map(len, text.splitlines()[1:])) <= 80, text
        assert colored != text, "headings are bold there"
        assert "…" not in text, "folded, not cut"
    text = ANSI.sub("", inspected("c")[1])
    assert {"1,003", "float32", "float64", "123,456,789", "momentum", "exp_avg_sq"} < {
        *text.split()
    }


def test_numbers_and_short_cells_are_never_folded(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "45")
    monkeypatch.setenv("TERM", "xterm-256color")
    row = ("name " * 9, "exp_avg_sq", "123,456,789,012,345,678")
    show([Columns([row], ("name", "state", "rows"), frozenset({2}))])
    lines = ANSI.sub("", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= 45
    assert lines[1].endswith(" exp_avg_sq 123,456,789,012,345,678")


# A table's rows.


def special_table():
    """With rows of zeros, NaN and infinity, and one row that is longer than all others."""
    shape, arrays = table(seed=1)
    arrays["rows"][[3, 500]] = 0
    arrays["rows"][[2, 7, 8, 9, 600, 601, 1002], 1] = np.nan
    arrays["rows"][601] = np.inf
    arrays["rows"][77] = [30, 0, -40, 0]
    arrays["exp_avg_sq"] = np.abs(arrays["exp_avg_sq"])
    return shape, arrays


@pytest.mark.parametrize("block_bytes", [3_000, 16 << 20])
@pytest.mark.parametrize("shards", [1, 3])
def test_statistics_are_numpys(tmp_path, found, monkeypatch, shards, block_bytes):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", block_bytes)
    shape, arrays = special_table()
    path = save_in_stretches(tmp_path, shape, arrays, shards)
    got = found(path, "--table", "emb")
    assert (got["table"], got["rows"], got["dim"]) == ("emb", NUM_ROWS, DIM)
    assert list(got["statistics"]) == ["rows", "exp_avg", "exp_avg_sq"]
    for slot, statistics in got["statistics"].items():
        values = arrays[slot].astype(np.float64)
        good = values[np.isfinite(values).all(axis=1)]
        norms = np.linalg.norm(values, axis=1)
        norms[~np.isfinite(values).all(axis=1)] = -1
        assert statistics["count"] == NUM_ROWS
        assert statistics["zero_rows"] == (2 if slot == "rows" else 0)
        assert statistics["nonfinite_rows"] == (7 if slot == "rows" else 0)
        keys = [2, 7, 8, 9, 600] if slot == "rows" else []
        assert statistics["nonfinite_first_keys"] == keys
        assert (statistics["min"], statistics["max"]) == (good.min(), good.max())
        assert statistics["mean"] == pytest.approx(good.mean(), rel=1e-12, abs=1e-15)
        assert statistics["norm_mean"] == pytest.approx(norms[norms >= 0].mean(), rel=1e-12)
        assert statistics["norm_max"] == pytest.approx(norms.max(), rel=1e-12)
        assert statistics["norm_max_key"] == norms.argmax()
    assert got["statistics"]["rows"]["norm_max_key"] == 77


def test_statistics_as_text(tmp_path, inspected):
    shape, arrays = special_table()
    _, text = inspected(save(tmp_path, sparse=[(shape, arrays)]), "--table", "emb")
    assert cells(text, "with NaN or Inf") == ["with NaN or Inf", "7", "0", "0"]
    assert cells(text, "their first keys")[1] == "2, 7, 8, 9, 600, ..."
    assert cells(text, "max")[1] == "30"
    assert cells(text, "min")[1] == "-40"
    assert cells(text, "2-norm, max")[1] == "50"
    assert cells(text, "key of that")[1] == "77"
    assert text.splitlines()[-1].endswith("of the rows without NaN or Inf")


def test_statistics_of_no_rows(tmp_path, found, inspected):
    path = save(tmp_path, sparse=[table("none", num_rows=0)])
    got = found(path, "--table", "none")["statistics"]["rows"]
    assert got["count"] == 0
    assert got["min"] is got["mean"] is got["norm_max"] is got["norm_max_key"] is None
    assert cells(inspected(path, "--table", "none")[1], "mean")[1] == "-"


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_norms_hold_where_squares_leave_the_range(size):
    statistics = RowStatistics()
    statistics.add(5, np.array([[3.0, 4.0], [0.0, 0.0]]) * size)
    got = statistics.result()
    assert got["norm_max"] == pytest.approx(5 * size)
    assert (got["norm_max_key"], got["zero_rows"]) == (5, 1)


@pytest.mark.parametrize("shards", [1, 4])
def test_one_row_by_its_key(tmp_path, found, inspected, shards):
    shape, arrays = special_table()
    path = save_in_stretches(tmp_path, shape, arrays, shards)
    got = found(path, "--table", "emb", "--key", 77)
    assert got["key"] == 77
    assert got["values"] == {slot: a[77].tolist() for slot, a in arrays.items()}
    infinite = found(path, "--table", "emb", "--key", 601)["values"]["rows"]
    assert infinite == ["Infinity"] * DIM
    _, text = inspected(path, "--table", "emb", "--key", NUM_ROWS - 1)
    last = [str(a[-1, 1]) for a in arrays.values()]
    lines = [line.split() for line in text.splitlines()]
    assert ["1", *last] in lines
    assert last[0] == "nan"


# What changed.


@pytest.mark.parametrize("block_bytes", [3_000, 16 << 20])
def test_the_same_is_identical_whatever_the_stretches(
    tmp_path, inspected, found, monkeypatch, block_bytes
):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", block_bytes)
    shape, arrays = special_table()
    one = save_in_stretches(tmp_path, shape, arrays, 1)
    two = save_in_stretches(tmp_path, shape, arrays, 3)
    status, text = inspected(one, "--diff", two)
    assert (status, text.splitlines()[-1]) == (0, "identical")
    got = found(one, "--diff", two)
    assert (got["identical"], got["facts"]) == (True, [])
    assert [a["array"] for a in got["arrays"]] == ["rows", "exp_avg", "exp_avg_sq"]
    assert all(a["elements"] == NUM_ROWS * DIM for a in got["arrays"])
    one, two = save(tmp_path), save(tmp_path)
    assert found(one, "--diff", two)["identical"], "all kinds, NaN among them"


@pytest.mark.parametrize("block_bytes", [3_000, 16 << 20])
@pytest.mark.parametrize("shards", [1, 3])
def test_changed_rows_are_counted_and_named(
    tmp_path, found, inspected, monkeypatch, shards, block_bytes
):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", block_bytes)
    shape, arrays = special_table()
    one = save_in_stretches(tmp_path, shape, arrays, 1)
    after = {slot: a.copy() for slot, a in arrays.items()}
    keys = [4, 11, 12, 400, 401, 1000]
    after["rows"][keys, 2] += np.float32([1, 2, 3, 4, -50, 6])
    after["rows"][4, 0] = np.nan
    two = save_in_stretches(tmp_path, shape, after, shards)
    got = {a["array"]: a for a in found(one, "--diff", two, status=1)["arrays"]}
    finite = np.isfinite(after["rows"]) & np.isfinite(arrays["rows"])
    gaps = np.abs(after["rows"][finite].astype(float) - arrays["rows"][finite].astype(float))
    assert got["rows"] == {
        "kind": "sparse",
        "name": "emb",
        "array": "rows",
        "elements": NUM_ROWS * DIM,
        "changed": 7,
        "changed_nonfinite": 1,
        "largest_difference": gaps.max(),
        "changed_rows": 6,
        "changed_first_keys": keys[:5],
    }
    assert got["exp_avg"]["changed"] == 0
    status, text = inspected(one, "--diff", two)
    assert status == 1
    assert cells(text, "sparse emb")[1:4] == ["rows", "7", "4,012"]
    assert "4, 11, 12, 400, 401, ..." in text
    assert "1 NaN/Inf" in text
    assert text.splitlines()[-1] == "2 of 3 arrays are identical"
    assert "exp_avg" not in text


@pytest.mark.parametrize(
    ("one", "two", "changed", "nonfinite", "largest"),
    [
        (np.array([-(2**63), 5]), np.array([2**63 - 1, 5]), 1, 0, 2**64 - 1),
        (np.array([1, 2], np.int8), np.array([1, 3], np.int8), 1, 0, 1),
        (np.array([True, False]), np.array([False, False]), 1, 0, 1),
        (np.array([0.0, np.nan]), np.array([-0.0, np.nan]), 0, 0, None),
        (np.array([np.inf, np.nan]), np.array([-np.inf, 1.0]), 2, 2, None),
        (np.array([np.inf, 1.0]), np.array([np.inf, 4.0]), 1, 0, 3.0),
        (np.array(2.0), np.array(2.5), 1, 0, 0.5),
        (np.array([-1e308]), np.array([1e308]), 1, 0, "Infinity"),
        (np.float16([1.0]), np.float16([1.5]), 1, 0, 0.5),
    ],
)
def test_largest_differences(tmp_path, found, one, two, changed, nonfinite, largest):
    words = [save_array(tmp_path, one), "--diff", save_array(tmp_path, two)]
    got = found(*words, status=1 if changed else 0)
    array = got["arrays"][0]
    assert (array["name"], array["elements"], array["changed"]) == ("w", one.size, changed)
    assert (array["changed_nonfinite"], array["largest_difference"]) == (nonfinite, largest)
    assert "changed_rows" not in array


def fact(kind, name, what, first, second):
    return {"kind": kind, "name": name, "what": what, "first": first, "second": second}


def test_facts_that_differ(tmp_path, found, inspected):
    shape, arrays = table()
    wide = SparseShape("emb", NUM_ROWS, 1, "float64", (), {"rule": "sgd", "seed": 1})
    one = save(
        tmp_path,
        dense=[
            DenseEntry("a", np.ones(3), {"sum": np.ones(3)}, 7, {"rule": "adagrad"}),
            DenseEntry("gone", np.ones(1)),
        ],
        sparse=[(replace(shape, attrs={"rule": "adam", "seed": 1}), arrays)],
        meta={"package": "1", "strategy": {"a_sync": True, "bytes": 3}},
    )
    two = save(
        tmp_path,
        dense=[DenseEntry("a", np.ones(3), {}, 8, {"rule": "sgd"})],
        sparse=[(wide, {"rows": np.ones((NUM_ROWS, 1))})],
        buffers={**content()["buffers"], "mask": np.ones(2), "new": np.ones(1)},
        meta={"package": "2", "strategy": {"a_sync": True, "bytes": 4}},
    )
    got = found(one, "--diff", two, status=1)
    wanted = [
        fact("meta", "package", "value", "1", "2"),
        fact("meta", "strategy", "bytes", 3, 4),
        fact("dense", "a", "updates", 7, 8),
        fact("dense", "a", "rule", "adagrad", "sgd"),
        fact("dense", "a", "state", ["sum"], []),
        fact("dense", "gone", "present", True, False),
        fact("sparse", "emb", "dim", DIM, 1),
        fact("sparse", "emb", "dtype", "float32", "float64"),
        fact("sparse", "emb", "rule", "adam", "sgd"),
        fact("sparse", "emb", "state", ["exp_avg", "exp_avg_sq"], []),
        fact("buffers", "mask", "dtype", "bool", "float64"),
        fact("buffers", "new", "present", False, True),
    ]
    assert sorted(map(str, got["facts"])) == sorted(map(str, wanted))
    compared = [(a["kind"], a["name"], a["array"]) for a in got["arrays"]]
    assert compared == [
        ("dense", "a", "value"),
        ("buffers", "norm.running_mean", "value"),
        ("buffers", "norm.num_batches_tracked", "value"),
    ]
    _, text = inspected(one, "--diff", two)
    assert cells(text, "dense gone") == ["dense gone", "present", "true", "false"]
    assert text.splitlines()[-1] == "3 of 3 arrays are identical"


@pytest.mark.parametrize("slot", ["exp_avg", "value"])
def test_a_change_of_state_alone_is_found(tmp_path, found, slot):
    before, after = (
        [DenseEntry("w", np.ones((4, 3)), {slot: np.full((4, 3), state)})] for state in (2.0, 2.25)
    )
    paths = [save(tmp_path, dense=dense) for dense in (before, after)]
    got = found(paths[0], "--diff", paths[1], status=1)
    assert [a["changed"] for a in got["arrays"] if a["name"] == "w"] == [0, 12]
    (array,) = [a for a in got["arrays"] if a["changed"]]
    assert (array["name"], array["array"], array["changed"]) == ("w", slot, 12)
    assert array["largest_difference"] == 0.25


def test_the_state_that_both_have_is_compared(tmp_path, found, block_sizes):
    """In blocks of the same keys, which are small enough for the one with more state."""
    shape, arrays = table()
    less = {slot: arrays[slot] for slot in ("rows", "exp_avg")}
    one = save(tmp_path, sparse=[(shape, arrays)])
    two = save(tmp_path, sparse=[(replace(shape, state_names=("exp_avg",)), less)])
    for words in ((one, "--diff", two), (two, "--diff", one)):
        got = found(*words, status=1)
        tables = [a for a in got["arrays"] if a["kind"] == "sparse"]
        assert [(a["array"], a["changed"]) for a in tables] == [("rows", 0), ("exp_avg", 0)]
    assert max(block_sizes) <= 2_000


# Memory.


@pytest.fixture
def block_sizes(monkeypatch):
    """Bytes of every block of a table, parameter or buffer that is read."""
    sizes = []

    def counted(name):
        read = getattr(Checkpoint, name)

        def call(*arguments):
            got = read(*arguments)
            sizes.append(sum(a.nbytes for a in got.values()) if name[0] == "s" else got.nbytes)
            return got

        monkeypatch.setattr(Checkpoint, name, call)

    for name in ("sparse_block", "dense_block", "buffer_block"):
        counted(name)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 2_000)
    return sizes


@pytest.mark.parametrize(("block_bytes", "rows"), [(1, 1), (56, 1), (111, 1), (112, 2), (9999, 5)])
def test_blocks_of_keys_cover_a_table(monkeypatch, block_bytes, rows):
    """A row of 4 float32 with two slots and its key has 56 bytes."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", block_bytes)
    found = list(blocks.key_blocks(table(num_rows=5)[0]))
    assert found == [(first, min(first + rows, 5)) for first in range(0, 5, rows)]


def test_a_table_is_read_in_blocks(tmp_path, inspected, block_sizes):
    path = save_in_stretches(tmp_path, *table(), shards=3)
    inspected(path)
    assert block_sizes == [], "a list of contents reads no array"
    inspected(path, "--table", "emb")
    assert sum(block_sizes) == NUM_ROWS * DIM * 4 * 3
    assert max(block_sizes) <= 2_000
    block_sizes.clear()
    inspected(path, "--table", "emb", "--key", 3)
    assert block_sizes == [DIM * 4 * 3]


def test_two_checkpoints_are_compared_in_blocks(tmp_path, inspected, block_sizes):
    values = np.arange(5 * 7 * 90, dtype=np.float64).reshape(5, 7, 90)
    dense, buffers = [DenseEntry("w", values)], {"b": np.ones(3_000, np.float32)}
    paths = [save(tmp_path, dense=dense, buffers=buffers) for _ in range(2)]
    assert inspected(paths[0], "--diff", paths[1])[0] == 0
    one = NUM_ROWS * DIM * 4 * 3 + values.nbytes + 12_000
    assert sum(block_sizes) == 2 * one
    assert max(block_sizes) <= 2_000


@pytest.mark.parametrize(
    "shape", [(), (1,), (0,), (0, 3), (3, 0), (7,), (4, 3), (2, 3, 5), (1, 1, 9), (5, 1, 2, 2)]
)
@pytest.mark.parametrize("block_bytes", [1, 8, 24, 100, 1 << 20])
def test_boxes_cover_an_array_once(monkeypatch, shape, block_bytes):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", block_bytes)
    times = np.zeros(shape, int)
    for box in blocks.boxes(shape, "float64"):
        assert times[box].nbytes <= max(block_bytes, 8)
        times[box] += 1
    assert (times == 1).all()


# Digests and errors.


def test_verify_says_one_line(tmp_path, inspected, found):
    path = save(tmp_path)
    status, text = inspected(tmp_path, "--verify")
    assert status == 0
    assert text.startswith(f"{path}: intact")
    assert text.count("\n") == 1
    want = {"path": str(path), "bytes": path.stat().st_size, "intact": True}
    assert found(path, "--verify") == want


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("words", [[], ["--verify"], ["--table", "emb"], ["--json"]])
def test_damage_is_found_before_anything_is_read(tmp_path, refused, words):
    path = save(tmp_path)
    flip(path, path.stat().st_size // 2)
    assert "is damaged: bytes" in refused(path, *words)
    with open(path, "r+b") as file:
        file.truncate(1000)
    assert "is truncated" in refused(path, *words)
    path.with_name(path.name + ".sums").unlink()
    assert "is incomplete" in refused(path, *words)


def test_damage_of_the_other_is_found(tmp_path, refused):
    one, two = save(tmp_path), save(tmp_path)
    flip(two, 5_000)
    assert two.name in refused(one, "--diff", two)
    assert "nowhere" in refused(one, "--diff", tmp_path / "nowhere")


def test_version_1_has_nothing_to_verify(tmp_path, refused):
    save_version_1(tmp_path)
    assert "has no digests to check" in refused(tmp_path, "--verify")


def test_unknown_names_and_keys_are_answered_with_the_valid_ones(tmp_path, refused):
    path = save(tmp_path, sparse=[table("emb"), table("none", num_rows=0)])
    assert "no sparse entry 'embed'; it has 'emb', 'none'" in refused(path, "--table", "embed")
    for key in (NUM_ROWS, -1):
        line = refused(path, "--table", "emb", "--key", key)
        assert f"key {key} is outside table 'emb'" in line
        assert line.endswith(f"its keys are 0 to {NUM_ROWS - 1}\n")
    assert refused(path, "--table", "none", "--key", 0).endswith("it has no keys\n")
    assert "--key 0 needs --table" in refused(path, "--key", 0)
    assert "no checkpoint at" in refused(tmp_path / "nowhere")
    assert "cannot be read" in refused("x" * 300)


@pytest.mark.parametrize(
    "words", [["--verify", "--table", "emb"], ["--diff", "x", "--verify"], ["--key", "one"], []]
)
def test_a_wrong_command_line_shows_the_usage(capsys, words):
    with pytest.raises(SystemExit) as raised:
        cli.main(["inspect", *([".", *words] if words else [])])
    assert raised.value.code == 2
    assert capsys.readouterr().err.startswith("usage: mpifleet inspect [options] PATH\n")


def test_help_ends_with_an_example_that_parses(capsys):
    with pytest.raises(SystemExit):
        cli.main(["inspect", "--help"])
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last == f"example: {inspect.EXAMPLE}"
    chosen = cli._parser().parse_args(shlex.split(inspect.EXAMPLE)[1:])
    assert (chosen.path, chosen.table, chosen.key) == ("checkpoint", "emb", 7)


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path):
    shape, arrays = table(num_rows=2)
    many = {f"buffer {n}": np.ones(1) for n in range(3_000)}
    path = save(tmp_path, sparse=[(shape, arrays)], buffers=many)
    code = "import sys; from mpifleet.cli.main import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", code, "inspect", str(path)]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout.readline().startswith("file")
        child.stdout.close()
        assert child.stderr.read() == ""
        assert child.wait(60) == 0


@pytest.mark.parametrize(("quiet_s", "forced", "seen"), [(0, True, True), (0, False, False)])
def test_progress_is_for_terminals(capsys, monkeypatch, quiet_s, forced, seen):
    monkeypatch.setattr(bytes_read, "QUIET_S", quiet_s)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    if forced:
        monkeypatch.setenv("FORCE_COLOR", "1")
    with BytesRead("reading", 2 << 20) as progress:
        progress.add(1 << 20)
    captured = capsys.readouterr()
    assert ("reading" in captured.err) == seen
    assert seen or captured.err == ""
    assert captured.out == ""


def test_progress_of_the_check_adds_up_to_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(digests, "BLOCK_BYTES", 5_000)
    path, told = save(tmp_path), []
    check(path, told=told.append)
    assert sum(told) == path.stat().st_size
    assert len(told) > 10


def test_what_is_quick_shows_no_progress(tmp_path, inspected, monkeypatch):
    """`inspected` fails where anything is on stderr; without patience there is a line."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    path = save(tmp_path)
    inspected(path, "--table", "emb")
    monkeypatch.setattr(bytes_read, "QUIET_S", -1)
    with pytest.raises(AssertionError):
        inspected(path, "--verify")


def with_states(directory, draw, batch):
    states = [
        SavedState("progress", False, [State({"progress": {"batch": batch}})] * 2),
        SavedState("random", True, [State({"n": w}, {"x": draw + np.arange(w)}) for w in (1, 2)]),
    ]
    return save(directory, states=states)


def test_states_are_listed_with_sizes(tmp_path, capsys):
    path = with_states(tmp_path, 0, 7)
    assert cli.main(["inspect", str(path), "--json"]) == 0
    progress, draws = json.loads(capsys.readouterr().out)["states"]
    assert progress["facts"] == {"progress": {"batch": 7}}
    assert (progress["workers"], progress["per_worker"], progress["arrays"]) == (2, False, 0)
    assert (draws["per_worker"], draws["arrays"], draws["facts"]) == (True, 2, None)
    assert draws["bytes"] == 8 * (1 + 2) + 2 * len('{"n": 1}')
    assert cli.main(["inspect", str(path)]) == 0
    printed = ANSI.sub("", capsys.readouterr().out)
    assert "states: 2" in printed
    assert '"batch": 7' in printed


def test_states_that_differ_are_named(tmp_path, capsys):
    one, two = with_states(tmp_path, 0, 7), with_states(tmp_path, 1, 8)
    assert cli.main(["inspect", str(one), "--diff", str(two), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    names = {(fact["name"], fact["what"]) for fact in found["facts"] if fact["kind"] == "states"}
    both = {("progress", f"worker {w}: progress") for w in (0, 1)}
    assert names == both | {("random", f"worker {w}: x") for w in (0, 1)}
    assert cli.main(["inspect", str(one), "--diff", str(one)]) == 0
