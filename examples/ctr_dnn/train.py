"""Train a click-through model with parameters on servers.

The same script in one process or as an MPI job:

    python train.py
    mpifleet run --server_num 1 --worker_num 2 train.py
    mpirun -n 3 python train.py
    srun -n 3 python train.py
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from clicks import Clicks, Share, open_clicks, prepare
from job import add_options, auc_line, build, data_dir, tensors
from progress import TrainProgress

from mpifleet import fleet
from mpifleet.models.ctr_dnn import CTRDNN


def main(argv: Sequence[str] | None = None) -> int:
    """Train, evaluate and save; on a server, serve."""
    args = parse(argv)
    fleet.init()
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = args.mode == "async"
    model, optimizer = build(args, strategy, args.lr)
    if fleet.is_server():
        fleet.run_server()
        return 0
    fleet.init_worker()

    share = Share(fleet.worker_index(), fleet.worker_num(), equal_steps=args.mode == "sync")
    clicks = open_together(args)
    for epoch in range(args.epochs):
        train_epoch(args, epoch, clicks, share, model, optimizer)
        # Every worker's pushes are applied before any worker looks at the parameters again.
        fleet.flush()
        fleet.barrier_worker()
        optimizer.refresh()
        line = auc_line(model, clicks.test(share), args.bf16)
        if fleet.is_first_worker():
            print(line, flush=True)
        # Nobody trains on while another worker still evaluates.
        fleet.barrier_worker()
    if args.save is not None:
        fleet.save_persistables(args.save)
    fleet.stop_worker()
    return 0


def train_epoch(
    args: argparse.Namespace,
    epoch: int,
    clicks: Clicks,
    share: Share,
    model: CTRDNN,
    optimizer: torch.optim.Optimizer,
) -> None:
    """One pass over this worker's share."""
    batches = clicks.train(epoch, args.batch_size, share)
    total = clicks.num_train()
    if args.limit is not None:
        steps = max(args.limit // (args.batch_size * share.count), 1)
        batches = itertools.islice(batches, steps)
        total = steps * args.batch_size * share.count
    progress = TrainProgress(epoch, total, share.count, visible=fleet.is_first_worker())
    for step, batch in enumerate(progress.over(batches)):
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            loss = model.loss(*tensors(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            progress.loss = loss.item()


def open_together(args: argparse.Namespace) -> Clicks:
    """The data set on every worker; worker 0 makes the files, others do where its are not seen."""
    directory = data_dir(args)
    if fleet.is_first_worker():
        prepare(args.data, directory)
    fleet.barrier_worker()
    prepare(args.data, directory)
    return open_clicks(args.data, directory, args.seed)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Train a click-through model with parameters on servers.",
        epilog="example: mpifleet run --server_num 1 --worker_num 2 train.py --data synthetic",
    )
    add_options(parser)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=256, help="samples per worker and step")
    parser.add_argument("--mode", choices=["async", "sync"], default="async")
    parser.add_argument("--lr", type=float, default=1e-3, help="Adam's learning rate")
    parser.add_argument("--limit", type=int, help="samples per epoch, of all workers together")
    parser.add_argument("--save", type=Path, metavar="DIR", help="write a checkpoint there")
    args = parser.parse_args(argv)
    for name in ("epochs", "batch_size"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')}={getattr(args, name)}; use 1 or more")
    return args


if __name__ == "__main__":
    sys.exit(main())
