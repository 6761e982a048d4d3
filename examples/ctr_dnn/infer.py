"""Load a checkpoint of train.py in one process and print the same test AUC.

python infer.py --load checkpoints/movielens
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from clicks import Share, open_clicks
from job import add_options, auc_line, build, data_dir

from mpifleet import fleet


def main(argv: Sequence[str] | None = None) -> int:
    """Predict the held-out samples."""
    parser = argparse.ArgumentParser(
        description="Test AUC of a checkpoint.",
        epilog="example: python infer.py --data movielens --load checkpoints/movielens",
    )
    add_options(parser)
    parser.add_argument("--load", type=Path, required=True, metavar="DIR", help="a checkpoint")
    args = parser.parse_args(argv)
    fleet.init()
    model, _ = build(args, fleet.DistributedStrategy())
    fleet.init_worker()
    fleet.load_persistables(args.load)
    clicks = open_clicks(args.data, data_dir(args), args.seed)
    print(auc_line(model, clicks.test(Share(0, 1)), args.bf16), flush=True)
    fleet.stop_worker()
    return 0


if __name__ == "__main__":
    sys.exit(main())
