"""Trains, saves where a signal stops it, resumes: `preempted_job.py DIR [OPTION ...]`.

    --mode sync|hybrid|async|bounded   default sync
    --plain             does not ask for strategy.preemptible
    --uneven            worker 1 has fewer batches in an epoch, and meets the others at its end
    --pause-s S         in every step
    --forever           as many epochs as it takes
Worker 0 prints "ready RANK PID" after two steps and at the end "digest HEX", which covers every
parameter and row; every worker prints "stopped WORKER EPOCH BATCH" where a signal has stopped it,
and "resumed WORKER EPOCH BATCH".
"""

import argparse
import hashlib
import itertools
import os
import random
import sys
import time

import numpy as np
import torch
from torch import nn

from mpifleet import fleet

ROWS, BATCHES, EPOCHS = 60, 12, 6


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = fleet.SparseEmbedding("t", ROWS, 3, num_slots=2)
        self.drop, self.norm, self.out = nn.Dropout(0.3), nn.BatchNorm1d(6), nn.Linear(6, 1)

    def forward(self, ids):
        return self.out(self.norm(self.drop(self.table(ids)))).squeeze(1)


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--mode", default="sync")
    parser.add_argument("--pause-s", type=float, default=0.0)
    for flag in ("--plain", "--uneven", "--forever"):
        parser.add_argument(flag, action="store_true")
    return parser.parse_args()


def strategy_of(args):
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = args.mode != "sync"
    strategy.dense_sync = args.mode == "hybrid"
    strategy.preemptible = not args.plain
    if args.mode == "bounded":
        strategy.a_sync_configs = {"staleness": 2}
    return strategy


def digest(model):
    seen = hashlib.sha256()
    for param in (*model.norm.parameters(), *model.out.parameters()):
        seen.update(param.detach().numpy().tobytes())
    with torch.no_grad():
        seen.update(model.table(torch.arange(ROWS).view(-1, 2)).numpy().tobytes())
    return seen.hexdigest()


def say(*words):
    print(" ".join(map(str, words)) + "\n", end="", flush=True)


def leave(args, epoch, batch):
    fleet.save_checkpoint(args.folder, {"epoch": epoch, "batch": batch})
    say("stopped", fleet.worker_index(), epoch, batch)
    fleet.stop_worker()
    sys.exit(fleet.PREEMPTED)


def train(args, model, optimizer, scheduler):
    worker, steps = fleet.worker_index(), 0
    at = fleet.resume(args.folder)
    if at is not None:
        say("resumed", worker, at["epoch"], at["batch"])
    first, skip = (at["epoch"], at["batch"]) if at else (0, 0)
    for epoch in itertools.count(first) if args.forever else range(first, EPOCHS):
        rng = np.random.default_rng([worker, epoch])
        order = rng.integers(0, ROWS, (BATCHES - 5 * (args.uneven and worker == 1), 8, 2))
        for batch, ids in list(enumerate(order))[skip:]:
            optimizer.zero_grad()
            target = torch.randn(8) + random.random()
            nn.functional.mse_loss(model(torch.from_numpy(ids)), target).backward()
            optimizer.step()
            scheduler.step()
            time.sleep(args.pause_s)
            steps += 1
            if steps == 2 and fleet.is_first_worker():
                say("ready", 0, os.getpid())
            if not args.plain and fleet.preempted():
                leave(args, epoch, batch + 1)
        skip = 0
        fleet.flush()
        fleet.util.all_reduce(float(epoch))


def main():
    args = parse()
    fleet.init()
    torch.manual_seed(1)
    model = Net()
    inner = torch.optim.Adam(model.parameters(), lr=0.02)
    optimizer = fleet.distributed_optimizer(inner, strategy_of(args), model=model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(inner, 20)
    fleet.register_state("scheduler", scheduler)
    say("pid", os.getpid(), "server" if fleet.is_server() else f"worker{fleet.worker_index()}")
    if fleet.is_server():
        fleet.run_server()
        return
    fleet.init_worker()
    torch.manual_seed(10 + fleet.worker_index())
    random.seed(20 + fleet.worker_index())
    train(args, model, optimizer, scheduler)
    fleet.barrier_worker()
    optimizer.refresh()
    if fleet.is_first_worker():
        say("digest", digest(model))
    fleet.barrier_worker()
    fleet.stop_worker()


main()
