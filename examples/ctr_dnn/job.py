"""What training and inference share: options, model and optimizer, and the test AUC."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

import torch
from clicks import DATA_DIRS, TABLE_ROWS

from mpifleet import fleet
from mpifleet.data.samples import Samples
from mpifleet.metrics import AUC
from mpifleet.models.ctr_dnn import CTRDNN

TABLE = "slots"
DIM = 10
INIT_SCALE = 0.01  # rows start small: a value seen twice must not outweigh one seen often


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options that must be the same when a checkpoint is used again."""
    parser.add_argument(
        "--data",
        choices=sorted(TABLE_ROWS),
        default="movielens",
        help="data set (default: %(default)s); README.md says what each is",
    )
    parser.add_argument(
        "--data-dir",
        type=Path,
        metavar="DIR",
        help="where its files are or will be put (default: .data/ and the data set's name)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of split, order and first weights (default: %(default)s)",
    )
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16 (autocast)")


def data_dir(args: argparse.Namespace) -> Path:
    """Where the data set is or will be put."""
    return args.data_dir or Path(".data") / DATA_DIRS[args.data]


def make_model(args: argparse.Namespace) -> CTRDNN:
    """The model, whose rows are elsewhere."""
    torch.manual_seed(args.seed)
    table = fleet.SparseEmbedding(TABLE, TABLE_ROWS[args.data], DIM, scale=INIT_SCALE)
    return CTRDNN(table, dim=DIM)


def build(
    args: argparse.Namespace, strategy: fleet.DistributedStrategy, lr: float = 1e-3
) -> tuple[CTRDNN, torch.optim.Optimizer]:
    """The model and its optimizer, the same on every rank."""
    model = make_model(args)
    optimizer = torch.optim.Adam(model.parameters(), lr)
    return model, fleet.distributed_optimizer(optimizer, strategy, model=model)


def tensors(batch: Samples) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dense, ids, labels of a batch, without a copy."""
    dense, ids = torch.from_numpy(batch.dense), torch.from_numpy(batch.ids)
    return dense, ids, torch.from_numpy(batch.labels)


def auc_line(model: CTRDNN, share: Iterable[Samples], bf16: bool, is_job: bool = True) -> str:
    """Test AUC over the shares of all workers, as one line. Collective over workers.

    is_job: else this process has all the samples.
    """
    metric = AUC()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        for batch in share:
            dense, ids, _ = tensors(batch)
            metric.update(model.probability(dense, ids).numpy(), batch.labels)
    merged = metric.merged(fleet.util) if is_job else metric
    return f"test AUC {merged.compute():.4f} ({merged.num_samples} samples)"
