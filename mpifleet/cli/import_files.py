"""`mpifleet import`: a checkpoint like another one, with values from a file of another program."""

from __future__ import annotations

import argparse
from typing import Any

from mpifleet.cli.vector_options import add_vector_options

EXAMPLE = (
    "mpifleet import vectors.txt warm --like checkpoint --from word2vec-text --vocab words.txt"
)
FORMATS = ("state_dict", "word2vec-text", "word2vec-binary")


def add_parser(commands: Any) -> None:
    """Add `import` to the subparsers of the `mpifleet` command."""
    parser = commands.add_parser(
        "import",
        help="write a checkpoint with values from another format",
        usage="mpifleet import [options] --like CHECKPOINT FILE TARGET",
        description="Writes a checkpoint that is like another one, which says what names, shapes "
        "and dtypes there are, with the values of FILE. What is replaced has no optimizer state. "
        "Needs no MPI. Exit status 0; 2 on errors.",
        epilog=f"example: {EXAMPLE}",
    )
    parser.add_argument("file", metavar="FILE", help="what to read")
    parser.add_argument("target", metavar="TARGET", help="the directory of checkpoints to write to")
    parser.add_argument(
        "--like",
        required=True,
        metavar="CHECKPOINT",
        help="a checkpoint of the job, for instance one saved before the first step; what FILE "
        "lacks is taken from it",
    )
    parser.add_argument(
        "--from",
        dest="source",
        choices=FORMATS,
        default=FORMATS[0],
        metavar="FORMAT",
        help="state_dict: a .safetensors, .pt or .pth file of tensors by name; word2vec-text, "
        "word2vec-binary: rows of one table (default: %(default)s)",
    )
    parser.add_argument(
        "--partial",
        action="store_true",
        help="with state_dict: allow names that only one side has, and list them",
    )
    add_vector_options(parser, " (default: words are keys in decimal)")
    parser.set_defaults(call=call)


def call(arguments: argparse.Namespace) -> int:
    """Write what `arguments` ask for and return the exit status.

    Raises ConfigError for options that do not go together, CheckpointError, DataError.
    """
    # Only who imports pays for HDF5 and torch: help stays quick.
    from mpifleet.cli import conversion

    return conversion.import_file(arguments)
