"""The click-through model of PaddlePaddle's distributed CTR example.

26 sparse slots looked up in one shared embedding, joined with 13 dense inputs, three ReLU layers
and two outputs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import nn

from mpifleet.errors import ConfigError

__all__ = ["CTRDNN"]


class CTRDNN(nn.Module):
    """Logits of (no click, click) from dense inputs and embedded ids."""

    def __init__(
        self,
        embedding: nn.Module,
        num_dense: int = 13,
        num_slots: int = 26,
        dim: int = 10,
        hidden: Sequence[int] = (400, 400, 400),
    ) -> None:
        """embedding: maps ids int64 [B, num_slots] to floats [B, num_slots * dim].

        Linear weights start normal with standard deviation 1 / sqrt(fan_in), biases at 0.
        """
        super().__init__()
        if not hidden or min(hidden) < 1:
            raise ConfigError(f"hidden={tuple(hidden)}; use one or more positive widths")
        self.embedding = embedding
        self.num_dense = num_dense
        widths = [num_slots * dim + num_dense, *hidden]
        layers: list[nn.Module] = []
        for fan_in, fan_out in itertools.pairwise(widths):
            layers += [_linear(fan_in, fan_out), nn.ReLU()]
        self.layers = nn.Sequential(*layers, _linear(widths[-1], 2))

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Logits [B, 2] of dense float [B, num_dense] and ids int64 [B, num_slots]."""
        return self.layers(torch.cat([self.embedding(ids), dense], dim=1))

    def loss(self, dense: torch.Tensor, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy, a scalar; labels int64 [B], 0 or 1."""
        return nn.functional.cross_entropy(self(dense, ids).float(), labels)

    @torch.no_grad()
    def probability(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Probability of a click, float32 [B], without gradients."""
        return torch.softmax(self(dense, ids).float(), dim=1)[:, 1]


def _linear(fan_in: int, fan_out: int) -> nn.Linear:
    linear = nn.Linear(fan_in, fan_out)
    nn.init.normal_(linear.weight, std=1.0 / math.sqrt(fan_in))
    nn.init.zeros_(linear.bias)
    return linear
