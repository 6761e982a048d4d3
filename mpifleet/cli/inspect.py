"""`mpifleet inspect`: what a checkpoint holds, a table's rows, and what changed between two."""

from __future__ import annotations

import argparse
from typing import Any

from mpifleet.errors import ConfigError

EXAMPLE = "mpifleet inspect checkpoint --table emb --key 7"


def add_parser(commands: Any) -> None:
    """Add `inspect` to the subparsers of the `mpifleet` command."""
    parser = commands.add_parser(
        "inspect",
        help="look into a checkpoint",
        usage="mpifleet inspect [options] PATH",
        description="Shows what a checkpoint holds, once its digests have been checked. Exit "
        "status 0; with --diff 1 where the two differ; 2 on errors.",
        epilog=f"example: {EXAMPLE}",
    )
    parser.add_argument(
        "path", metavar="PATH", help="a checkpoint file, or a directory, whose newest counts"
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--table", metavar="T", help="statistics of this sparse table's rows and their state"
    )
    instead.add_argument(
        "--diff", metavar="OTHER", help="what changed from PATH to this checkpoint; NaN equals NaN"
    )
    instead.add_argument("--verify", action="store_true", help="only check the digests of the file")
    parser.add_argument(
        "--key", type=int, metavar="K", help="with --table: only the row of this key, and its state"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="one JSON object with all there is, sizes in bytes; NaN and infinities as text",
    )
    parser.set_defaults(call=call)


def call(arguments: argparse.Namespace) -> int:
    """Print what `arguments` ask for and return the exit status.

    Raises ConfigError for options that do not go together, CheckpointError for a checkpoint that
    cannot be read, KeyRangeError for a key outside its table.
    """
    if arguments.key is not None and arguments.table is None:
        raise ConfigError(
            f"--key {arguments.key} needs --table: keys are those of one sparse table"
        )
    # Only who looks into a checkpoint pays for HDF5: help stays quick.
    from mpifleet.cli import inspection

    return inspection.run(arguments)
