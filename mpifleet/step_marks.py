"""Tells a step clock when a model's forward and backward begin."""

from typing import Any

import torch
from torch import Tensor, nn

from mpifleet.step_clock import StepClock


class _BeforeForward:
    """A forward pre-hook; classes, not closures, so that the model can still be pickled."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock

    def __call__(self, _model: nn.Module, _inputs: Any) -> None:
        self._clock.enter("forward" if torch.is_grad_enabled() else "other")


class _AfterForward:
    """A forward hook: the gradient of the output is the first that a backward computes."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock

    def __call__(self, _model: nn.Module, _inputs: Any, output: Any) -> None:
        tensor = _first_tensor(output)
        if tensor is not None and tensor.requires_grad:
            tensor.register_hook(self._backward)

    def _backward(self, _grad: Tensor) -> None:
        self._clock.enter("backward")


def mark_steps(model: nn.Module, clock: StepClock) -> None:
    """Have `clock` know a training forward of `model`, its backward, and look-ups without either.

    Without a model all of it counts as forward.
    """
    model.register_forward_pre_hook(_BeforeForward(clock))
    model.register_forward_hook(_AfterForward(clock))


def _first_tensor(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output
    parts = output.values() if isinstance(output, dict) else output
    if not isinstance(output, dict | tuple | list):
        return None
    return next((part for part in parts if isinstance(part, Tensor)), None)
