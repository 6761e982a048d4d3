"""Where a step's time goes: phases add up to the time that passed, and each gets its own."""

import copy
import pickle
import time

import pytest
import torch
from torch import nn

from mpifleet.embedding import SparseEmbedding
from mpifleet.step_clock import PHASES, StepClock
from tests.unit.local_job import connect

PAUSE_S = 0.03


class _Slow(torch.autograd.Function):
    """The identity, with a pause in its forward and two in its backward."""

    @staticmethod
    def forward(_, value):
        time.sleep(PAUSE_S)
        return value.clone()

    @staticmethod
    def backward(_, grad):
        time.sleep(2 * PAUSE_S)
        return grad


class Model(nn.Module):
    def __init__(self, as_output):
        super().__init__()
        self.table = SparseEmbedding("t", 20, 2)
        self.out = nn.Linear(2, 1)
        self.as_output = as_output

    def forward(self, ids):
        return self.as_output(self.out(_Slow.apply(self.table(ids))))


OUTPUTS = {"a tensor": lambda x: x, "a tuple": lambda x: (x, 1), "a dict": lambda x: {"x": x}}


def test_phases_add_up_to_the_time_that_passed():
    clock = StepClock()
    began_s = time.perf_counter()
    first = clock.split()
    for phase in PHASES:
        clock.enter(phase)
        time.sleep(0.002)
    clock.end_step()
    split = clock.split().since(first)
    assert sum(split.seconds.values()) == pytest.approx(time.perf_counter() - began_s, abs=1e-3)
    assert all(split.seconds[phase] >= 0.002 for phase in PHASES)
    assert split.steps == 1
    assert split.step_s == pytest.approx(sum(split.seconds.values()) - split.seconds["other"])


def test_enter_returns_the_phase_before():
    clock = StepClock()
    clock.enter("pull")
    assert clock.enter("wait") == "pull"
    assert clock.phase == "wait"


@pytest.mark.parametrize("kind", OUTPUTS)
def test_a_step_is_split_into_its_phases(kind):
    model = Model(OUTPUTS[kind])
    optimizer = connect(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = optimizer.clock.split()
    for _ in range(2):
        time.sleep(PAUSE_S)
        output = model(torch.tensor([[1], [2]]))
        loss = output["x"] if kind == "a dict" else output[0] if kind == "a tuple" else output
        loss.sum().backward()
        optimizer.step()
    split = optimizer.clock.split().since(before)
    assert split.steps == 2
    # The first step's data came before the first step() had ended.
    assert split.seconds["data"] + split.seconds["other"] >= PAUSE_S
    assert 2 * PAUSE_S <= split.seconds["forward"] < 4 * PAUSE_S
    assert 4 * PAUSE_S <= split.seconds["backward"] < 7 * PAUSE_S
    assert min(split.seconds[phase] for phase in ("unique", "pull", "push")) > 0


def test_an_evaluation_is_no_part_of_a_step():
    model = Model(OUTPUTS["a tensor"])
    optimizer = connect(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.tensor([[1]])).sum().backward()
    optimizer.step()
    before = optimizer.clock.split()
    with torch.no_grad():
        model(torch.tensor([[3]]))
    split = optimizer.clock.split().since(before)
    assert split.seconds["other"] >= PAUSE_S
    assert sum(split.seconds.values()) - split.seconds["other"] < PAUSE_S


def test_a_marked_model_can_be_copied_and_pickled():
    table = SparseEmbedding("t", 20, 2)
    model = nn.Sequential(table, nn.Linear(2, 1))
    connect(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert isinstance(copy.deepcopy(model), nn.Sequential)
    assert isinstance(pickle.loads(pickle.dumps(model)), nn.Sequential)  # noqa: S301


def test_words():
    clock = StepClock()
    assert clock.split().text() == "no step yet"
    split = clock.split()
    split.seconds.update(dict.fromkeys(PHASES, 0.0), forward=0.6, backward=1.0, pull=0.4, wait=1e-3)
    split.steps, split.seconds["other"] = 100, 50.0
    assert split.text() == "step 20.01 ms: pull 20 %, forward 30 %, backward 50 %"
    assert split.text(most=2) == "step 20.01 ms: forward 30 %, backward 50 %"


def split_of(steps, **seconds):
    split = StepClock().split()
    split.seconds.update(dict.fromkeys(PHASES, 0.0), **seconds)
    split.steps = steps
    return split


def test_the_summary_is_one_short_line():
    assert split_of(0).summary() == "no step"
    split = split_of(1_000, pull=0.4, forward=0.6, backward=1.0, wait=1e-3, other=50.0)
    assert split.summary() == "1,000 steps of 2.00 ms: pull 20, forward 30, backward 50 %"
    even = split_of(12_345, **dict.fromkeys(PHASES, 1_000.0))
    for width in (130, 88, 60):
        assert len(even.summary(width)) <= width
    assert even.summary(130).count(",") == 7, "one in the number, six between seven phases"
    assert len(even.summary()) > 70, "as many phases as have room"
