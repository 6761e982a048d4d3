"""Chains on disk: any layout of base and deltas reads alike; what is wrong with one is named."""

import json
import subprocess
import sys
import textwrap
from dataclasses import replace

import h5py
import numpy as np
import pytest

from mpifleet.checkpoint import (
    About,
    Keep,
    Link,
    Newcomer,
    lay_out,
    link_to,
    members,
    newest,
    open_checkpoint,
    write_checkpoint,
    write_parts,
)
from mpifleet.checkpoint.digests import Sums, sums_path
from mpifleet.checkpoint.directory import prune
from mpifleet.cli.main import main
from mpifleet.errors import CheckpointError
from tests.unit.checkpoint_content import DIM, REPOSITORY, content, table
from tests.unit.delta_jobs import BASE, DELTA, Job, flip, held, path_of

ALL = Keep(99)


def save_base(directory, shape, arrays, shards):
    order = np.concatenate([np.arange(s, shape.num_rows, shards) for s in range(shards)])
    shape = replace(shape, num_shards=shards)
    return save(directory, shape, order, arrays, About("base"))


def save_delta(directory, shape, changed, arrays, shards, before):
    """changed: keys, ascending; arrays: rows of all keys."""
    split = [changed[changed % shards == s] for s in range(shards)]
    shape = replace(shape, num_shards=shards, stretches=tuple(part.size for part in split))
    about = About("delta", follows=link_to(before))
    return save(directory, shape, np.concatenate(split), arrays, about)


def save(directory, shape, order, arrays, about):
    newcomer = Newcomer(directory, about)
    try:
        places = lay_out(newcomer, [], [shape], {}, {})
        parts = []
        if order.size:
            parts = [(places[shape.path("keys")], order)]
            parts += [(places[shape.path(slot)], a[order]) for slot, a in arrays.items()]
        return newcomer.publish(write_parts(newcomer.descriptor, parts), ALL)
    finally:
        newcomer.close()


@pytest.mark.parametrize(
    ("shards", "first", "second"),
    [(1, 1, 1), (3, 3, 3), (1, 2, 3), (2, 3, 1), (3, 1, 2), (5, 2, 3), (2, 5, 2), (3, 5, 5)],
)
def test_any_number_of_servers_wrote_each_member(tmp_path, shards, first, second):
    """Against plain arrays: blocks by key and by stretch, wherever they begin and end."""
    generator = np.random.default_rng([shards, first, second])
    shape, arrays = table(num_rows=53)
    path = save_base(tmp_path, shape, arrays, shards)
    for by, share in ((first, 0.4), (second, 1.1), (first, 0.05), (second, 0.0)):
        changed = np.flatnonzero(generator.random(53) < share)
        for values in arrays.values():
            values[changed] = generator.normal(size=(changed.size, DIM))
        path = save_delta(tmp_path, shape, changed, arrays, by, path)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.members == tuple(path_of(tmp_path, number) for number in range(1, 6))
        assert checkpoint.sparse("emb") == replace(shape, num_shards=shards)
        for _ in range(10):
            start, stop = np.sort(generator.integers(0, 54, 2)).tolist()
            block = checkpoint.sparse_block("emb", start, stop)
            for slot, values in arrays.items():
                np.testing.assert_array_equal(block[slot], values[start:stop])
        for shard in range(shards):
            own = checkpoint.shard_block("emb", shard, 1, 8)
            for slot, values in arrays.items():
                np.testing.assert_array_equal(own[slot], values[shard::shards][1:8])


def chain_of_four(directory):
    """A base and three deltas, and what is held after each."""
    job, moments = Job(), []
    for number, options in enumerate((BASE, DELTA, DELTA, DELTA)):
        job.step([number])
        job.face.save(directory, options)
        moments.append(held(directory))
    return moments


@pytest.mark.parametrize("number", [2, 3, 4])
@pytest.mark.parametrize("wrong", ["missing", "no digests", "foreign"])
def test_a_member_that_is_not_there_is_named_and_the_newest_before_it_counts(
    tmp_path, number, wrong, capsys
):
    chain = tmp_path / "c"
    moments = chain_of_four(chain)
    path = path_of(chain, number)
    if wrong == "foreign":
        other = Job(seed=5)
        for options in [BASE, *[DELTA] * (number - 1)]:
            other.face.save(tmp_path / "x", options)
        for each in (path, sums_path(path)):
            (tmp_path / "x" / each.name).replace(each)
    else:
        (path if wrong == "missing" else sums_path(path)).unlink()
    assert newest(chain) == path_of(chain, number - 1)
    assert held(chain) == moments[number - 2]
    is_told = number < 4 or wrong == "foreign"
    assert ("is the newest complete one" in capsys.readouterr().err) == is_told
    for later in range(number + 1, 5):
        with pytest.raises(CheckpointError, match=rf"delta after .*{number:06d}|not the file"):
            open_checkpoint(path_of(chain, later))
    job = Job(seed=2)
    assert job.face.load(chain).is_whole
    assert job.full(tmp_path / "f") == moments[number - 2]


def test_a_chain_without_its_base_is_refused_by_name(tmp_path):
    chain_of_four(tmp_path)
    path_of(tmp_path, 1).unlink()
    with pytest.raises(CheckpointError, match=r"delta after model-000001.h5, which is missing"):
        newest(tmp_path)


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_damaged_member_is_named_and_a_load_goes_back_before_it(tmp_path, number, capsys):
    chain = tmp_path / "c"
    moments = chain_of_four(chain)
    flip(path_of(chain, number))
    with pytest.raises(CheckpointError, match=f"{number:06d}.h5 is damaged"):
        open_checkpoint(chain)
    job = Job(seed=2)
    before = job.full(tmp_path / "f")
    with pytest.raises(CheckpointError, match=f"{number:06d}.h5 is damaged"):
        job.face.load(path_of(chain, 4))  # asked for by name
    assert job.full(tmp_path / "f") == before
    if number == 1:
        with pytest.raises(CheckpointError, match=r"000001.h5 is damaged"):
            job.face.load(chain)
        return
    assert job.face.load(chain).is_whole
    assert job.full(tmp_path / "f") == moments[number - 2]
    said = capsys.readouterr().err
    assert f"{number:06d}.h5 is damaged" in said
    assert f"loading {path_of(chain, number - 1)}" in said
    job.step([9])
    job.face.save(chain, DELTA)
    assert held(chain) == job.full(tmp_path / "f")


def test_a_truncated_delta_is_like_a_damaged_one(tmp_path, capsys):
    moments = chain_of_four(tmp_path / "c")
    path = path_of(tmp_path / "c", 4)
    path.write_bytes(path.read_bytes()[:-100])
    job = Job(seed=2)
    job.face.load(tmp_path / "c")
    assert job.full(tmp_path / "f") == moments[2]
    assert "000004.h5 is truncated" in capsys.readouterr().err


def test_a_whole_job_gone_between_the_file_and_latest_is_found(tmp_path):
    """A delta that `latest` does not name counts where its number is what `latest` lacks."""
    moments = chain_of_four(tmp_path)
    (tmp_path / "latest").unlink()
    assert held(tmp_path) == moments[3]
    (tmp_path / "latest").write_text("model-000003.h5\n")
    assert held(tmp_path) == moments[2]
    path_of(tmp_path, 3).unlink()
    assert held(tmp_path) == moments[1]


def rewritten(path, change):
    """The file again, with digests that fit, after `change` had it open."""
    about = Sums.read(path).about
    with h5py.File(path, "r+") as file:
        change(file)
    digests_of(path, about)


def digests_of(path, about):
    from mpifleet.checkpoint.digests import digest_rest

    with open(path, "rb") as file:
        sums = Sums.of_blocks(digest_rest(file.fileno(), []), about)
    sums_path(path).write_text(sums.text())


WRONG_KEYS = {
    "descending": lambda keys: keys[::-1].copy(),
    "of another stretch": lambda keys: keys + 1,
    "negative": lambda keys: keys - 2 * keys.size,
    "outside": lambda keys: keys + 50,
}


@pytest.mark.parametrize("wrong", WRONG_KEYS)
def test_a_delta_with_wrong_keys_is_refused(tmp_path, wrong):
    shape, arrays = table(num_rows=53)
    base = save_base(tmp_path, shape, arrays, 2)
    path = save_delta(tmp_path, shape, np.arange(2, 40, 2), arrays, 2, base)

    def change(file):
        keys = file["sparse/emb/keys"]
        keys[...] = WRONG_KEYS[wrong](keys[()])

    rewritten(path, change)
    with (
        open_checkpoint(path) as checkpoint,
        pytest.raises(CheckpointError, match="keys of stretch 0 of table 'emb' are not its own"),
    ):
        checkpoint.sparse_block("emb", 0, 5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: f["sparse/emb"].attrs.modify("num_rows", 54), "cannot follow.*53, 4"),
        (lambda f: f["sparse/emb"].attrs.modify("num_shards", 3), "stretches"),
        (lambda f: f["sparse/emb/stretches"].write_direct(np.array([9, 9])), "table 'emb'"),
        (lambda f: f.attrs.modify("follows", "model-000009.h5"), "its digests are of"),
        (lambda f: f.attrs.modify("kind", "base"), "kind 'base' with"),
        (lambda f: f.attrs.modify("kind", "other"), "kind 'other'; known are"),
    ],
)
def test_a_delta_that_contradicts_itself_or_its_base_is_refused(tmp_path, change, words):
    shape, arrays = table(num_rows=53)
    base = save_base(tmp_path, shape, arrays, 2)
    path = save_delta(tmp_path, shape, np.arange(2, 40, 2), arrays, 2, base)
    rewritten(path, change)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(path)


@pytest.mark.parametrize("name", ["../model-000001.h5", "", ".."])
def test_a_delta_follows_a_file_of_its_directory(name):
    with pytest.raises(ValueError, match="no file of its directory"):
        About.of({"kind": "delta", "follows": name, "follows_identity": "0"})


def test_a_delta_follows_a_base_or_a_delta(tmp_path):
    """Not a full save, after which nobody noted changes; no circles."""
    shape, arrays = table(num_rows=53)
    write_checkpoint(tmp_path, **content(), keep=ALL)
    path = save_delta(tmp_path, shape, np.arange(3), arrays, 1, path_of(tmp_path, 1))
    with pytest.raises(CheckpointError, match="neither a base nor a delta"):
        members(path)


def test_nothing_is_removed_while_digests_cannot_be_read(tmp_path):
    """A delta that tells nothing is in no chain: the base would seem to be needed by nobody."""
    shape, arrays = table()
    paths = [save_base(tmp_path, shape, arrays, 1)]
    for _ in range(2):
        paths.append(save_delta(tmp_path, shape, np.arange(3), arrays, 1, paths[-1]))
    hidden = sums_path(paths[1]).rename(tmp_path / "hidden")
    sums_path(paths[1]).mkdir()  # reading it is an error of the system
    with pytest.raises(OSError, match="Is a directory"):
        prune(tmp_path, Keep(1))
    sums_path(paths[1]).rmdir()
    hidden.rename(sums_path(paths[1]))
    prune(tmp_path, Keep(1))
    assert members(newest(tmp_path)) == paths


def test_what_has_damaged_digests_counts_as_nothing_to_keep(tmp_path):
    """It would push out the base, which can be loaded, and stay with a delta that cannot."""
    shape, arrays = table()
    base = save_base(tmp_path, shape, arrays, 1)
    first = save_delta(tmp_path, shape, np.arange(3), arrays, 1, base)
    second = save_delta(tmp_path, shape, np.arange(3), arrays, 1, first)
    sums_path(first).write_text("{ damaged")
    full = write_checkpoint(tmp_path, dense=[], buffers={}, meta={}, keep=Keep(2))
    assert base.exists()
    assert full.exists()
    assert not first.exists()
    assert not second.exists()


def test_what_a_plain_reader_sees(tmp_path):
    shape, arrays = table(num_rows=53)
    base = save_base(tmp_path, shape, arrays, 2)
    changed = np.array([3, 4, 9, 50])
    path = save_delta(tmp_path, shape, changed, arrays, 2, base)
    with h5py.File(path, "r") as file:
        assert dict(file.attrs)["kind"] == "delta"
        assert file.attrs["follows"] == "model-000001.h5"
        assert len(file.attrs["follows_identity"]) == 32
        group = file["sparse/emb"]
        assert group["stretches"][()].tolist() == [2, 2]
        assert group["keys"][()].tolist() == [4, 50, 3, 9]
        np.testing.assert_array_equal(group["rows"][()], arrays["rows"][[4, 50, 3, 9]])
        assert group["state/exp_avg"].shape == (4, DIM)
    assert Sums.read(path).about.follows == Link(*link_to(base))


def test_a_writer_killed_at_any_stage_of_a_delta_leaves_a_chain_that_loads(tmp_path):
    """SIGKILL before every sixth call to the system, in children of one process."""
    script = """
        import os, signal, sys
        from pathlib import Path
        import torch
        torch.set_num_threads(1)
        from tests.unit.delta_jobs import BASE, DELTA, Job, files, held, path_of
        from tests.unit.killed_writer import kill_after
        from mpifleet.checkpoint import newest
        chain = Path(sys.argv[1])
        job = Job()
        job.face.save(chain, BASE)
        job.step([1])
        job.face.save(chain, DELTA)
        before = held(chain)
        def save(last):
            kill_after(last)
            job.face.save(chain, DELTA)
        job.step([2, 5])
        expected, killed = job.full(chain / "full"), 0
        for number in range(200):
            child = os.fork()
            if not child:
                try:
                    save(6 * number)
                    os._exit(0)
                finally:
                    os._exit(1)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            found = held(chain)
            assert found in (before, expected)
            if found == expected:
                newest(chain).unlink()
                (chain / "latest").write_text("model-000002.h5")
            if status == 0:
                assert found == expected
                break
            assert status == -signal.SIGKILL, status
            killed += 1
        assert killed > 5, killed
        job.face.save(chain, DELTA)
        assert held(chain) == expected
        print(killed)
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), tmp_path / "c"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 5


def test_inspect_shows_kind_chain_and_changed_rows(tmp_path, capsys):
    chain, job = tmp_path / "c", Job()
    for touched, options in (([], BASE), ([1, 2], DELTA), ([2, 7, 30], DELTA)):
        job.step(touched)
        job.face.save(chain, options)
    job.full(tmp_path / "f")
    assert main(["inspect", str(chain)]) == 0
    text = capsys.readouterr().out
    lines = [line.split() for line in text.splitlines()]
    assert ["kind", "delta"] in lines
    at = lines.index(["follows", "model-000001.h5"])
    assert lines[at + 1] == ["model-000002.h5"]
    assert next(line for line in lines if line[:2] == ["one", "90"])[-1] == "3"
    assert main(["inspect", str(chain), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["chain"] == [f"model-00000{number}.h5" for number in (1, 2, 3)]
    assert [table["changed_rows"] for table in found["sparse"]] == [3, 0]
    assert main(["inspect", str(chain), "--diff", str(tmp_path / "f")]) == 0, "they are the same"
    assert main(["inspect", str(chain), "--verify"]) == 0
    assert "000003.h5 and 2 before it: intact" in capsys.readouterr().out
    flip(path_of(chain, 2))
    for more in ([], ["--verify"], ["--diff", str(tmp_path / "f")]):
        assert main(["inspect", str(chain), *more]) == 2
        assert "000002.h5 is damaged" in capsys.readouterr().err
