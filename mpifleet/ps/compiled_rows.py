"""One lazy step of each rule on rows of a table where they lie, compiled by numba.

Gathering rows and their state, updating them and writing the state back are four to seven passes
of cache misses; here it is one. Every operation rounds once and in the order of
rule_kernels.PlainKernels, so the bits are the same. Rows are touched a block ahead of their
update: their misses overlap then, which is most of the gain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpifleet.ps.compiled import Compiler
from mpifleet.ps.rule_kernels import AdagradTerms, AdamTerms, MomentumTerms, SgdTerms

_BLOCK_ROWS = 64

Update = Callable[..., float]


class CompiledRows:
    """Compiled lazy updates. Raises ImportError on construction without numba."""

    def __init__(self) -> None:
        self._compiler = Compiler()
        self._compiler.inline(_descent)
        self._compiled: dict[tuple[Update, type], Update] = {}

    def update(
        self,
        terms: SgdTerms,
        values: np.ndarray,
        state: Sequence[np.ndarray],
        rows: np.ndarray,
        grads: np.ndarray,
        out: np.ndarray,
    ) -> None:
        """New values of the rows into `out`; their state is updated in place, `values` is not.

        values, state: [num_rows, dim]; rows: int64 [n], distinct; grads, out: [n, dim]; one dtype,
        C-contiguous.
        """
        function, numbers = _choose(terms, values.dtype.type)
        decay, maximize = values.dtype.type(_coupled_decay(terms)), terms.maximize
        common = (values, rows, grads, out, decay, maximize, _BLOCK_ROWS)
        key = (function, values.dtype.type)
        if key not in self._compiled:
            nothing = (values, rows[:0], grads[:0], out[:0], decay, maximize, _BLOCK_ROWS)
            self._compiled[key] = self._compiler.compile(function, (*nothing, *state, *numbers))
        self._compiled[key](*common, *state, *numbers)


def _coupled_decay(terms: SgdTerms) -> float:
    """The weight decay that is added to the gradient."""
    return 0.0 if isinstance(terms, AdamTerms) and terms.decoupled else terms.weight_decay


def _choose(terms: SgdTerms, number: Callable[[float], Any]) -> tuple[Update, Sequence[Any]]:
    """The function for these terms and its scalars, rounded to the table's dtype."""
    if isinstance(terms, AdamTerms):
        kept = 1.0 - terms.lr * terms.weight_decay if terms.decoupled else 1.0
        rates = (terms.step_size, terms.root_correction2, terms.eps, kept)
        return _adam, [
            number(x) for x in (1.0 - terms.beta1, terms.beta2, 1.0 - terms.beta2, *rates)
        ]
    if isinstance(terms, AdagradTerms):
        return _adagrad, [number(terms.lr), number(terms.eps)]
    if isinstance(terms, MomentumTerms):
        mix = (number(terms.lr), number(terms.momentum), number(1.0 - terms.dampening))
        return _momentum, [*mix, terms.nesterov]
    return _sgd, [number(terms.lr)]


def _descent(value, grad, decay, maximize):  # type: ignore[no-untyped-def]
    """The gradient with its sign and weight decay; called from compiled code."""
    if decay != 0:
        return value * decay - grad if maximize else value * decay + grad
    return -grad if maximize else grad


def _sgd(values, rows, grads, out, decay, maximize, block, lr):  # type: ignore[no-untyped-def]
    dim, seen = values.shape[1], values.dtype.type(0)
    for low in range(0, rows.size, block):
        high = min(low + block, rows.size)
        for i in range(low, high):
            seen += values[rows[i], 0] + values[rows[i], dim - 1]
        for i in range(low, high):
            r = rows[i]
            for j in range(dim):
                v = values[r, j]
                d = _descent(v, grads[i, j], decay, maximize)
                out[i, j] = v - d * lr
    return seen


def _momentum(  # type: ignore[no-untyped-def]
    values, rows, grads, out, decay, maximize, block, buffer, lr, momentum, fresh, nesterov
):
    dim, seen = values.shape[1], values.dtype.type(0)
    for low in range(0, rows.size, block):
        high = min(low + block, rows.size)
        for i in range(low, high):
            r = rows[i]
            seen += values[r, 0] + values[r, dim - 1] + buffer[r, 0] + buffer[r, dim - 1]
        for i in range(low, high):
            r = rows[i]
            for j in range(dim):
                v = values[r, j]
                d = _descent(v, grads[i, j], decay, maximize)
                b = buffer[r, j] * momentum + d * fresh
                buffer[r, j] = b
                out[i, j] = v - ((b * momentum + d) * lr if nesterov else b * lr)
    return seen


def _adagrad(  # type: ignore[no-untyped-def]
    values, rows, grads, out, decay, maximize, block, total, lr, eps
):
    dim, seen = values.shape[1], values.dtype.type(0)
    for low in range(0, rows.size, block):
        high = min(low + block, rows.size)
        for i in range(low, high):
            r = rows[i]
            seen += values[r, 0] + values[r, dim - 1] + total[r, 0] + total[r, dim - 1]
        for i in range(low, high):
            r = rows[i]
            for j in range(dim):
                v = values[r, j]
                d = _descent(v, grads[i, j], decay, maximize)
                s = total[r, j] + d * d
                total[r, j] = s
                out[i, j] = v - (d * lr) / (np.sqrt(s) + eps)
    return seen


def _adam(  # type: ignore[no-untyped-def]
    values, rows, grads, out, decay, maximize, block, averages, squares, *numbers
):
    mix, beta2, fresh, step_size, root, eps, kept = numbers
    dim, seen = values.shape[1], values.dtype.type(0)
    for low in range(0, rows.size, block):
        high = min(low + block, rows.size)
        for i in range(low, high):
            r = rows[i]
            seen += values[r, 0] + averages[r, 0] + squares[r, 0]
            seen += values[r, dim - 1] + averages[r, dim - 1] + squares[r, dim - 1]
        for i in range(low, high):
            r = rows[i]
            for j in range(dim):
                v = values[r, j] * kept
                d = _descent(v, grads[i, j], decay, maximize)
                m, s = averages[r, j], squares[r, j]
                m = m + (d - m) * mix
                s = s * beta2 + (d * d) * fresh
                averages[r, j], squares[r, j] = m, s
                out[i, j] = v - (m / (np.sqrt(s) / root + eps)) * step_size
    return seen
