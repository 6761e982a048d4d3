"""Load what train.py wrote and print the same test AUC.

A checkpoint, in one process or as a job:

    python infer.py --load checkpoints/movielens
    mpifleet run --server_num 1 --worker_num 2 infer.py --load checkpoints/movielens

An exported model, in one process that needs neither MPI nor a job:

    python infer.py --model served/movielens
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from clicks import TABLE_ROWS, Share, open_clicks, prepare
from job import TABLE, add_options, auc_line, build, data_dir, make_model

from mpifleet import fleet, inference
from mpifleet.checkpoint import open_checkpoint
from mpifleet.errors import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Predict the held-out samples, each worker its share; on a server, serve."""
    args = parse(argv)
    prepare(args.data, data_dir(args))
    if args.model is not None:
        print(predict_alone(args), flush=True)
        return 0
    fleet.init()
    model, _ = build(args, fleet.DistributedStrategy())
    if fleet.is_server():
        fleet.run_server()
        return 0
    check_fits(args)
    fleet.init_worker()
    fleet.load_persistables(args.load)
    clicks = open_clicks(args.data, data_dir(args), args.seed)
    share = Share(fleet.worker_index(), fleet.worker_num())
    line = auc_line(model, clicks.test(share), args.bf16)
    if fleet.is_first_worker():
        print(line, flush=True)
    fleet.stop_worker()
    return 0


def predict_alone(args: argparse.Namespace) -> str:
    """The line of an exported model."""
    model = inference.load(args.model, make_model(args)).eval()
    clicks = open_clicks(args.data, data_dir(args), args.seed)
    return auc_line(model, clicks.test(Share(0, 1)), args.bf16, is_job=False)


def check_fits(args: argparse.Namespace) -> None:
    """Say which --data would fit where the checkpoint's table has another size."""
    with open_checkpoint(args.load) as checkpoint:
        num_rows = checkpoint.sparse(TABLE).num_rows
    if num_rows != TABLE_ROWS[args.data]:
        fitting = " or ".join(data for data, rows in TABLE_ROWS.items() if rows == num_rows)
        raise ConfigError(
            f"{args.load} was not trained with --data {args.data}: its table has {num_rows:,} rows "
            f"instead of {TABLE_ROWS[args.data]:,}; use --data {fitting or 'as in training'}"
        )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Test AUC of a checkpoint.",
        epilog="example: python infer.py --data movielens --load checkpoints/movielens",
    )
    add_options(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--load", type=Path, metavar="DIR", help="what train.py --save wrote")
    what.add_argument("--model", type=Path, metavar="DIR", help="what train.py --export wrote")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
