"""The gradient of a table between backward() and step(), with the life of an ordinary .grad."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from mpifleet.partition import UniqueKeys, unique_keys
from mpifleet.ps.merge import segment_sum

_MOST_TASKS = 64


class _Mark(torch.Tensor):
    """The .grad of a table's weight. Zeroing it, as model.zero_grad(set_to_none=False) does,
    forgets the gradient of the rows too.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    forget: Callable[[], None]

    def zero_(self) -> Tensor:
        self.forget()
        return super().zero_()


class SparseGradient:
    """(keys, gradient rows) of all backward passes since the last zero_grad.

    It follows `weight.grad`, an empty tensor that autograd makes and adds to like any other: where
    zero_grad (the optimizer's or the model's) made that None, what was collected before is gone.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        self._weight = weight
        self._staged: dict[int, list[tuple[UniqueKeys, Tensor]]] = {}
        self._kept: list[tuple[UniqueKeys, Tensor]] = []
        self._seen: Tensor | None = None
        weight.register_post_accumulate_grad_hook(self._accumulate)

    def placeholder(self) -> Tensor:
        """What a look-up returns to autograd as the gradient of `weight`."""
        return torch.zeros_like(self._weight)

    def stage(self, unique: UniqueKeys, grads: Tensor) -> None:
        """Called in backward: the look-up's distinct keys, their gradient [u, dim]."""
        # By task: backward passes nest (checkpointing), and run side by side in threads.
        task = torch._C._current_graph_task_id()
        self._staged.setdefault(task, []).append((unique, grads))
        if len(self._staged) > _MOST_TASKS:
            # torch.autograd.grad() keeps no .grad, and what it staged is never taken.
            self._staged.pop(next(iter(self._staged)))

    def _accumulate(self, weight: Tensor) -> None:
        # What torch.autograd.grad() staged never gets here and must not be taken for a gradient.
        task = torch._C._current_graph_task_id()
        if weight.grad is not self._seen:
            self._kept.clear()
            mark = torch.zeros_like(weight).as_subclass(_Mark)
            mark.forget = self._kept.clear
            self._seen = weight.grad = mark
        self._kept += self._staged.pop(task, [])

    def clear(self) -> None:
        """Forget everything collected."""
        self._kept.clear()
        self._staged.clear()
        self._seen = None

    def merged(self, num_rows: int, num_servers: int, table: str) -> tuple[UniqueKeys, Tensor]:
        """Distinct keys and the sum of each one's gradients, in order of the backward passes.

        Returns (unique, [u, dim]); nothing collected gives no keys.
        """
        kept = self._kept if self._weight.grad is not None else []
        if len(kept) == 1 and kept[0][0].num_servers == num_servers:
            return kept[0]
        no_grads = self._weight.new_zeros((0, self._weight.shape[1]))
        keys = np.concatenate([np.empty(0, np.int64), *(part.keys for part, _ in kept)])
        grads = torch.cat([no_grads, *(part for _, part in kept)])
        unique = unique_keys(keys, num_rows, num_servers, table)
        return unique, segment_sum(grads, unique.order, unique.starts)

    def scale_(self, factor: Tensor | float) -> None:
        """Multiply everything collected, as gradient clipping does."""
        for _, grads in self._kept:
            grads.mul_(factor)
