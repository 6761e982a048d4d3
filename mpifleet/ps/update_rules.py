"""The servers' optimizers: torch.optim's updates on dense slices and, lazily, on table rows.

With g = grads (-grads if maximize), w = weight_decay, t = step (1-based update count):

sgd       values -= lr * (g + w*values)
momentum  d = g + w*values; buf = mu*buf + (1 - dampening)*d; values -= lr * buf
          (nesterov: values -= lr * (d + mu*buf)); dense, t = 1: buf = d, as torch.optim.SGD does
adagrad   d = g + w*values; sum += d*d
          values -= lr / (1 + (t - 1)*lr_decay) * d / (sqrt(sum) + eps)
adam      d = g + w*values; m += (1 - beta1)*(d - m); s = beta2*s + (1 - beta2)*d*d
          values -= lr / (1 - beta1^t) * m / (sqrt(s) / sqrt(1 - beta2^t) + eps)
adamw     values *= 1 - lr*w; then adam with w = 0

Rows ("lazy"): the same on the touched rows only, t = the table's update count; a row that is not
touched keeps value and state, also under weight decay. Two formulas differ from dense tables:
adam places eps as torch.optim.SparseAdam does,
    rows -= lr * sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(s) + eps);
momentum always mixes, buf = mu*buf + (1 - dampening)*d, because a row's first touch is not
recorded (with dampening 0 and zero state this is the same).

Sources: torch.optim.SGD, Adagrad, Adam, AdamW, SparseAdam. Same inputs give the same bits, also
when tensors are cut into slices (see rule_kernels.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from mpifleet.errors import ConfigError, TableError
from mpifleet.partition import row_chunk
from mpifleet.ps.compiled_rows import CompiledRows
from mpifleet.ps.fused_kernels import FusedKernels
from mpifleet.ps.row_copy import gather_rows, write_rows
from mpifleet.ps.rule_kernels import (
    AdagradTerms,
    AdamTerms,
    Kernels,
    MomentumTerms,
    PlainKernels,
    SgdTerms,
)
from mpifleet.ps.rule_spec import (
    HYPER_NAMES,
    HYPER_SIZE,
    RuleSpec,
    hyper_of_group,
    rule_of_group,
)

__all__ = [
    "HYPER_NAMES",
    "HYPER_SIZE",
    "RuleSpec",
    "UpdateRule",
    "hyper_of_group",
    "make_rule",
    "rule_of_group",
]

Hyper = np.ndarray | Sequence[float]


class UpdateRule:
    """One update rule; holds no table data, so one instance serves every table of its spec.

    slots: names of the state tensors; each has the shape and dtype of the values.
    """

    slots: ClassVar[tuple[str, ...]] = ()

    def __init__(self, spec: RuleSpec, kernels: Kernels) -> None:
        self.spec = spec
        self._kernels = kernels

    def initial_state(self, hyper: Hyper) -> dict[str, float]:
        """The number that fills each state slot before the first update."""
        del hyper
        return dict.fromkeys(self.slots, 0.0)

    def apply_dense(
        self, values: Tensor, grads: Tensor, state: dict[str, Tensor], step: int, hyper: Hyper
    ) -> None:
        """Update `values` and `state` in place, equal to torch.optim at its `step`-th step.

        values, grads, state: 1-D contiguous float32 or float64, one length and dtype; grads are
        not modified. step: 1-based count of updates of these values. Raises TableError otherwise.
        """
        self._check(values, grads, state, step, dims=1)
        if values.numel():
            terms = self._terms(step, _floats(hyper), lazy=False)
            _apply(self._kernels, terms, values, grads, [state[slot] for slot in self.slots])

    def apply_rows(
        self, rows: Tensor, grads: Tensor, state: dict[str, Tensor], step: int, hyper: Hyper
    ) -> None:
        """Update gathered rows and their state in place, lazily (formulas above).

        rows, grads, state: [n, dim] contiguous, one dtype, each key once. step: 1-based update
        count of the table, the same for every row of one push. Raises TableError otherwise.
        """
        self._check(rows, grads, state, step, dims=2)
        if rows.numel():
            flat = [state[slot].view(-1) for slot in self.slots]
            terms = self._terms(step, _floats(hyper), lazy=True)
            _apply(PLAIN, terms, rows.view(-1), grads.view(-1), flat)

    def update_rows(
        self,
        values: Tensor,
        rows: np.ndarray,
        grads: Tensor,
        state: dict[str, Tensor],
        step: int,
        hyper: Hyper,
        breathe: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """New values of these rows of a table, [n, dim]; their state is updated in place.

        As apply_rows on gathered rows, to the last bit; compiled where numba is installed.
        values, state: [num_rows, dim] contiguous, only read and written at `rows` int64 [n],
        distinct; grads: [n, dim].  breathe: called between slices of the work.
        """
        compiled = compiled_rows()
        if compiled is not None:
            terms = self._terms(step, _floats(hyper), lazy=True)
            slots = [state[slot].numpy() for slot in self.slots]
            out = torch.empty_like(grads)
            size = row_chunk(grads.shape[1] * grads.itemsize)
            for start in range(0, max(rows.size, 1), size):
                part = slice(start, start + size)
                into = out[part].numpy()
                compiled.update(terms, values.numpy(), slots, rows[part], grads[part].numpy(), into)
                breathe()
            return out
        touched = gather_rows(values, rows, breathe)
        gathered = {slot: gather_rows(state[slot], rows, breathe) for slot in self.slots}
        self.apply_rows(touched, grads, gathered, step, hyper)
        breathe()
        for slot, new in gathered.items():
            write_rows(state[slot], rows, new, breathe)
        return touched

    def _terms(self, step: int, hyper: Sequence[float], lazy: bool) -> SgdTerms:
        """The scalars of one step."""
        raise NotImplementedError

    def _check(
        self, values: Tensor, grads: Tensor, state: dict[str, Tensor], step: int, dims: int
    ) -> None:
        if step < 1:
            raise TableError(f"step={step} of an update: the first update is step 1")
        if set(state) != set(self.slots):
            raise TableError(
                f"rule {self.spec.name!r} keeps state {list(self.slots)}, got {sorted(state)}"
            )
        if values.dim() != dims or values.dtype not in (torch.float32, torch.float64):
            raise TableError(
                f"values are {values.dtype} {list(values.shape)}: "
                f"use float32 or float64 with {dims} dimension(s)"
            )
        for name, tensor in (("values", values), ("grads", grads), *state.items()):
            if tensor.shape != values.shape or tensor.dtype != values.dtype:
                raise TableError(
                    f"{name} are {tensor.dtype} {list(tensor.shape)}, "
                    f"values {values.dtype} {list(values.shape)}: they must agree"
                )
            if not tensor.is_contiguous():
                raise TableError(f"{name} with strides {tensor.stride()} are not contiguous")


class _Sgd(UpdateRule):
    def _terms(self, step: int, hyper: Sequence[float], lazy: bool) -> SgdTerms:
        del step, lazy
        return SgdTerms(hyper[0], hyper[1], self.spec.maximize)


class _Momentum(UpdateRule):
    slots = ("momentum_buffer",)

    def _terms(self, step: int, hyper: Sequence[float], lazy: bool) -> SgdTerms:
        lr, weight_decay, momentum, dampening = hyper[:4]
        if momentum == 0.0:  # a schedule cycled it to 0: torch then leaves the buffer alone
            return SgdTerms(lr, weight_decay, self.spec.maximize)
        return MomentumTerms(
            lr,
            weight_decay,
            self.spec.maximize,
            momentum=momentum,
            dampening=dampening,
            nesterov=self.spec.nesterov,
            first=step == 1 and not lazy,
        )


class _Adagrad(UpdateRule):
    slots = ("sum",)

    def initial_state(self, hyper: Hyper) -> dict[str, float]:
        return {"sum": float(hyper[4])}

    def _terms(self, step: int, hyper: Sequence[float], lazy: bool) -> SgdTerms:
        del lazy
        lr, weight_decay, lr_decay, eps = hyper[:4]
        decayed_lr = lr / (1.0 + (step - 1) * lr_decay)
        return AdagradTerms(decayed_lr, weight_decay, self.spec.maximize, eps=eps)


class _Adam(UpdateRule):
    slots = ("exp_avg", "exp_avg_sq")

    def _terms(self, step: int, hyper: Sequence[float], lazy: bool) -> SgdTerms:
        lr, weight_decay, beta1, beta2, eps = hyper[:5]
        decoupled = self.spec.name == "adamw"
        if lazy and not decoupled:
            # SparseAdam: a*m*r/(sqrt(s) + eps) with r = sqrt(1 - beta2^t) is Adam's
            # a*m/(sqrt(s)/r + eps/r).
            eps /= math.sqrt(1.0 - beta2**step)
        return AdamTerms(
            lr,
            weight_decay,
            self.spec.maximize,
            step=step,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            decoupled=decoupled,
        )


_RULES: dict[str, type[UpdateRule]] = {
    "sgd": _Sgd,
    "momentum": _Momentum,
    "adagrad": _Adagrad,
    "adam": _Adam,
    "adamw": _Adam,
}


def make_rule(spec: RuleSpec, *, fused: bool | None = None) -> UpdateRule:
    """The rule of a spec.

    fused: None takes torch's fused kernels where they exist and single operations elsewhere; True
    demands the former (ConfigError if absent), False the latter. All servers must choose alike.
    """
    return _RULES[spec.name](spec, _kernels(fused))


def _kernels(fused: bool | None) -> Kernels:
    if fused is False:
        return PlainKernels()
    try:
        return FusedKernels()
    except (AttributeError, RuntimeError, NotImplementedError, TypeError) as cause:
        if fused:
            raise ConfigError(
                f"torch {torch.__version__} has no fused optimizer kernels: {cause}"
            ) from cause
        return PlainKernels()


def _apply(
    kernels: Kernels, terms: SgdTerms, values: Tensor, grads: Tensor, state: Sequence[Tensor]
) -> None:
    """One step on flat tensors."""
    if isinstance(terms, AdamTerms):
        kernels.adam(values, grads, state[0], state[1], terms)
    elif isinstance(terms, AdagradTerms):
        kernels.adagrad(values, grads, state[0], terms)
    elif isinstance(terms, MomentumTerms):
        kernels.momentum(values, grads, state[0], terms)
    else:
        kernels.sgd(values, grads, terms)


@functools.cache
def compiled_rows() -> CompiledRows | None:
    """Compiled row updates; None without numba. The bits are the same."""
    try:
        return CompiledRows()
    except ImportError:
        return None


PLAIN = PlainKernels()


def _floats(hyper: Hyper) -> list[float]:
    if len(hyper) != HYPER_SIZE:
        raise TableError(f"{len(hyper)} hyper-parameters: a rule takes {HYPER_SIZE}")
    return [float(value) for value in hyper]
