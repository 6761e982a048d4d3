"""The click-through model: shapes, initial values, loss, and that it can learn."""

import math

import pytest
import torch
from torch import nn

from mpifleet.errors import ConfigError
from mpifleet.models.ctr_dnn import CTRDNN


class LocalEmbedding(nn.Module):
    """ids [B, L] -> [B, L * dim], in this process."""

    def __init__(self, rows, dim):
        super().__init__()
        self.table = nn.Embedding(rows, dim)

    def forward(self, ids):
        return self.table(ids).flatten(1)


def batch(count, slots=26, dense=13, rows=50):
    generator = torch.Generator().manual_seed(1)
    return (
        torch.rand(count, dense, generator=generator),
        torch.randint(rows, (count, slots), generator=generator),
        torch.randint(2, (count,), generator=generator),
    )


def test_shapes_and_parameters():
    model = CTRDNN(LocalEmbedding(50, 10))
    dense, ids, _ = batch(5)
    assert model(dense, ids).shape == (5, 2)
    shapes = [tuple(layer.weight.shape) for layer in model.layers if isinstance(layer, nn.Linear)]
    assert shapes == [(400, 273), (400, 400), (400, 400), (2, 400)]


def test_weights_start_normal_with_one_over_root_of_fan_in():
    torch.manual_seed(0)
    for layer in CTRDNN(LocalEmbedding(5, 10)).layers:
        if isinstance(layer, nn.Linear):
            spread = layer.weight.std().item() * math.sqrt(layer.in_features)
            assert spread == pytest.approx(1.0, abs=4 / math.sqrt(2 * layer.weight.numel()))
            within = (layer.weight.abs() * math.sqrt(layer.in_features) < 1).float().mean().item()
            assert within == pytest.approx(0.6827, abs=2.5 / math.sqrt(layer.weight.numel()))
            assert not layer.bias.any()


def test_loss_is_the_mean_of_minus_log_probability():
    model = CTRDNN(LocalEmbedding(50, 4), num_dense=2, num_slots=3, dim=4, hidden=(8,))
    dense, ids, labels = batch(9, slots=3, dense=2)
    clicks = model.probability(dense, ids)
    assert not clicks.requires_grad
    expected = -torch.where(labels == 1, clicks, 1 - clicks).log().mean()
    torch.testing.assert_close(model.loss(dense, ids, labels).detach(), expected)


def test_dense_and_ids_both_reach_the_output():
    model = CTRDNN(LocalEmbedding(50, 10))
    dense, ids, _ = batch(4)
    before = model(dense, ids)
    assert not torch.equal(model(dense + 1, ids), before)
    assert not torch.equal(model(dense, (ids + 1) % 50), before)


@pytest.mark.parametrize("bf16", [False, True])
def test_it_fits_a_batch(bf16):
    torch.manual_seed(0)
    model = CTRDNN(LocalEmbedding(50, 10), hidden=(32, 32))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    inputs = batch(64)
    losses = []
    for _ in range(40):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model.loss(*inputs)
        assert loss.dtype == torch.float32
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.1 < 0.5 < losses[0]


@pytest.mark.parametrize("hidden", [(), (4, 0)])
def test_widths_must_be_positive(hidden):
    with pytest.raises(ConfigError, match="hidden="):
        CTRDNN(LocalEmbedding(5, 10), hidden=hidden)
