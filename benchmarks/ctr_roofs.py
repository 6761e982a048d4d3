"""What a step of the click-through job costs at least, part by part, each alone on one thread.

dense: forward and backward of the layers and the loss, with the gradient of the joined inputs.
sparse: a worker's work on ids and rows: unique, gather, spread to positions, sum of duplicates.
server: the update of all dense parameters and of the touched rows, adam.
No process waits, sends or is sent anything: with every core busy in these three parts all the time,
cores / (dense + sparse + server) samples per second is what no job of this kind can pass.

Writes one JSON object to --out: seconds per sample of each part.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from benchmarks import ctr_model
from benchmarks.ctr_data import CtrData
from benchmarks.report import interleave
from mpifleet.data.criteo import HASH_DIM, NUM_SLOTS
from mpifleet.data.samples import Samples
from mpifleet.models.ctr_dnn import CTRDNN
from mpifleet.partition import unique_keys
from mpifleet.ps.merge import segment_sum
from mpifleet.ps.message import DenseGradient, RowsGradient
from mpifleet.ps.rule_spec import RuleSpec, hyper_of_group
from mpifleet.ps.shard import Shard
from mpifleet.ps.spec import DenseSpec, ParamSpec, ShardLayout, SparseSpec, TableSpecs

ROUNDS = 5
CALLS = 10
ADAM = {"lr": ctr_model.LEARNING_RATE, "betas": (0.9, 0.999), "eps": 1e-8}


def dense_part(batches: Sequence[Samples], bf16: bool) -> Callable[[int], object]:
    """Forward and backward of one batch, on rows that are there already."""
    model = CTRDNN(nn.Identity(), dim=ctr_model.DIM)
    width = NUM_SLOTS * ctr_model.DIM
    rows = torch.randn(batches[0].num_samples, width, requires_grad=True)

    def step(call: int) -> None:
        dense, _, labels = ctr_model.tensors(batches[call % len(batches)])
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model.loss(dense, rows, labels)
        loss.backward()
        rows.grad = None
        model.zero_grad()

    return step


def sparse_part(batches: Sequence[Samples]) -> Callable[[int], object]:
    """Ids to rows and gradients to rows of one batch."""
    table = torch.rand(HASH_DIM, ctr_model.DIM)
    grads = torch.rand(batches[0].ids.size, ctr_model.DIM)

    def step(call: int) -> None:
        unique = unique_keys(batches[call % len(batches)].ids, HASH_DIM, 1, "slots")
        rows = table.index_select(0, torch.from_numpy(unique.rows))
        rows.index_select(0, torch.from_numpy(unique.inverse))
        segment_sum(grads, unique.order, unique.starts)

    return step


def server_part(batches: Sequence[Samples]) -> Callable[[int], object]:
    """The updates of one batch."""
    rule = RuleSpec("adam")
    hyper = hyper_of_group(rule, ADAM)
    size = sum(p.numel() for p in CTRDNN(nn.Identity(), dim=ctr_model.DIM).parameters())
    flat = ParamSpec("flat", (size,), 0, size)
    slots = SparseSpec("slots", HASH_DIM, ctr_model.DIM, "float32", rule, "uniform", 0.01, 0)
    specs = TableSpecs((DenseSpec("dense", "float32", rule, (flat,)),), (slots,))
    layout = ShardLayout(specs, 0, 1)
    memory = np.zeros(layout.num_bytes, np.uint8)
    shard = Shard(layout, memory, hyper[None], hyper[None], published=True)
    gradient = DenseGradient(hyper, np.ones(1, np.uint8), np.full(size, 0.01, np.float32))
    keys = [unique_keys(batch.ids, HASH_DIM, 1, "slots").rows for batch in batches]
    values = np.full((max(map(len, keys)), ctr_model.DIM), 0.01, np.float32)

    def step(call: int) -> None:
        rows = keys[call % len(keys)]
        shard.apply_dense([gradient])
        shard.apply_rows([RowsGradient(hyper, rows, values[: rows.size], rows.size)])

    return step


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all parts in turns."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ctr_roofs", description=__doc__)
    ctr_model.add_options(parser)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    whole = CtrData(options.data).load("test")
    batches = ctr_model.in_memory(whole, options.batch_size)[: 2 * CALLS]
    roads = {
        "dense_bf16": dense_part(batches, bf16=True),
        "dense_fp32": dense_part(batches, bf16=False),
        "sparse": sparse_part(batches),
        "server": server_part(batches),
    }
    times = interleave(roads, ROUNDS, dict.fromkeys(roads, CALLS))
    per_sample = {n: statistics.median(t) / options.batch_size for n, t in times.items()}
    options.out.write_text(json.dumps(per_sample))


if __name__ == "__main__":
    main()
