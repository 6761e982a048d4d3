"""The click-through job as one process of plain torch: EmbeddingBag(sparse=True), SparseAdam, Adam.

Writes what was measured, one JSON object, to --out; timed is the training loop alone.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence

import torch

from benchmarks import ctr_model
from benchmarks.ctr_data import CtrData
from mpifleet.models.ctr_dnn import CTRDNN


def main(argv: Sequence[str] | None = None) -> None:
    """Train one epoch and be timed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ctr_torch", description=__doc__)
    ctr_model.add_options(parser)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    table = ctr_model.TorchTable()
    model = CTRDNN(table, dim=ctr_model.DIM)
    rate = ctr_model.LEARNING_RATE
    optimizers = [
        torch.optim.SparseAdam(table.parameters(), rate),
        torch.optim.Adam(model.layers.parameters(), rate),
    ]
    data = CtrData(options.data)
    test = data.load("test")
    if not options.auc:
        first = ctr_model.in_memory(test, options.batch_size)[: ctr_model.WARM_UP_STEPS]
        ctr_model.train(model, optimizers, first, options.bf16)
    if options.source == "memory":
        batches = ctr_model.in_memory(data.load("train"), options.batch_size)
    else:
        batches = ctr_model.from_text(data.train, options.batch_size)
    start_s = time.perf_counter()
    samples = ctr_model.train(model, optimizers, batches, options.bf16)
    seconds = time.perf_counter() - start_s
    figures = {"samples": samples, "seconds": seconds, "samples_per_s": samples / seconds}
    if options.auc:
        metric = ctr_model.held_out(model, ctr_model.in_memory(test, ctr_model.TEST_BATCH))
        figures["auc"] = metric.compute()
    options.out.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
