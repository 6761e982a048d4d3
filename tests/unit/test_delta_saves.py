"""Base and delta saves: a chain holds, bit for bit, what a full save at the same moment holds."""

import functools
import itertools
import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from mpifleet.checkpoint import Keep, chunks
from mpifleet.errors import CheckpointError, ConfigError
from mpifleet.ps import save_writing
from mpifleet.ps.load_report import LoadOptions
from mpifleet.ps.saving import SaveOptions
from mpifleet.saves import save_persistables
from tests.unit.delta_jobs import (
    BASE,
    DELTA,
    FULL,
    ROWS,
    Job,
    behind,
    changed_keys,
    compressed,
    files,
    held,
    path_of,
)

RULES = {
    "sgd": torch.optim.SGD,
    "momentum": functools.partial(torch.optim.SGD, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
}
ALL = range(ROWS)


@pytest.mark.parametrize(
    ("rule", "how"), [*itertools.product(RULES, [replace, behind]), ("adam", compressed)]
)
def test_base_and_deltas_are_what_a_full_save_is(tmp_path, monkeypatch, rule, how):
    """Random keys, none, all: after each, and into a job that then goes on with the same bits."""
    monkeypatch.setattr(chunks, "LEAST_BYTES", 100)  # some arrays stay in one piece
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 96)
    chain, full = tmp_path / "chain", tmp_path / "full"
    generator = np.random.default_rng(len(rule))
    job = Job(RULES[rule])
    job.step([3, 5], [1])
    job.face.save(chain, how(BASE))
    expected = None
    for touched in (generator.integers(0, ROWS, 9), [], ALL, [ROWS - 1, 0], []):
        two = generator.integers(0, 7, len(touched) % 4).tolist()
        for key in [list(touched)] if len(touched) in (0, ROWS) else [[k] for k in touched]:
            job.step(key, two)
        job.face.save(chain, how(DELTA))
        expected = job.full(full)  # it waits for the one behind training
        assert held(chain) == expected
        newest = path_of(chain, files(chain)[-1])
        np.testing.assert_array_equal(changed_keys(newest), np.unique(touched))
        np.testing.assert_array_equal(changed_keys(newest, "t%2"), np.unique(two))
    other = Job(RULES[rule], seed=1)
    other.step([7], [2])
    assert other.face.load(chain).is_whole
    assert other.full(tmp_path / "other") == expected
    for each in (job, other):
        torch.manual_seed(3)
        each.step([4, 5], [6])
    assert other.full(tmp_path / "other") == job.full(full)


def test_nothing_at_all_between_two_deltas(tmp_path):
    job = Job()
    job.face.save(tmp_path / "c", BASE)
    for _ in range(2):
        job.face.save(tmp_path / "c", DELTA)
        assert changed_keys(path_of(tmp_path / "c", files(tmp_path / "c")[-1])).size == 0
    assert held(tmp_path / "c") == job.full(tmp_path / "f")


def test_nothing_is_noted_before_there_is_a_base(tmp_path):
    job = Job()
    job.step([1])
    job.face.save(tmp_path / "f", FULL)
    shard = job.exchange._shard
    assert shard.changed is None
    job.face.save(tmp_path / "c", BASE)
    assert shard.changed is not None


def test_a_delta_without_a_base_is_refused(tmp_path):
    job = Job()
    with pytest.raises(CheckpointError, match=r'neither saved a base nor loaded.*mode="base"'):
        job.face.save(tmp_path / "c", DELTA)
    assert not (tmp_path / "c").exists()
    job.face.save(tmp_path / "c", BASE)
    with pytest.raises(CheckpointError, match=f"directory of its base, {tmp_path / 'c'}, not into"):
        job.face.save(tmp_path / "other", DELTA)
    job.step([1])
    job.face.save(tmp_path / "c", DELTA)
    assert held(tmp_path / "c") == job.full(tmp_path / "f")


@pytest.mark.parametrize("wrong", ["gone", "exchanged", "damaged digests"])
def test_a_delta_after_a_file_that_is_not_there_any_more_is_refused(tmp_path, wrong):
    """Before anything is written; the rows are in the next base."""
    chain, job = tmp_path / "c", Job()
    job.face.save(chain, BASE)
    path = path_of(chain, 1)
    sums = path.with_name(path.name + ".sums")
    if wrong == "gone":
        path.unlink()
    elif wrong == "exchanged":
        job.step([1])
        job.face.save(tmp_path / "x", FULL)
        for name in (path.name, sums.name):
            (tmp_path / "x" / name).replace(chain / name)
    else:
        sums.write_text("{}")
    job.step([2])
    with pytest.raises(CheckpointError, match=r'no delta can follow .*000001.*mode="base"'):
        job.face.save(chain, DELTA)
    job.face.save(chain, BASE)
    job.step([4])
    job.face.save(chain, DELTA)
    assert held(chain) == job.full(tmp_path / "f")
    np.testing.assert_array_equal(changed_keys(path_of(chain, files(chain)[-1])), [4])


@pytest.mark.parametrize("mode", ["base", "delta"])
@pytest.mark.parametrize("later", [False, True], ids=["", "behind"])
def test_rows_of_a_failed_save_are_in_the_next_one(tmp_path, monkeypatch, mode, later):
    """Also those that were written while it was under way."""
    chain, job = tmp_path / "c", Job()
    job.face.save(chain, BASE)
    job.step([1, 2])
    with monkeypatch.context() as patch:

        def refuse(*_):
            raise OSError(28, "No space left on device")

        patch.setattr(save_writing, "write_parts", refuse)
        options = SaveOptions(wait=not later, mode=mode)
        if later:
            job.face.save(chain, options)
            job.step([3])
        with pytest.raises(CheckpointError, match="No space left"):
            job.exchange.settle_saves() if later else job.face.save(chain, options)
    job.step([5])
    job.face.save(chain, DELTA)
    touched = [1, 2, 3, 5] if later else [1, 2, 5]
    np.testing.assert_array_equal(changed_keys(path_of(chain, 2)), touched)
    assert held(chain) == job.full(tmp_path / "f")


def test_a_first_base_that_fails_notes_nothing(tmp_path, monkeypatch):
    job = Job()
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", _fail)
        with pytest.raises(CheckpointError, match="Input/output"):
            job.face.save(tmp_path / "c", BASE)
    with pytest.raises(CheckpointError, match="neither saved a base"):
        job.face.save(tmp_path / "c", DELTA)


def _fail(*_):
    raise OSError(5, "Input/output error")


def test_rows_pushed_while_a_delta_is_written_are_in_the_next(tmp_path):
    chain, job = tmp_path / "c", Job()
    job.face.save(chain, behind(BASE))
    job.step([1])
    moment = job.full(tmp_path / "f")
    job.face.save(chain, behind(DELTA))
    job.step([1, 8])
    job.exchange.settle_saves()
    assert held(chain) == moment
    job.face.save(chain, DELTA)
    np.testing.assert_array_equal(changed_keys(path_of(chain, 3)), [1, 8])
    assert held(chain) == job.full(tmp_path / "f")


def test_a_chain_goes_on_after_a_restart(tmp_path):
    """A job that loaded all of a chain continues it from the file it loaded, else refuses."""
    chain, job = tmp_path / "c", Job()
    job.face.save(chain, BASE)
    for key in (1, 2):
        job.step([key])
        job.face.save(chain, DELTA)
    for source, number in ((chain, 4), (path_of(chain, 2), 5)):  # a branch beside 3 and 4
        again = Job(seed=1)
        again.face.load(source)
        again.step([number])
        again.face.save(chain, DELTA)
        np.testing.assert_array_equal(changed_keys(path_of(chain, number)), [number])
        assert held(chain) == again.full(tmp_path / "f")
    for load in (
        lambda new: new.face.load(chain, LoadOptions(table="one")),  # a part only
        lambda new: new.face.load(tmp_path / "f"),  # no chain
        Job.step,
    ):
        new = Job(seed=2)
        load(new)
        with pytest.raises(CheckpointError, match="nor loaded one whole"):
            new.face.save(chain, DELTA)
    other_rule = Job(torch.optim.Adagrad)
    other_rule.face.load(chain)
    with pytest.raises(CheckpointError, match="nor loaded one whole"):
        other_rule.face.save(chain, DELTA)


def test_what_a_load_writes_counts_as_changed(tmp_path):
    chain, job = tmp_path / "c", Job()
    other = Job(seed=1)
    other.step([3], [3])
    other.face.save(tmp_path / "f", FULL)
    job.face.save(chain, BASE)
    job.face.load(tmp_path / "f", LoadOptions(table="t%2"))
    job.face.save(chain, DELTA)
    assert changed_keys(path_of(chain, 2)).size == 0
    np.testing.assert_array_equal(changed_keys(path_of(chain, 2), "t%2"), range(7))
    assert held(chain) == job.full(tmp_path / "g")
    job.face.load(tmp_path / "f")
    job.face.save(chain, DELTA)
    np.testing.assert_array_equal(changed_keys(path_of(chain, 3)), ALL)
    assert held(chain) == job.full(tmp_path / "g") == held(tmp_path / "f")


def test_one_table_comes_out_of_a_chain(tmp_path):
    chain, job = tmp_path / "c", Job()
    job.face.save(chain, BASE)
    job.step([1], [2])
    job.face.save(chain, DELTA)
    new = Job(seed=1)
    before = new.full(tmp_path / "f")
    new.face.load(chain, LoadOptions(table="one"))
    after, theirs = new.full(tmp_path / "f"), held(chain)
    assert after == {**before, "one": theirs["one"]}


def test_a_loaded_chain_stands_at_its_newest_for_init_server_too(tmp_path):
    from mpifleet.compose import local_exchange
    from mpifleet.optimizer import DistributedOptimizer
    from mpifleet.strategy import DistributedStrategy
    from tests.unit.local_job import persistables

    chain, job = tmp_path / "c", Job()
    job.face.save(chain, BASE)
    job.step([1], [2])
    job.face.save(chain, DELTA)
    new = Job(seed=1)
    model = new.model
    optimizer = DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), model)
    exchange = local_exchange(optimizer, DistributedStrategy(), chain)
    optimizer.connect(exchange)
    new.optimizer, new.face = optimizer, persistables(optimizer, model)
    new.step([6])
    new.face.save(chain, DELTA)
    np.testing.assert_array_equal(changed_keys(path_of(chain, 3)), [6])
    assert held(chain) == new.full(tmp_path / "f")


def keep(mode, last=1, every=0):
    return SaveOptions(mode=mode, keep=Keep(last, every))


def test_chains_are_pruned_whole(tmp_path):
    chain, job = tmp_path / "c", Job()
    story = [
        ("base", (1, 0), [1]),
        ("delta", (1, 0), [1, 2]),
        ("delta", (1, 0), [1, 2, 3]),
        ("base", (2, 0), [1, 2, 3, 4]),
        ("delta", (2, 0), [1, 2, 3, 4, 5]),
        ("full", (2, 0), [4, 5, 6]),
        ("delta", (1, 0), [4, 5, 7]),  # the chain is newer than the full one now
        ("full", (1, 0), [4, 5, 7, 8]),  # the chain that this job goes on with stays
        ("base", (1, 0), [9]),
        ("delta", (1, 0), [9, 10]),
        ("base", (1, 10), [9, 10, 11]),  # one of its files is a tenth
        ("base", (1, 0), [12]),
    ]
    for key, (mode, last, there) in enumerate(story):
        job.step([key])
        job.face.save(chain, keep(mode, *last))
        assert files(chain) == there, (key, mode)
        assert held(chain) == job.full(tmp_path / "f")


def test_a_chain_that_lost_its_base_goes_and_does_not_count(tmp_path):
    chain, job = tmp_path / "c", Job()
    for mode in ("base", "delta", "full"):
        job.face.save(chain, keep(mode, 9))
    path_of(chain, 1).unlink()
    Job().face.save(chain, keep("full", 2))
    assert files(chain) == [3, 4]


def test_a_chain_does_not_grow_for_ever(tmp_path, monkeypatch):
    """A reader holds all its files open."""
    monkeypatch.setattr("mpifleet.checkpoint.chain.MAX_MEMBERS", 3)
    chain, job = tmp_path / "c", Job()
    job.face.save(chain, BASE)
    for _ in range(2):
        job.face.save(chain, DELTA)
    with pytest.raises(
        CheckpointError, match="its chain has 3 files; begin a new chain with mode="
    ):
        job.face.save(chain, DELTA)
    assert held(chain) == job.full(tmp_path / "f")


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        (1, "mode=1; use 'full', 'base', 'delta'; Fleet's tables do not agree"),
        (2, "do not agree on which of 1 and 2 is the base"),
        ("Base", "mode='Base'; use"),
        (False, "mode=False"),
        (None, "mode=None"),
    ],
)
def test_modes_have_names(tmp_path, mode, words):
    with pytest.raises(ConfigError, match=words):
        save_persistables(tmp_path, mode=mode)


@pytest.mark.parametrize("name", ["write_parts", "link_to"])
def test_no_failure_of_the_thread_behind_training_passes_for_a_save(tmp_path, monkeypatch, name):
    job = Job()
    job.face.save(tmp_path, BASE)
    before = job.full(tmp_path / "before")
    job.step([1], [1])

    def fail(*_):
        raise MemoryError("no room")

    with monkeypatch.context() as broken:
        broken.setattr(save_writing, name, fail)
        job.face.save(tmp_path, behind(DELTA))
        with pytest.raises(CheckpointError, match=r"cannot write a checkpoint.*no room"):
            job.face.save(tmp_path, DELTA)
    if name == "write_parts":
        assert held(tmp_path) == before
    job.face.save(tmp_path, DELTA)
    assert held(tmp_path) == job.full(tmp_path / "after")
