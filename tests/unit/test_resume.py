"""Training that is saved, ended and resumed equals training that was never interrupted."""

import enum
import functools
import logging
import random
from collections import Counter

import h5py
import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from mpifleet.checkpoint import chunks, open_checkpoint, write_checkpoint
from mpifleet.errors import CheckpointError, ConfigError
from mpifleet.state_dicts import from_state, to_state
from mpifleet.states import SavedState, State, pack_states, unpack_states
from tests.unit.resuming import Run

SCHEDULES = {
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "one-cycle": lambda o: lr_scheduler.OneCycleLR(o, [0.1, 0.2], total_steps=20),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [2, 4], 0.3),
    "in-turn": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 5)],
        [2],
    ),
}


@pytest.fixture
def warnings_said(caplog):
    """The text of all warnings so far."""
    logger = logging.getLogger("mpifleet")
    logger.addHandler(caplog.handler)
    yield lambda: "\n".join(r.getMessage() for r in caplog.records if r.levelname == "WARNING")
    logger.removeHandler(caplog.handler)


def draw_some():
    """As a script may before it resumes."""
    torch.rand(7), random.random(), np.random.random()  # noqa: NPY002


@pytest.mark.parametrize("rule", ["adam", "momentum"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_three_epochs_and_three_more_are_six(tmp_path, rule, schedule):
    whole = Run(rule, SCHEDULES[schedule])
    whole.train(0, 6)
    first = Run(rule, SCHEDULES[schedule])
    first.train(0, 3)
    first.save(tmp_path, {"epoch": 3})
    then = Run(rule, SCHEDULES[schedule])
    draw_some()
    assert then.resume(tmp_path) == {"epoch": 3}
    assert then.digest() == first.digest()
    then.train(3, 6)
    assert then.digest() == whole.digest()


def test_from_a_compressed_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "LEAST_BYTES", 1)
    whole = Run()
    whole.train(0, 4)
    first = Run()
    first.train(0, 2)
    first.save(tmp_path, level=1)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.compression == "gzip-1"
    then = Run()
    then.resume(tmp_path)
    then.train(2, 4)
    assert then.digest() == whole.digest()


def test_from_the_middle_of_an_epoch(tmp_path):
    whole = Run()
    whole.train(0, 4)
    first = Run()
    first.train(0, 2, stop=5)
    first.save(tmp_path, {"epoch": 1, "batch": 5}, wait=False)
    first.train(1, 4, skip=5)  # who goes on ends at the same
    assert first.digest() == whole.digest()
    first.resumption.persistables.exchange.settle_saves()
    then = Run()
    at = then.resume(tmp_path)
    then.train(at["epoch"], 4, skip=at["batch"])
    assert then.digest() == whole.digest()


@pytest.mark.parametrize("left_out", ["random", "schedule", "param_groups", "buffers"])
def test_each_state_matters(tmp_path, left_out):
    """Without any one of them the bits differ: the tests above would see it missing."""
    whole = Run()
    whole.train(0, 4)
    first = Run()
    first.train(0, 2)
    first.save(tmp_path)
    then = Run()
    draw_some()
    resumption = then.resumption
    every = resumption.states.providers
    lacking = lambda *given: [p for p in every(*given) if p.name != left_out]  # noqa: E731
    resumption.states.providers = lacking
    then.resume(tmp_path)
    then.train(2, 4)
    # A schedule that starts anew goes on from the rates as they are, but counts from 0.
    if left_out == "schedule":
        assert then.scheduler.state_dict() != whole.scheduler.state_dict()
    elif left_out == "buffers":
        pass  # worker 0's come back with the tables; the state is for the other workers'
    else:
        assert then.digest() != whole.digest()


def test_the_first_start_has_nothing_to_resume(tmp_path):
    run = Run()
    assert run.resume(tmp_path / "none") is None
    (tmp_path / "empty").mkdir()
    assert run.resume(tmp_path / "empty") is None
    run.save(tmp_path / "empty")
    assert Run().resume(tmp_path / "empty") == {}


def test_a_file_that_is_meant_and_missing_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        Run().resume(tmp_path / "model-000004.h5")


def test_a_directory_of_incomplete_checkpoints_is_no_beginning(tmp_path):
    run = Run()
    run.save(tmp_path)
    (tmp_path / "model-000001.h5.sums").unlink()
    with pytest.raises(CheckpointError, match="no complete"):
        Run().resume(tmp_path)


def test_tables_alone_are_not_resumed_from(tmp_path):
    run = Run()
    run.resumption.persistables.save(tmp_path)
    before = run.digest()
    with pytest.raises(CheckpointError, match="not saved to be resumed"):
        run.resume(tmp_path)
    assert run.digest() == before


def test_what_was_saved_to_be_resumed_loads_as_persistables(tmp_path):
    run, other = Run(), Run()
    run.train(0, 1)
    run.save(tmp_path)
    other.resumption.persistables.load(tmp_path)
    assert other.digest()["rows"] == run.digest()["rows"]


def test_a_state_that_the_file_lacks_is_named_before_anything_changes(tmp_path):
    run, other = Run(), Run()
    run.train(0, 1)
    run.save(tmp_path)
    other.states.register("draw", torch.Generator(), per_worker=True)
    before, position = other.digest(), torch.get_rng_state()
    with pytest.raises(CheckpointError, match=r"no state 'draw'; it has .*'schedule'"):
        other.resume(tmp_path)
    assert other.digest() == before
    assert torch.equal(torch.get_rng_state(), position)


def test_a_state_that_nobody_takes_is_told(tmp_path, warnings_said):
    run = Run()
    run.states.register("draw", torch.Generator(), per_worker=True)
    run.save(tmp_path)
    Run().resume(tmp_path)
    assert "nobody here has it: draw" in warnings_said()


def test_other_threads_and_another_mode_are_told(tmp_path, warnings_said):
    run, other = Run(), Run(mode="async")
    run.states.used_threads(2)
    before = torch.get_num_threads()
    run.save(tmp_path)
    torch.set_num_threads(before + 1)
    try:
        other.resume(tmp_path)
    finally:
        torch.set_num_threads(before)
    assert f"torch threads {before}, now {before + 1}" in warnings_said()
    assert "mode sync, now async" in warnings_said()
    other.states.used_threads(3)
    assert "3 training thread(s), the resumed job had 2" in warnings_said()


def test_other_param_groups_are_refused(tmp_path):
    run = Run()
    run.save(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        saved = checkpoint.states.state("param_groups", 0)
    run.optimizer._inner.param_groups = run.optimizer._inner.param_groups[:1]
    provider = run.states.providers(run.model, run.optimizer, "sync", None)[0]
    with pytest.raises(CheckpointError, match="2 param groups, the optimizer has 1"):
        provider.check(saved)


def test_groups_of_another_rule_keep_the_rates_of_the_script(tmp_path, warnings_said):
    run = Run("adam")
    run.train(0, 2)
    run.save(tmp_path)
    other = Run("momentum")
    other.resume(tmp_path)
    assert "param group 1 was of rule adam, now momentum: its rates are the s" in warnings_said()
    assert [group["lr"] for group in other.optimizer.param_groups] == [0.02, 0.05]
    other.train(2, 3)


def test_momentum_that_a_schedule_took_to_nothing_is_still_momentum(tmp_path, warnings_said):
    run = Run("momentum")
    for group in run.optimizer.param_groups:
        group |= {"momentum": 0.0, "lr": 0.5}
    run.save(tmp_path)
    other = Run("momentum")
    other.resume(tmp_path)
    assert not warnings_said()
    assert [group["momentum"] for group in other.optimizer.param_groups] == [0.0, 0.0]
    assert [group["lr"] for group in other.optimizer.param_groups] == [0.5, 0.5]


@pytest.mark.parametrize("odd", [{"lr": "x"}, {"betas": 3}, {"betas": [0.9]}, {"eps": -1.0}])
def test_rates_that_cannot_be_are_refused(odd):
    run = Run("adam")
    provider = run.states.providers(run.model, run.optimizer, "sync", None)[0]
    with pytest.raises(CheckpointError, match="param group 1 cannot be taken"):
        provider.check(State({"value": [{}, odd], "rules": ["adam", "adam"]}))
    with pytest.raises(CheckpointError, match=r"rules \['adam'\] for 2 groups"):
        provider.check(State({"value": [{}, {}], "rules": ["adam"]}))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"f": [lambda: 0]}, r"\['f'\]\[0\] is a builtins.function"),
        ({"z": torch.zeros(1, dtype=torch.complex64)}, r"\['z'\] is a torch.complex64 tensor"),
        ({"e": torch.zeros(1, dtype=torch.float8_e5m2)}, r"\['e'\] is a torch.float8_e5m2 tensor"),
        ({"o": np.array([None])}, r"\['o'\] is a numpy object"),
        ({"b": b"bytes"}, r"\['b'\] is a builtins.bytes"),
        ({object: 1}, r"is a builtins.type"),
        ({"n": torch.empty(1, device="meta")}, r"\['n'\] is a torch.float32 tensor, .* on meta"),
        ({"i": 1 << 8192}, r"\['i'\] is a number of 8,193 bits"),
        ({"m": np.ma.array([1, 2], mask=[0, 1])}, r"\['m'\] is a numpy masked array"),
    ],
    ids=["function", "complex", "float8", "object", "bytes", "key", "meta", "long", "masked"],
)
def test_what_cannot_be_represented_is_refused_by_name(tmp_path, value, words):
    run = Run()
    holder = torch.nn.Module()
    holder.state_dict = lambda: value
    run.states.register("mine", holder, per_worker=False)
    with pytest.raises(CheckpointError, match=rf"state 'mine': .*{words}"):
        run.save(tmp_path)
    assert not list(tmp_path.iterdir())


def test_progress_must_be_json(tmp_path):
    with pytest.raises(CheckpointError, match="progress is not JSON-able"):
        Run().save(tmp_path, {"epoch": object()})


@pytest.mark.parametrize("progress", [{1: 2}, {"done": [{"a": ({None: 0},)}]}])
def test_progress_comes_back_with_its_keys_or_is_refused(tmp_path, progress):
    with pytest.raises(
        CheckpointError, match=r"has the key (1|None), which would come back as text"
    ):
        Run().save(tmp_path, progress)
    assert not list(tmp_path.iterdir())


def test_a_state_that_holds_itself_is_refused():
    loop = []
    loop.append(loop)
    with pytest.raises(CheckpointError, match=r"it: .*holds itself"):
        to_state("it: ", loop)


@pytest.mark.parametrize(
    ("name", "thing"),
    [("random", torch.Generator()), ("", torch.Generator()), ("x", object()), (3, 3)],
)
def test_what_cannot_be_registered(name, thing):
    with pytest.raises(ConfigError, match="register_state"):
        Run().states.register(name, thing, per_worker=False)


def test_a_name_is_registered_once():
    run = Run()
    run.states.register("schedule", run.scheduler, per_worker=False)  # the same one again
    with pytest.raises(ConfigError, match="taken"):
        run.states.register("schedule", torch.Generator(), per_worker=False)


def test_generators_go_on_where_they_were(tmp_path):
    run, other = Run(), Run()
    generators = torch.Generator().manual_seed(1), np.random.default_rng(2)
    others = torch.Generator(), np.random.default_rng()
    for each, (one, two) in ((run, generators), (other, others)):
        each.states.register("torch/ü", one, per_worker=True)
        each.states.register("numpy", two, per_worker=True)
    torch.rand(3, generator=generators[0]), generators[1].normal(size=3)
    run.save(tmp_path)
    other.resume(tmp_path)
    assert torch.equal(torch.rand(9, generator=others[0]), torch.rand(9, generator=generators[0]))
    assert (others[1].normal(size=9) == generators[1].normal(size=9)).all()


VALUE = {
    "plain": [None, True, -3, 2**90, 1.5, "ü", "\ud800", {"deep": {}}],
    "floats": [float("inf"), -float("inf"), 1e-320, -0.0],
    "tuples": ((), (1, (2.0,))),
    "keys": {1: "a", "$tensor": "b", (1, 2): None},
    "counter": Counter([3, 3, 5]),
    "set": {1, 2},
    "frozen": [frozenset({1}), {frozenset({1, 2})}, {frozenset({3}): (frozenset(),)}],
    "numpy": [np.float64(0.1), np.arange(6, dtype=np.int8).reshape(2, 3), np.array(True)],
    "tensors": [
        torch.tensor(7),
        torch.zeros(0, 3),
        torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        torch.tensor([[True, False]]),
        torch.arange(3.0, dtype=torch.float64)[::2],
    ],
}


def same(one, two):
    if isinstance(one, dict):
        return (
            type(one) is type(two)
            and list(one) == list(two)
            and all(same(one[key], two[key]) for key in one)
        )
    if isinstance(one, (list, tuple)):
        return type(one) is type(two) and len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, torch.Tensor):
        return one.dtype == two.dtype and one.shape == two.shape and torch.equal(one, two)
    if isinstance(one, (np.ndarray, np.generic)):
        return type(one) is type(two) and one.dtype == two.dtype and np.array_equal(one, two)
    return type(one) is type(two) and repr(one) == repr(two)


def test_values_come_back_as_they_were(tmp_path):
    state = to_state("it", VALUE)
    saved = SavedState("a/b", True, [state])
    write_checkpoint(tmp_path, dense=[], buffers={}, meta={}, states=[saved])
    with open_checkpoint(tmp_path) as checkpoint:
        assert same(from_state("it", checkpoint.states.state("a/b", 0)), VALUE)
    assert same(from_state("it", unpack_states(pack_states([saved]))[0].workers[0]), VALUE)


def test_a_float_that_is_no_number_comes_back():
    assert np.isnan(from_state("it", to_state("it", float("nan"))))


def test_an_enumeration_of_texts_is_its_text():
    kind = enum.Enum("Kind", {"LINEAR": "linear"}, type=str)
    assert from_state("it", to_state("it", [kind.LINEAR])) == ["linear"]


def test_what_workers_share_is_stored_once(tmp_path):
    big, small = np.arange(100_000.0), np.arange(3)
    shared = State({"n": 1}, {"big": big, "small": small})
    other = State({"n": 2}, {"big": big, "small": small + 1})
    saved = SavedState("s", False, [shared, other, shared])
    packed = pack_states([saved])
    assert len(packed) < big.nbytes + 1000
    (again,) = unpack_states(packed)
    assert again.workers[0] is again.workers[2]
    path = write_checkpoint(tmp_path, dense=[], buffers={}, meta={}, states=[again])
    assert path.stat().st_size < big.nbytes + 20_000
    with open_checkpoint(path) as checkpoint:
        states = checkpoint.states
        assert (states.workers, states.names) == (3, ("s",))
        assert [states.state("s", w).facts["n"] for w in range(3)] == [1, 2, 1]
        np.testing.assert_array_equal(states.state("s", 1).arrays["big"], big)
        np.testing.assert_array_equal(states.state("s", 1).arrays["small"], small + 1)
        assert states.sizes("s")["arrays"] == 3
        with pytest.raises(CheckpointError, match="worker 3"):
            states.state("s", 3)
        with pytest.raises(CheckpointError, match=r"no state 't'; it has 's'"):
            states.state("t", 0)


@pytest.mark.parametrize(
    "damage",
    [
        lambda group: group["0"].__delitem__("facts"),
        lambda group: group["0"].__delitem__("arrays"),
        lambda group: group.__delitem__("0"),
        lambda group: (group["0"].__delitem__("facts"), group["0"].create_dataset("facts", data=3)),
        lambda group: group["0/arrays"].create_dataset("x", data="text"),
        lambda group: group["0/arrays"].create_group("x"),
    ],
)
def test_a_damaged_state_is_named(tmp_path, damage):
    write_checkpoint(
        tmp_path, dense=[], buffers={}, meta={}, states=[SavedState("s", True, [State()])]
    )
    path = tmp_path / "model-000001.h5"
    with h5py.File(path, "r+") as file:
        damage(file["states/s"])
    with (
        open_checkpoint(path, checked=True) as checkpoint,
        pytest.raises(CheckpointError, match="damaged at state 's' of worker 0"),
    ):
        checkpoint.states.state("s", 0)


def test_a_state_that_is_not_taken_is_named_and_nothing_has_changed(tmp_path):
    run, other = Run(), Run()
    for seed, each in enumerate((run, other)):
        each.noise = torch.Generator().manual_seed(seed)
        each.states.register("noise", each.noise, per_worker=True)
        metric = torch.nn.Module()
        metric.load_state_dict = lambda state: state["no such thing"]
        each.states.register("metric", metric, per_worker=True)
    run.train(0, 2)
    run.save(tmp_path)
    before, noise = other.digest(), other.noise.get_state()
    rates = other.scheduler.state_dict()
    with pytest.raises(CheckpointError, match=r"state 'metric' was not taken: KeyError"):
        other.resume(tmp_path)
    assert other.digest() == before
    assert torch.equal(other.noise.get_state(), noise)
    assert other.scheduler.state_dict() == rates


def test_a_number_of_workers_that_cannot_be_is_damage(tmp_path):
    Run().save(tmp_path)
    path = tmp_path / "model-000001.h5"
    with h5py.File(path, "r+") as file:
        file["states"].attrs["workers"] = -3
    with (
        pytest.raises(CheckpointError, match="damaged at its states: -3 workers"),
        open_checkpoint(path, checked=True) as checkpoint,
    ):
        checkpoint.states.names  # noqa: B018


@pytest.mark.parametrize(
    ("name", "facts", "words"),
    [
        ("param_groups", {"value": [3, {}]}, "not every group is a dict"),
        ("execution", {"mode": "sync", "training_threads": "many"}, "'many' is no whole number"),
        (
            "schedule",
            {"value": functools.reduce(lambda x, _: [x], range(2000), 0)},
            "RecursionError",
        ),
    ],
    ids=["groups", "threads", "deep"],
)
def test_a_state_that_makes_no_sense_is_named_before_anything_changes(name, facts, words):
    run = Run()
    before = run.digest()
    providers = run.states.providers(run.model, run.optimizer, "sync", None)
    provider = next(each for each in providers if each.name == name)
    with pytest.raises(CheckpointError, match=rf"state '{name}' is damaged: .*{words}"):
        provider.check(State(facts))
    assert run.digest() == before
