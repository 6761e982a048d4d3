"""Train a click-through model with parameters on servers.

The same script in one process or as an MPI job:

    python train.py
    mpifleet run --server_num 1 --worker_num 2 train.py
    mpirun -n 3 --oversubscribe python train.py
    srun -n 3 python train.py
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from clicks import Clicks, Share, deal, open_clicks, prepare
from job import add_options, auc_line, build, data_dir, tensors

from mpifleet import fleet
from mpifleet.errors import ConfigError
from mpifleet.models.ctr_dnn import CTRDNN
from mpifleet.progress import TrainProgress

LOOK_EVERY_STEPS = 20  # the loss: looking at it waits for the computation


def main(argv: Sequence[str] | None = None) -> int:
    """Train, evaluate and save; on a server, serve."""
    args = parse(argv)
    prepare(args.data, data_dir(args))
    fleet.init()
    model, optimizer = build(args, strategy_of(args), args.lr)
    if fleet.is_server():
        fleet.run_server()
        return 0
    for option in ("save", "export", "checkpoint") if fleet.is_first_worker() else ():
        if getattr(args, option) is not None:
            check_writable(getattr(args, option), option)
    fleet.init_worker()
    at = fleet.resume(args.checkpoint) if args.checkpoint is not None else None
    begin, skip = (at["epoch"], at["batch"]) if at else (0, 0)
    if begin >= args.epochs and fleet.is_first_worker():
        print(f"nothing left to train: all {args.epochs} epochs are in {args.checkpoint}")

    share = Share(fleet.worker_index(), fleet.worker_num())
    clicks = open_clicks(args.data, data_dir(args), args.seed)
    for epoch in range(begin, args.epochs):
        train_epoch(args, epoch, clicks, share, model, optimizer, skip if epoch == begin else 0)
        # Every worker's pushes are applied before any worker looks at the parameters again.
        fleet.flush()
        fleet.barrier_worker()
        optimizer.refresh()
        line = auc_line(model, clicks.test(share), args.bf16)
        if fleet.is_first_worker():
            print(line, flush=True)
        # Nobody trains on while another worker still evaluates.
        fleet.barrier_worker()
        if args.checkpoint is not None:
            fleet.save_checkpoint(args.checkpoint, {"epoch": epoch + 1, "batch": 0})
    if args.save is not None:
        fleet.save_persistables(args.save)
    if args.export is not None:
        fleet.save_inference_model(args.export, keys="trained")
    fleet.stop_worker()
    return 0


def strategy_of(args: argparse.Namespace) -> fleet.DistributedStrategy:
    """How gradients travel, and what a signal does."""
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = args.mode != "sync"
    strategy.dense_sync = args.mode == "hybrid"
    strategy.pull_ahead = args.pull_ahead
    strategy.preemptible = args.checkpoint is not None
    return strategy


def train_epoch(
    args: argparse.Namespace,
    epoch: int,
    clicks: Clicks,
    share: Share,
    model: CTRDNN,
    optimizer: fleet.DistributedOptimizer,
    skip: int = 0,
) -> None:
    """One pass over this worker's share, from its batch `skip` on."""
    batches = clicks.train(epoch, args.batch_size, share)
    total, at_most = clicks.num_train(), None
    if args.limit is not None:
        limited = range(math.ceil(args.limit / args.batch_size))
        batches = itertools.islice(batches, sum(1 for _ in deal(limited, share)))
        at_most = len(limited) * args.batch_size
        total = at_most if total is None else min(at_most, total)
    if clicks.is_exact:
        at_most = total
    progress = TrainProgress(
        f"epoch {epoch}", total, share.count, fleet.is_first_worker(), optimizer.clock, at_most
    )
    losses = []
    batches = itertools.islice(batches, skip, None)
    batches = fleet.pull_ahead(batches, lambda b: {model.embedding: torch.from_numpy(b.ids)})
    for step, batch in enumerate(progress.over(batches, lambda b: b.num_samples)):
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            loss = model.loss(*tensors(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if step % LOOK_EVERY_STEPS == 0:
            progress.loss = torch.stack(losses).mean().item()  # since the last look
            losses.clear()
        if args.checkpoint is not None and fleet.preempted():
            fleet.save_checkpoint(args.checkpoint, {"epoch": epoch, "batch": skip + step + 1})
            fleet.stop_worker()
            sys.exit(fleet.PREEMPTED)


def check_writable(directory: Path, option: str = "save") -> None:
    """Make a directory that is asked for: better refused now than after training."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigError(
            f"--{option} {directory}: cannot write there: {error.strerror}"
        ) from error


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Train a click-through model with parameters on servers.",
        epilog="example: mpifleet run --server_num 1 --worker_num 2 train.py --data synthetic",
    )
    add_options(parser)
    parser.add_argument(
        "--epochs", type=_count, default=1, help="passes over the data (default: %(default)s)"
    )
    parser.add_argument(
        "--batch-size",
        type=_count,
        default=256,
        help="samples per worker and step (default: %(default)s)",
    )
    _add_exchange_options(parser)
    parser.add_argument(
        "--lr", type=_rate, default=1e-3, help="Adam's learning rate (default: %(default)s)"
    )
    parser.add_argument(
        "--limit",
        type=_count,
        metavar="N",
        help="samples per epoch, of all workers together; the last batch is whole, so that up to "
        "--batch-size - 1 more may be trained (default: all)",
    )
    parser.add_argument("--save", type=Path, metavar="DIR", help="write a checkpoint there")
    parser.add_argument(
        "--export", type=Path, metavar="DIR", help="write a model for infer.py --model there"
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="go on from there, where training was stopped: after an epoch, or by SIGTERM or "
        "SIGUSR2, which end it with exit status 75",
    )
    return parser.parse_args(argv)


def _add_exchange_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mode",
        choices=["async", "hybrid", "sync"],
        default="async",
        help="async: every gradient is applied as it comes; sync: a step waits for all workers; "
        "hybrid: rows async, dense parameters sync (default: %(default)s)",
    )
    parser.add_argument(
        "--pull-ahead",
        type=int,
        default=0,
        metavar="N",
        help="batches whose rows are pulled before their turn, async only (default: %(default)s)",
    )


def _count(text: str) -> int:
    number = int(text) if text.lstrip("+-").isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: use a whole number of 1 or more")
    return number


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0.0 < rate < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: use a number above 0")
    return rate


if __name__ == "__main__":
    sys.exit(main())
