"""One step of each rule family on flat tensors, by single torch operations, block by block.

Only operations that round once are used (mul, add, sub, div, sqrt): torch's combined ones (add with
alpha, addcmul, addcdiv, lerp) may or may not fuse multiply and add depending on the position in the
tensor, and a slice must give the same bits as the whole. fused_kernels.py is the faster route.

All tensors: 1-D, contiguous, one length, float32 or float64, on the CPU. Gradients are only read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

_BLOCK_ELEMENTS = 1 << 15  # values, gradients, states and scratch of one block stay in cache


@dataclass(frozen=True)
class SgdTerms:
    """Scalars of one sgd step."""

    lr: float
    weight_decay: float
    maximize: bool


@dataclass(frozen=True)
class MomentumTerms(SgdTerms):
    """Scalars of one momentum step; `first` sets the buffer to the gradient."""

    momentum: float
    dampening: float
    nesterov: bool
    first: bool


@dataclass(frozen=True)
class AdagradTerms(SgdTerms):
    """Scalars of one adagrad step; lr already holds the decay of the rate."""

    eps: float


@dataclass(frozen=True)
class AdamTerms(SgdTerms):
    """Scalars of one adam step (adamw if `decoupled`); step is 1-based."""

    step: int
    beta1: float
    beta2: float
    eps: float
    decoupled: bool

    @property
    def step_size(self) -> float:
        """The rate with the correction of the first average."""
        return self.lr / (1.0 - self.beta1**self.step)

    @property
    def root_correction2(self) -> float:
        """Root of the correction of the second average."""
        return math.sqrt(1.0 - self.beta2**self.step)


class Kernels(Protocol):
    """One step of each rule family, in place; the formulas stand in update_rules.py."""

    def sgd(self, values: Tensor, grads: Tensor, terms: SgdTerms) -> None:
        """Update values."""

    def momentum(self, values: Tensor, grads: Tensor, buf: Tensor, terms: MomentumTerms) -> None:
        """Update values and buf."""

    def adagrad(self, values: Tensor, grads: Tensor, total: Tensor, terms: AdagradTerms) -> None:
        """Update values and total, the sum of squared gradients."""

    def adam(
        self, values: Tensor, grads: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, terms: AdamTerms
    ) -> None:
        """Update values and both averages."""


class PlainKernels:
    """The kernels that work on every torch."""

    def sgd(self, values: Tensor, grads: Tensor, terms: SgdTerms) -> None:
        """Update values."""
        for v, g, scratch in _blocks(values, grads, scratches=1):
            d = _gradient(v, g, scratch, terms.weight_decay, terms.maximize)
            v.sub_(torch.mul(d, terms.lr, out=scratch))

    def momentum(self, values: Tensor, grads: Tensor, buf: Tensor, terms: MomentumTerms) -> None:
        """Update values and buf."""
        for v, g, b, one, two in _blocks(values, grads, buf, scratches=2):
            d = _gradient(v, g, one, terms.weight_decay, terms.maximize)
            if terms.first:
                b.copy_(d)
            else:
                b.mul_(terms.momentum).add_(torch.mul(d, 1.0 - terms.dampening, out=two))
            if terms.nesterov:
                torch.mul(b, terms.momentum, out=two).add_(d).mul_(terms.lr)
            else:
                torch.mul(b, terms.lr, out=two)
            v.sub_(two)

    def adagrad(self, values: Tensor, grads: Tensor, total: Tensor, terms: AdagradTerms) -> None:
        """Update values and total, the sum of squared gradients."""
        for v, g, s, one, two in _blocks(values, grads, total, scratches=2):
            d = _gradient(v, g, one, terms.weight_decay, terms.maximize)
            s.add_(torch.mul(d, d, out=two))
            _root(s, two).add_(terms.eps)
            v.sub_(torch.mul(d, terms.lr, out=one).div_(two))

    def adam(
        self, values: Tensor, grads: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, terms: AdamTerms
    ) -> None:
        """Update values and both averages."""
        step_size, root_correction2 = terms.step_size, terms.root_correction2
        weight_decay = 0.0 if terms.decoupled else terms.weight_decay
        for v, g, m, s, one, two in _blocks(values, grads, exp_avg, exp_avg_sq, scratches=2):
            if terms.decoupled:
                v.mul_(1.0 - terms.lr * terms.weight_decay)
            d = _gradient(v, g, one, weight_decay, terms.maximize)
            m.add_(torch.sub(d, m, out=two).mul_(1.0 - terms.beta1))
            s.mul_(terms.beta2).add_(torch.mul(d, d, out=two).mul_(1.0 - terms.beta2))
            _root(s, two).div_(root_correction2).add_(terms.eps)
            v.sub_(torch.div(m, two, out=one).mul_(step_size))


def _blocks(*tensors: Tensor, scratches: int) -> Iterator[tuple[Tensor, ...]]:
    size = tensors[0].numel()
    scratch = tensors[0].new_empty(scratches, min(size, _BLOCK_ELEMENTS))
    for first in range(0, size, _BLOCK_ELEMENTS):
        last = min(first + _BLOCK_ELEMENTS, size)
        yield (*(tensor[first:last] for tensor in tensors), *scratch[:, : last - first])


def _root(squares: Tensor, out: Tensor) -> Tensor:
    """The nearest number to each root. torch.sqrt may be one unit off where it goes through MKL."""
    np.sqrt(squares.numpy(), out=out.numpy())
    return out


def _gradient(
    values: Tensor, grads: Tensor, scratch: Tensor, weight_decay: float, maximize: bool
) -> Tensor:
    """g + weight_decay * values (g = -grads if maximize), in scratch unless it is grads itself."""
    if weight_decay:
        torch.mul(values, weight_decay, out=scratch)
        return scratch.sub_(grads) if maximize else scratch.add_(grads)
    return torch.neg(grads, out=scratch) if maximize else grads
