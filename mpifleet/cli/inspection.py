"""Opens the checkpoints that `mpifleet inspect` is given, and prints what was asked for."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpifleet.checkpoint import (
    Checkpoint,
    check,
    is_checkable,
    members,
    newest,
    open_checkpoint,
)
from mpifleet.cli import checkpoint_text
from mpifleet.cli.bytes_read import BytesRead
from mpifleet.cli.contents import contents
from mpifleet.cli.differences import bytes_to_read, differences
from mpifleet.cli.printed import Columns, printable, show, show_json, size_text
from mpifleet.cli.row_statistics import row_of_key, table_statistics
from mpifleet.errors import CheckpointError

Found = Mapping[str, Any]
Text = Callable[[Found], Iterable[str | Columns]]


def run(arguments: argparse.Namespace) -> int:
    """Exit status: 0, or 1 where two checkpoints differ. Raises CheckpointError, KeyRangeError."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names may need more than ASCII
    try:
        found, text = _find(arguments)
    except OSError as cause:  # for instance a directory that may not be looked into
        name = cause.filename or arguments.path
        raise CheckpointError(f"{name} cannot be read: {cause.strerror}") from cause
    try:
        if arguments.json:
            show_json(found)
        else:
            show(text(found))
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read has seen enough; Python would complain once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 0 if found.get("identical", True) else 1


def _find(arguments: argparse.Namespace) -> tuple[Found, Text]:
    """What was asked for, and what makes text of it."""
    where = Path(arguments.path)
    if arguments.verify:
        return _verified(where), _verdict
    with opened(where) as checkpoint:
        if arguments.diff is not None:
            return _compared(checkpoint, Path(arguments.diff)), checkpoint_text.difference_parts
        if arguments.table is None:
            return contents(checkpoint, where), checkpoint_text.contents_parts
        if arguments.key is not None:
            row = row_of_key(checkpoint, arguments.table, arguments.key)
            return row, checkpoint_text.row_parts
        total = checkpoint.sparse(arguments.table).num_bytes
        with BytesRead("reading", total) as progress:
            statistics = table_statistics(checkpoint, arguments.table, progress.add)
        return statistics, checkpoint_text.statistics_parts


def opened(where: Path) -> Checkpoint:
    """As open_checkpoint, with a moving line while the digests are checked."""
    path = newest(where)
    _check([member for member in members(path) if is_checkable(member)])
    return open_checkpoint(path, checked=True)


def _check(paths: Sequence[Path]) -> None:
    with BytesRead("checking digests", _bytes_of(paths)) as progress:
        for path in paths:
            check(path, told=progress.add)


def _bytes_of(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def _compared(checkpoint: Checkpoint, other: Path) -> Found:
    with (
        opened(other) as second,
        BytesRead("comparing", bytes_to_read(checkpoint, second)) as progress,
    ):
        return differences(checkpoint, second, progress.add)


def _verified(where: Path) -> Found:
    """Raises CheckpointError where the file is not what its digests say, or has none."""
    path = newest(where)
    if not is_checkable(path):
        raise CheckpointError(f"{path} has no digests to check: format version 1 has none")
    paths = members(path)
    _check(paths)
    chain = {"chain": [each.name for each in paths]} if len(paths) > 1 else {}
    return {"path": str(path), "bytes": _bytes_of(paths), "intact": True, **chain}


def _verdict(found: Found) -> Iterable[str | Columns]:
    size = size_text(found["bytes"])
    count = len(found.get("chain", ())) - 1
    more = f" and {count:,} before it" if count > 0 else ""
    yield f"{printable(found['path'])}{more}: intact, all {size} are what its digests say"
