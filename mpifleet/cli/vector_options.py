"""Options of `mpifleet export` and `mpifleet import` that go with word2vec's formats."""

from __future__ import annotations

import argparse


def add_vector_options(parser: argparse.ArgumentParser, rows: str) -> None:
    """Add --table and --vocab. rows: what the help says of the rows that --vocab is about."""
    parser.add_argument("--table", metavar="T", help="with word2vec: which table, if several")
    parser.add_argument(
        "--vocab",
        metavar="FILE",
        help=f"with word2vec: line k, from 0, begins with the word of key k{rows}",
    )
