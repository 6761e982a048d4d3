"""The same model trained by torch and by us, step by step; models for tests of the optimizer."""

import copy

import torch
from torch import nn

from mpifleet.embedding import SparseEmbedding
from tests.unit.local_job import connect

DTYPE = torch.float64


def net():
    """Two layers, the same first values every time."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3)).to(DTYPE)


def batches(count, seed=0):
    """`count` batches of five random samples."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(5, 4, dtype=DTYPE, generator=generator) for _ in range(count)]


def loss_of(model, batch):
    """The mean square of the outputs."""
    return model(batch).square().mean()


def assert_same(ours, theirs, rtol=1e-10):
    """All parameters agree."""
    for (name, left), right in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=rtol, atol=1e-12, msg=lambda m, n=name: n + m)


def follow(build_optimizer, make=net, steps=30, each=None):
    """Train two copies of a model, one by torch and one by us, and compare them every step."""
    theirs = make()
    ours = copy.deepcopy(theirs)
    reference = build_optimizer(theirs)
    optimizer = connect(ours, build_optimizer(ours))
    for batch in batches(steps):
        for model, stepper in ((theirs, reference), (ours, optimizer)):
            stepper.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            if each is not None:
                each(model, stepper)
            stepper.step()
        assert_same(ours, theirs)
    return ours, optimizer


class TwoTables(nn.Module):
    """Two tables and a dense parameter, all zeros at first; each has a gradient of ones."""

    def __init__(self):
        super().__init__()
        options = {"pooling": "sum", "initializer": "zeros", "dtype": DTYPE}
        self.fast = SparseEmbedding("fast", 5, 2, **options)
        self.slow = SparseEmbedding("slow", 5, 2, **options)
        self.dense = nn.Parameter(torch.zeros(2, dtype=DTYPE))

    def forward(self, key=1):
        ids = torch.tensor([[key]])
        return (self.fast(ids) + self.slow(ids) + self.dense).sum()
