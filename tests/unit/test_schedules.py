"""Learning rates that change: schedulers on either optimizer, and rates restored."""

import warnings

import pytest
import torch
from torch.optim import lr_scheduler

from mpifleet.errors import ConfigError
from tests.unit.local_job import connect
from tests.unit.torch_reference import assert_same, batches, loss_of, net

SCHEDULES = {
    "step": lambda o: lr_scheduler.StepLR(o, 4, 0.3),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 12),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)),
    "warm-up": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=5),
    "one-cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=31),
}
RULES = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.8),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.1),
}


@pytest.mark.parametrize("on_inner", [False, True], ids=["on-ours", "on-the-wrapped"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_follow_torch(schedule, rule, on_inner):
    theirs, ours = net(), net()
    reference, inner = RULES[rule](theirs), RULES[rule](ours)
    optimizer = connect(ours, inner)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's, when it believes step() was forgotten
        pair = (
            (theirs, reference, SCHEDULES[schedule](reference)),
            (ours, optimizer, SCHEDULES[schedule](inner if on_inner else optimizer)),
        )
        for batch in batches(25):
            for model, stepper, scheduler in pair:
                stepper.zero_grad()
                loss_of(model, batch).backward()
                stepper.step()
                scheduler.step()
            assert_same(ours, theirs)


@pytest.mark.parametrize("on_inner", [False, True], ids=["on-ours", "on-the-wrapped"])
def test_reduce_on_plateau(on_inner):
    theirs, ours = net(), net()
    reference, inner = RULES["sgd"](theirs), RULES["sgd"](ours)
    optimizer = connect(ours, inner)
    makers = (reference, inner if on_inner else optimizer)
    left, right = (lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=1) for o in makers)
    for step, batch in enumerate(batches(15)):
        for model, stepper, scheduler in ((theirs, reference, left), (ours, optimizer, right)):
            stepper.zero_grad()
            loss_of(model, batch).backward()
            stepper.step()
            scheduler.step(1.0 if step > 3 else 1.0 / (1 + step))
        assert_same(ours, theirs)
    assert inner.param_groups[0]["lr"] < 0.1 / 4


def test_a_rule_that_changes_later_is_refused():
    model = net()
    optimizer = connect(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss_of(model, batches(1)[0]).backward()
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(ConfigError, match=r"param group 0 asks for .*momentum.*made for .*sgd"):
        optimizer.step()


def test_rates_restored_by_load_state_dict_are_used():
    for restored in ("ours", "the wrapped"):
        model = net()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = connect(model, inner)
        state = optimizer.state_dict()
        state["param_groups"][0]["lr"] = 0.25
        (optimizer if restored == "ours" else inner).load_state_dict(state)
        before = model[0].weight.detach().clone()
        loss_of(model, batches(1)[0]).backward()
        optimizer.step()
        moved = before - model[0].weight.detach()
        torch.testing.assert_close(moved, 0.25 * model[0].weight.grad)
        # A schedule goes on from there.
        inner.param_groups[0]["lr"] = 0.0
        optimizer.step()
        torch.testing.assert_close(model[0].weight.detach(), before - moved, rtol=0, atol=0)
