"""One step of each rule family on flat tensors through torch's fused optimizer kernels.

One pass over memory, no temporaries. The kernels treat the last incomplete 64 bytes with scalar
arithmetic, which rounds differently from the vectors before it, so that tail is computed in a
padded scratch of full vectors: a slice then gives the same bits as the whole.

Same tensors as rule_kernels.py, whose Kernels protocol this follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mpifleet.ps.rule_kernels import AdagradTerms, AdamTerms, MomentumTerms, SgdTerms

_VECTOR_ELEMENTS = 16  # 64 bytes of float32: full vectors for every width torch is built for


class FusedKernels:
    """The fused kernels of this torch.

    Raises AttributeError, NotImplementedError, RuntimeError or TypeError on construction where
    torch has no such kernels for CPU tensors: each is tried once on one vector.
    """

    def __init__(self) -> None:
        for dtype in (torch.float32, torch.float64):
            v, g, m, s = (torch.ones(_VECTOR_ELEMENTS, dtype=dtype) for _ in range(4))
            self.sgd(v, g, SgdTerms(0.0, 0.0, False))
            self.momentum(v, g, m, MomentumTerms(0.0, 0.0, False, 0.5, 0.0, False, False))
            self.adagrad(v, g, m, AdagradTerms(0.0, 0.0, False, 1.0))
            for decoupled in (False, True):
                self.adam(v, g, m, s, AdamTerms(0.0, 0.0, False, 1, 0.5, 0.5, 1.0, decoupled))

    def sgd(self, values: Tensor, grads: Tensor, terms: SgdTerms) -> None:
        """Update values."""
        fused: Callable[..., object] = torch._fused_sgd_
        options: dict[str, Any] = {
            "lr": terms.lr,
            "weight_decay": terms.weight_decay,
            "momentum": 0.0,
            "dampening": 0.0,
            "nesterov": False,
            "maximize": terms.maximize,
            "is_first_step": False,
        }

        def kernel(v: Tensor, g: Tensor) -> None:
            fused([v], [g], [], **options)

        _in_full_vectors(kernel, values, grads)

    def momentum(self, values: Tensor, grads: Tensor, buf: Tensor, terms: MomentumTerms) -> None:
        """Update values and buf."""
        fused: Callable[..., object] = torch._fused_sgd_
        options: dict[str, Any] = {
            "lr": terms.lr,
            "weight_decay": terms.weight_decay,
            "momentum": terms.momentum,
            "dampening": terms.dampening,
            "nesterov": terms.nesterov,
            "maximize": terms.maximize,
            "is_first_step": terms.first,
        }

        def kernel(v: Tensor, g: Tensor, b: Tensor) -> None:
            fused([v], [g], [b], **options)

        _in_full_vectors(kernel, values, grads, buf)

    def adagrad(self, values: Tensor, grads: Tensor, total: Tensor, terms: AdagradTerms) -> None:
        """Update values and total, the sum of squared gradients."""
        fused: Callable[..., object] = torch._fused_adagrad_
        options: dict[str, Any] = {
            "lr": terms.lr,
            "lr_decay": 0.0,  # lr already holds it
            "weight_decay": terms.weight_decay,
            "eps": terms.eps,
            "maximize": terms.maximize,
        }
        step = torch.ones(())

        def kernel(v: Tensor, g: Tensor, s: Tensor) -> None:
            fused([v], [g], [s], [step], **options)

        _in_full_vectors(kernel, values, grads, total)

    def adam(
        self, values: Tensor, grads: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, terms: AdamTerms
    ) -> None:
        """Update values and both averages."""
        options: dict[str, Any] = {
            "lr": terms.lr,
            "beta1": terms.beta1,
            "beta2": terms.beta2,
            "weight_decay": terms.weight_decay,
            "eps": terms.eps,
            "amsgrad": False,
            "maximize": terms.maximize,
        }
        fused: Callable[..., object] = (
            torch._fused_adamw_ if terms.decoupled else torch._fused_adam_
        )
        step = torch.tensor(float(terms.step))

        def kernel(v: Tensor, g: Tensor, m: Tensor, s: Tensor) -> None:
            fused([v], [g], [m], [s], [], [step], **options)

        _in_full_vectors(kernel, values, grads, exp_avg, exp_avg_sq)


def _in_full_vectors(kernel: Callable[..., None], *tensors: Tensor) -> None:
    """Run `kernel` on (values, grads, *states) so that no element depends on where a slice ends."""
    size = tensors[0].numel()
    whole = size - size % _VECTOR_ELEMENTS
    if whole:
        kernel(*(tensor[:whole] for tensor in tensors))
    if whole < size:
        padded = tensors[0].new_zeros(len(tensors), _VECTOR_ELEMENTS)
        tails: Sequence[Tensor] = [tensor[whole:] for tensor in tensors]
        for scratch, tail in zip(padded, tails, strict=True):
            scratch[: size - whole].copy_(tail)
        kernel(*padded)
        for index, tail in enumerate(tails):
            if index != 1:  # the gradients are only read
                tail.copy_(padded[index, : size - whole])
