"""Entry point of the `mpifleet` command: parses the command line and calls one subcommand."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from mpifleet._version import __version__
from mpifleet.cli import export, import_files, inspect, run
from mpifleet.errors import FleetError


class _Parser(argparse.ArgumentParser):
    """Refuses an unknown option itself: a subcommand then shows its own usage."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (sys.argv[1:] by default) and return its exit status.

    An error of the user's making is printed in one line and gives status 2.
    """
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.call(arguments))
    except FleetError as error:
        print(f"mpifleet: error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="mpifleet",
        description="MPI-native PyTorch training.",
        epilog=f"example: {run.EXAMPLE}",
    )
    parser.add_argument("--version", action="version", version=f"mpifleet {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    run.add_parser(commands)
    inspect.add_parser(commands)
    export.add_parser(commands)
    import_files.add_parser(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
