"""The table of a strategy's fields, as docs/strategy.md shows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpifleet.strategy import DistributedStrategy
from mpifleet.strategy_fields import Configs, Field, FieldGroup, Nested, Status


@dataclass(frozen=True)
class FieldRow:
    """One field in words; keys of inner groups have dotted names."""

    name: str
    type: str
    default: str
    status: str
    meaning: str


def field_rows(group: type[FieldGroup] = DistributedStrategy, prefix: str = "") -> list[FieldRow]:
    """All fields of a group and of the groups inside it, in the order of declaration."""
    rows: list[FieldRow] = []
    for name, field in group.fields.items():
        place = f"{prefix}{name}"
        if isinstance(field, Nested):
            rows.append(_group_row(place, field))
            rows += field_rows(field.group_class, f"{place}.")
        else:
            rows.append(_value_row(place, field))
    return rows


def markdown_table(rows: list[FieldRow]) -> str:
    """The rows as a Markdown table with a heading, one line each."""
    lines = ["| field | type | default | status | meaning |", "|---|---|---|---|---|"]
    for row in rows:
        cells = (f"`{row.name}`", row.type, row.default, row.status, row.meaning)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _value_row(place: str, field: Field[Any]) -> FieldRow:
    default = list(field.default) if isinstance(field.default, tuple) else field.default
    meaning = field.meaning
    if field.kind.type_name in ("int", "float", "str") and field.status is Status.WORKS:
        meaning += f" Valid: {field.kind.valid}."
    if field.other_default:
        meaning += f" Another default in Fleet: {field.other_default}."
    if field.because and field.status is not Status.WORKS:
        meaning += f" ({field.because})"
    return FieldRow(place, field.kind.type_name, f"`{default!r}`", field.status.value, meaning)


def _group_row(place: str, field: Nested[Any]) -> FieldRow:
    statuses = {row.status for row in field_rows(field.group_class)}
    best = next(status.value for status in Status if status.value in statuses)
    status = best if len(statuses) == 1 else f"{best} (see each field)"
    noun = "dict" if issubclass(field.group_class, Configs) else field.group_class.__name__
    return FieldRow(place, noun, "its fields' defaults", status, field.meaning)


if __name__ == "__main__":
    print(markdown_table(field_rows()), end="")
