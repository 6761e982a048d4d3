"""Cases for tests of the update rules: names, flags and hyper-parameters, gradients, state."""

import numpy as np
import pytest
import torch

from mpifleet.ps.update_rules import (
    HYPER_NAMES,
    HYPER_SIZE,
    rule_of_group,
)

ELEMENTS = 77  # not a multiple of any vector width
STEPS = 100


def rule_of(optimizer):
    """The rule of an optimizer with one param group."""
    (group,) = optimizer.param_groups
    return rule_of_group(optimizer, group)


def fresh_state(rule, values, hyper):
    """State tensors for `values` before the first update."""
    return {
        slot: torch.full_like(values, first) for slot, first in rule.initial_state(hyper).items()
    }


# name, flags, hyper-parameters of the lazy rules
LAZY_CASES = {
    "sgd": ("sgd", {}, {"lr": 0.1}),
    "sgd-decay": ("sgd", {"maximize": True}, {"lr": 0.1, "weight_decay": 0.05}),
    "momentum": ("momentum", {}, {"lr": 0.1, "momentum": 0.9}),
    "momentum-damped": (
        "momentum",
        {},
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.25, "weight_decay": 0.01},
    ),
    "nesterov": (
        "momentum",
        {"nesterov": True},
        {"lr": 0.1, "momentum": 0.8, "weight_decay": 0.01},
    ),
    "adagrad": (
        "adagrad",
        {},
        {
            "lr": 0.1,
            "lr_decay": 0.02,
            "eps": 1e-8,
            "initial_accumulator_value": 0.1,
            "weight_decay": 0.01,
        },
    ),
    "adam": ("adam", {}, {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-3}),
    "adam-decay": (
        "adam",
        {"maximize": True},
        {"lr": 0.01, "beta1": 0.7, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.1},
    ),
    "adamw": (
        "adamw",
        {},
        {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-3, "weight_decay": 0.3},
    ),
}
both_routes = pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def vector(name, hyper):
    """Hyper-parameters by name, in their slots: float64 [HYPER_SIZE]."""
    out = np.zeros(HYPER_SIZE)
    for slot, field in enumerate(HYPER_NAMES[name]):
        out[slot] = hyper.get(field, 0.0)
    return out


def gradient_steps(shape, dtype, steps=STEPS, seed=0):
    """A gradient for every step, its elements of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(-2, 1, int(np.prod(shape)), dtype=dtype).view(shape)
    for _ in range(steps):
        yield torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) * scale


def assert_close(got, wanted, tolerance):
    """Agree to `tolerance` of the largest value."""
    scale = wanted.abs().max()
    assert (got - wanted).abs().max() <= tolerance * scale
