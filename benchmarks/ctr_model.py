"""The click-through model, its optimizers and one pass over batches, the same for every job."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import nn

from benchmarks import multislot
from mpifleet.data.criteo import HASH_DIM
from mpifleet.data.samples import Samples
from mpifleet.metrics import AUC
from mpifleet.models.ctr_dnn import CTRDNN

DIM = 10
INIT_SCALE = 0.01
LEARNING_RATE = 1e-3
BATCH = 1000
TEST_BATCH = 2000
WARM_UP_STEPS = 20


class TorchTable(nn.Module):
    """The embedding in plain torch: bags of one id with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(HASH_DIM, DIM, mode="sum", sparse=True)
        nn.init.uniform_(self.bag.weight, -INIT_SCALE, INIT_SCALE)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows [B, slots * DIM] of ids int64 [B, slots]."""
        return self.bag(ids.reshape(-1, 1)).view(ids.shape[0], -1)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of every job that trains."""
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--source", choices=["memory", "text"], default="memory")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=BATCH)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--auc", action="store_true", help="held-out AUC; no steps to warm up")


def in_memory(samples: Samples, batch_size: int, index: int = 0, count: int = 1) -> list[Samples]:
    """Worker `index`'s batches: every count-th one; the last batch may be shorter."""
    starts = range(index * batch_size, samples.num_samples, count * batch_size)
    return [samples.rows(slice(start, start + batch_size)) for start in starts]


def from_text(path: Path, batch_size: int, index: int = 0, count: int = 1) -> Iterator[Samples]:
    """Worker `index`'s batches of a text file, of which each worker reads one stretch."""
    with multislot.read(path, batch_size, index, count) as batches:
        yield from batches


def tensors(batch: Samples) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dense, ids, labels, without a copy."""
    dense, ids = torch.from_numpy(batch.dense), torch.from_numpy(batch.ids)
    return dense, ids, torch.from_numpy(batch.labels)


def train(
    model: CTRDNN,
    optimizers: Iterable[torch.optim.Optimizer],
    batches: Iterable[Samples],
    bf16: bool,
) -> int:
    """One step per batch; returns the number of samples."""
    optimizers = list(optimizers)
    count = 0
    for batch in batches:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model.loss(*tensors(batch))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        count += batch.num_samples
    return count


def held_out(model: CTRDNN, batches: Iterable[Samples]) -> AUC:
    """Counts for an AUC in float32, whatever the training computed in."""
    metric = AUC()
    for batch in batches:
        dense, ids, _ = tensors(batch)
        metric.update(model.probability(dense, ids).numpy(), batch.labels)
    return metric
