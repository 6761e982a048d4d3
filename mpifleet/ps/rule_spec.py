"""Which update rule a torch optimizer asks for, and its hyper-parameters as eight numbers.

A table's rule (`RuleSpec`) is fixed when the table is made; the hyper-parameters travel with every
push, so any scheduler that changes a param group (rate, momentum, betas) works unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mpifleet.errors import ConfigError

if TYPE_CHECKING:
    import torch

HYPER_SIZE = 8
"""Numbers in one hyper-parameter vector (float64); slots a rule does not use are 0."""

LR = 0
WEIGHT_DECAY = 1

HYPER_NAMES: dict[str, tuple[str, ...]] = {
    "sgd": ("lr", "weight_decay"),
    "momentum": ("lr", "weight_decay", "momentum", "dampening"),
    "adagrad": ("lr", "weight_decay", "lr_decay", "eps", "initial_accumulator_value"),
    "adam": ("lr", "weight_decay", "beta1", "beta2", "eps"),
    "adamw": ("lr", "weight_decay", "beta1", "beta2", "eps"),
}
"""Meaning of the hyper-parameter slots of each rule, in order; slot 0 is always the rate."""

_FLAGS = ("nesterov", "maximize")
_BELOW_ONE = ("beta1", "beta2")
_ANY_SIGN = ("dampening",)

_MAPPED = "torch.optim.SGD, Adagrad, Adam, AdamW, SparseAdam"
_UNSUPPORTED_OPTIONS = ("amsgrad", "capturable", "differentiable")


@dataclass(frozen=True)
class RuleSpec:
    """Name and flags of an update rule; equal specs mean equal arithmetic.

    name: one of HYPER_NAMES. nesterov: look-ahead step, "momentum" only. maximize: ascend.
    Raises ConfigError for an unknown name or a flag that the rule does not have.
    """

    name: str
    nesterov: bool = False
    maximize: bool = False

    def __post_init__(self) -> None:
        if self.name not in HYPER_NAMES:
            raise ConfigError(f"update rule {self.name!r} is unknown; use {', '.join(HYPER_NAMES)}")
        for flag in _FLAGS:
            if not isinstance(getattr(self, flag), bool):
                raise ConfigError(
                    f"{flag}={getattr(self, flag)!r} of rule {self.name!r}: use True or False"
                )
        if self.nesterov and self.name != "momentum":
            raise ConfigError(f"nesterov=True needs rule 'momentum', not {self.name!r}")


def rule_of_group(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> RuleSpec:
    """The rule one param group of a torch optimizer asks for.

    An SGD group with momentum 0 is "sgd", another "momentum"; Adam with decoupled weight decay is
    "adamw". `foreach` and `fused` only choose torch's implementation and are ignored.
    Raises ConfigError for another class (also a subclass) and for options that are not mapped.
    """
    family = _families().get(type(optimizer))
    if family is None:
        found = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        raise ConfigError(
            f"optimizer {found} has no update rule on the servers; use exactly one of {_MAPPED}"
        )
    for option in _UNSUPPORTED_OPTIONS:
        if group.get(option):
            raise ConfigError(
                f"{option}={group[option]!r} of torch.optim.{type(optimizer).__name__} is not "
                f"available on the servers; leave it False. Mapped optimizers: {_MAPPED}"
            )
    maximize = bool(group.get("maximize", False))
    if family == "sgd" and _number(group["momentum"], "momentum") != 0.0:
        return RuleSpec("momentum", nesterov=bool(group["nesterov"]), maximize=maximize)
    if family == "adam" and group.get("decoupled_weight_decay"):
        family = "adamw"
    return RuleSpec(family, maximize=maximize)


def _families() -> dict[type, str]:
    # Not on import: mailboxes and messages need the sizes above, and no torch.
    import torch

    return {
        torch.optim.SGD: "sgd",
        torch.optim.Adagrad: "adagrad",
        torch.optim.Adam: "adam",
        torch.optim.AdamW: "adamw",
        torch.optim.SparseAdam: "adam",
    }


def hyper_of_group(rule: RuleSpec, group: Mapping[str, Any]) -> np.ndarray:
    """Hyper-parameters of a param group for `rule`: float64 [HYPER_SIZE], order HYPER_NAMES.

    Tensor-valued hyper-parameters are read as floats. What the optimizer class lacks (weight decay
    of SparseAdam) is 0. Raises ConfigError naming a value that is not finite or out of range.
    """
    hyper = np.zeros(HYPER_SIZE, dtype=np.float64)
    for slot, name in enumerate(HYPER_NAMES[rule.name]):
        if name in _BELOW_ONE:
            raw = group["betas"][_BELOW_ONE.index(name)]
        else:
            raw = group.get(name, 0.0) if name == "weight_decay" else group[name]
        hyper[slot] = _checked(rule, name, _number(raw, name))
    return hyper


def _number(raw: Any, name: str) -> float:
    try:
        return float(raw)  # also a one-element tensor
    except (TypeError, ValueError, RuntimeError) as cause:
        raise ConfigError(f"{name}={raw!r} of a param group is not one number") from cause


def _checked(rule: RuleSpec, name: str, value: float) -> float:
    low, high = 0.0, math.inf
    if name in _BELOW_ONE:
        high = 1.0
    elif name in _ANY_SIGN:
        low = -math.inf
    if not (math.isfinite(value) and low <= value < high):
        span = "finite" if name in _ANY_SIGN else f"in [{low:g}, {high:g})"
        raise ConfigError(f"{name}={value!r} of update rule {rule.name!r} must be {span}")
    return value
