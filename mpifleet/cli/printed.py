"""Prints what was found: columns as wide as the terminal, plain text elsewhere, or JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

SHORT = 10
"""Characters of a cell that is never folded."""
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


@dataclass(frozen=True)
class Columns:
    """Lines of cells; numbers: the columns that are aligned to the right and never folded.

    On a terminal other columns are folded where a line is too long, but those of short cells.
    """

    rows: Sequence[Sequence[str]]
    heads: Sequence[str] = ()
    numbers: frozenset[int] = frozenset()
    title: str = ""


def size_text(num_bytes: int) -> str:
    """A size in the largest unit that leaves 1 or more: 1536 is "1.5 KiB"."""
    value, unit = float(num_bytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:,.1f} {_UNITS[unit]}" if unit else f"{num_bytes} B"


def printable(text: str) -> str:
    """A name as the file has it, but what a terminal would obey or cannot show is escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def show(parts: Iterable[str | Columns]) -> None:
    """Print to stdout: on a terminal as wide as it is; elsewhere plain, with nothing cut."""
    console = Console()
    for part in parts:
        if isinstance(part, str):
            print(part)
        elif console.is_terminal:
            if part.title:
                console.print(Text(part.title, style="bold"))
            console.print(_folded(part))
        else:
            print("\n".join(_plain(part)))


def show_json(found: Mapping[str, Any]) -> None:
    """Print one JSON object; NaN and infinities, which JSON lacks, as text."""
    print(json.dumps(_strict(found), indent=2, allow_nan=False))


def _strict(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(name): _strict(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _folded(part: Columns) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), show_header=bool(part.heads), pad_edge=False)
    heads = part.heads or [""] * len(part.rows[0] if part.rows else ())
    for column, head in enumerate(heads):
        is_number = column in part.numbers
        is_short = all(len(cells[column]) <= SHORT for cells in part.rows)
        table.add_column(
            Text(head),
            justify="right" if is_number else "left",
            no_wrap=is_number or is_short,
            overflow="fold",
        )
    for row in part.rows:
        table.add_row(*map(Text, row))
    return table


def _plain(part: Columns) -> Iterator[str]:
    if part.title:
        yield part.title
    lines = [part.heads, *part.rows] if part.heads else part.rows
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    for line in lines:
        cells = [
            cell.rjust(width) if column in part.numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def shape_text(shape: Sequence[int]) -> str:
    """ "4 x 3"; "scalar" without axes."""
    return " x ".join(map(str, shape)) or "scalar"


def count_text(value: Any) -> str:
    """A count with thousands marked; "-" where it is not known."""
    return f"{value:,}" if isinstance(value, int) else "-" if value is None else plain_text(value)


def plain_text(value: Any) -> str:
    """Text as it is, "-" for None, anything else as JSON."""
    if value is None:
        return "-"
    return printable(value if isinstance(value, str) else json.dumps(_strict(value)))


def number_text(value: Any) -> str:
    """Six significant digits of a float, all of an integer."""
    return f"{value:.6g}" if isinstance(value, float) else count_text(value)


def keys_text(keys: Sequence[int], count: int) -> str:
    """The first keys, and "..." where there are more."""
    return ", ".join([*map(str, keys), *(["..."] if count > len(keys) else [])]) or "-"
