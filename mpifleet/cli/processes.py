"""The processes of this machine as /proc lists them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """One process; state: a letter, "Z" for one that has ended and is not waited for."""

    pid: int
    state: str
    parent: int
    session: int


def processes() -> Iterator[Process]:
    """Every process that can be seen; one that ends meanwhile is left out."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                # The name of the program, in parentheses, may hold anything.
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                yield Process(int(entry.name), fields[0], int(fields[1]), int(fields[3]))
