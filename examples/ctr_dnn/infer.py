"""Load a checkpoint of train.py and print the same test AUC, in one process or as a job.

python infer.py --load checkpoints/movielens
mpifleet run --server_num 1 --worker_num 2 infer.py --load checkpoints/movielens
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from clicks import Share, open_clicks, prepare
from job import add_options, auc_line, build, data_dir

from mpifleet import fleet


def main(argv: Sequence[str] | None = None) -> int:
    """Predict the held-out samples, each worker its share; on a server, serve."""
    args = parse(argv)
    prepare(args.data, data_dir(args))
    fleet.init()
    model, _ = build(args, fleet.DistributedStrategy())
    if fleet.is_server():
        fleet.run_server()
        return 0
    fleet.init_worker()
    fleet.load_persistables(args.load)
    clicks = open_clicks(args.data, data_dir(args), args.seed)
    share = Share(fleet.worker_index(), fleet.worker_num())
    line = auc_line(model, clicks.test(share), args.bf16)
    if fleet.is_first_worker():
        print(line, flush=True)
    fleet.stop_worker()
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Test AUC of a checkpoint.",
        epilog="example: python infer.py --data movielens --load checkpoints/movielens",
    )
    add_options(parser)
    parser.add_argument(
        "--load", type=Path, required=True, metavar="DIR", help="what train.py --save wrote"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
