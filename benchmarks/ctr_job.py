"""One rank of a click-through job: a server, or a worker that trains one epoch and is timed.

Alone it is one process without MPI.  Worker 0 writes what was measured, one JSON object, to --out.
Timed is the training loop, from a barrier of all workers to the end of the last one with all its
pushes applied; imports, connections and the first steps (unless --auc) come before.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks import ctr_model
from benchmarks.ctr_data import CtrData
from mpifleet import fleet
from mpifleet.data.criteo import HASH_DIM
from mpifleet.data.samples import Samples
from mpifleet.models.ctr_dnn import CTRDNN

# What a mode sets in the strategy.
MODES: dict[str, dict[str, Any]] = {
    "async": {"a_sync": True},
    "sync": {"a_sync": False},
    "hybrid": {"a_sync": True, "dense_sync": True},
    "ssp": {"a_sync": True, "a_sync_configs": {"staleness": 1}},
}


def main(argv: Sequence[str] | None = None) -> None:
    """Serve, or train and be timed."""
    options = parse(argv)
    torch.set_num_threads(options.intra_op)
    fleet.init()
    strategy = fleet.DistributedStrategy()
    for name, value in MODES[options.mode].items():
        setattr(strategy, name, value)
    if strategy.a_sync:
        strategy.pull_ahead = options.pull_ahead
    torch.manual_seed(options.seed)
    table = fleet.SparseEmbedding("slots", HASH_DIM, ctr_model.DIM, scale=ctr_model.INIT_SCALE)
    model = CTRDNN(table, dim=ctr_model.DIM)
    adam = torch.optim.Adam(model.parameters(), ctr_model.LEARNING_RATE)
    optimizer = fleet.distributed_optimizer(adam, strategy, model=model)
    if fleet.is_server():
        fleet.run_server()
        return
    fleet.init_worker()
    figures = work(options, model, optimizer)
    if fleet.is_first_worker():
        options.out.write_text(json.dumps(figures))
    fleet.stop_worker()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ctr_job", description=__doc__)
    ctr_model.add_options(parser)
    parser.add_argument("--mode", choices=sorted(MODES), default="async")
    parser.add_argument("--pull-ahead", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="training threads per worker")
    parser.add_argument("--intra-op", type=int, default=1, help="threads that share an operator")
    return parser.parse_args(argv)


def work(
    options: argparse.Namespace, model: CTRDNN, optimizer: fleet.DistributedOptimizer
) -> dict[str, Any]:
    """What this worker measured, with the samples and the AUC of all."""
    data = CtrData(options.data)
    share = (fleet.worker_index(), fleet.worker_num())
    train = data.load("train") if options.source == "memory" else None

    def batches(index: int, count: int) -> Iterable[Samples]:
        if train is not None:
            return ctr_model.in_memory(train, options.batch_size, index, count)
        return ctr_model.from_text(data.train, options.batch_size, index, count)

    def warm_up(*_: int) -> Iterable[Samples]:
        return ctr_model.in_memory(data.load("test"), options.batch_size)[: ctr_model.WARM_UP_STEPS]

    def passed(some: Callable[[int, int], Iterable[Samples]]) -> int:
        samples = []

        def work(thread: fleet.TrainingThread) -> None:
            mine = some(share[0] * thread.num + thread.index, share[1] * thread.num)
            table = thread.model.embedding
            ahead = fleet.pull_ahead(mine, lambda b: {table: torch.from_numpy(b.ids)})
            samples.append(ctr_model.train(thread.model, [thread.optimizer], ahead, options.bf16))

        fleet.run_threads(work, options.threads)
        return sum(samples)

    if not options.auc:
        passed(warm_up)
    figures = timed(lambda: passed(batches), optimizer)
    if options.auc:
        optimizer.refresh()
        mine = ctr_model.in_memory(data.load("test"), ctr_model.TEST_BATCH, *share)
        figures["auc"] = ctr_model.held_out(model, mine).merged(fleet.util).compute()
    return figures | {"workers": fleet.worker_num(), "servers": fleet.server_num()}


def timed(epoch: Callable[[], int], optimizer: fleet.DistributedOptimizer) -> dict[str, Any]:
    """Samples and seconds of an epoch of all workers, and this one's split of a step's time."""
    fleet.flush()
    fleet.barrier_worker()
    before, start_s = optimizer.clock.split(), time.perf_counter()
    samples = epoch()
    split = optimizer.clock.split().since(before)
    fleet.flush()
    own_s = time.perf_counter() - start_s
    fleet.barrier_worker()
    seconds = time.perf_counter() - start_s
    total = int(np.asarray(fleet.util.all_reduce(np.array([samples]), mode="sum"))[0])
    return {
        "samples": total,
        "seconds": seconds,
        "own_s": own_s,
        "samples_per_s": total / seconds,
        "step_ms": 1e3 * split.step_s,
        "split_ms": {name: 1e3 * s / max(split.steps, 1) for name, s in split.seconds.items()},
    }


if __name__ == "__main__":
    main()
