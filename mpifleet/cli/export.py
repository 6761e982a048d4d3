"""`mpifleet export`: a checkpoint in a format that other programs read."""

from __future__ import annotations

import argparse
from typing import Any

from mpifleet.cli.vector_options import add_vector_options

EXAMPLE = "mpifleet export checkpoint model.safetensors --to safetensors"
FORMATS = ("inference", "safetensors", "state_dict", "word2vec-text", "word2vec-binary")


def add_parser(commands: Any) -> None:
    """Add `export` to the subparsers of the `mpifleet` command."""
    parser = commands.add_parser(
        "export",
        help="write a checkpoint in another format",
        usage="mpifleet export [options] --to FORMAT CHECKPOINT TARGET",
        description="Writes the values of a checkpoint, without optimizer state, in a format that "
        "other programs read. Needs no MPI. Exit status 0; 2 on errors.",
        epilog=f"example: {EXAMPLE}",
    )
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="a checkpoint file, or a directory of them"
    )
    parser.add_argument("target", metavar="TARGET", help="the file or directory to write")
    parser.add_argument(
        "--to",
        required=True,
        choices=FORMATS,
        metavar="FORMAT",
        help="inference: a directory for mpifleet.inference.load; safetensors, state_dict (a .pt "
        "file): all parameters, buffers and rows by name, as a plain torch model has them; "
        "word2vec-text, word2vec-binary: the rows of one table",
    )
    parser.add_argument(
        "--keys",
        action="append",
        default=[],
        metavar="KEYS",
        help='with --to inference: "trained" for the rows that training has changed, or T=FILE for '
        "the keys of table T in FILE, one a line; may be repeated (default: all rows)",
    )
    add_vector_options(parser, "; only these rows are written (default: all, each under its key)")
    parser.set_defaults(call=call)


def call(arguments: argparse.Namespace) -> int:
    """Write what `arguments` ask for and return the exit status.

    Raises ConfigError for options that do not go together, CheckpointError, DataError.
    """
    # Only who exports pays for HDF5 and torch: help stays quick.
    from mpifleet.cli import conversion

    return conversion.export(arguments)
