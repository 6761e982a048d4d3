"""What `mpifleet inspect` says of a checkpoint, as lines and columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mpifleet.checkpoint import MODEL_FACT
from mpifleet.cli.contents import strategy_differences
from mpifleet.cli.printed import (
    Columns,
    count_text,
    keys_text,
    number_text,
    plain_text,
    printable,
    shape_text,
    size_text,
)

_STATISTICS = {
    "rows": "count",
    "all zero": "zero_rows",
    "with NaN or Inf": "nonfinite_rows",
    "their first keys": "nonfinite_first_keys",
    "min": "min",
    "max": "max",
    "mean": "mean",
    "2-norm, mean": "norm_mean",
    "2-norm, max": "norm_max",
    "key of that": "norm_max_key",
}


def contents_parts(found: Mapping[str, Any]) -> Iterator[str | Columns]:
    """The file's facts, and its entries by kind."""
    yield Columns(list(_head(found)))
    heads: tuple[str, ...] = ("name", "shape", "dtype", "updates", "rule", "state", "size")
    yield from _titled("dense parameters", heads, map(_dense_cells, found["dense"]), {3, 6})
    heads = ("name", "rows", "dim", "dtype", "stretches", "updates", "rule", "state", "size")
    numbers = {1, 2, 4, 5, 8}
    if "chain" in found:
        heads, numbers = (*heads, "changed rows"), {*numbers, 9}
    yield from _titled("sparse tables", heads, map(_table_cells, found["sparse"]), numbers)
    heads = ("name", "shape", "dtype", "size")
    yield from _titled("buffers", heads, map(_buffer_cells, found["buffers"]), {3})
    heads = ("name", "workers", "kind", "arrays", "size", "worker 0")
    yield from _titled("states", heads, map(_state_cells, found["states"]), {1, 3, 4})


def _titled(
    kind: str, heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: set[int]
) -> Iterator[str | Columns]:
    """Nothing for a kind without entries."""
    if cells := list(rows):
        yield ""
        yield Columns(cells, heads, frozenset(numbers), f"{kind}: {len(cells):,}")


def _head(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "file", printable(found["path"])
    yield "size", size_text(found["bytes"])
    compressed = f", compressed ({found['compression']})" if found["compression"] else ""
    yield "format", f"version {found['format_version']}{compressed}"
    yield "kind", found["kind"]
    for at, name in enumerate(found.get("chain", ())[:-1]):
        yield ("" if at else "follows"), printable(name)
    yield "written", found["written"].replace("T", " ").replace("+00:00", " UTC")
    if "complete" in found:
        yield "complete", ", ".join(map(str, found["complete"])) or "none with a number"
    for name, value in found["meta"].items():
        if name == "strategy" and isinstance(value, dict):
            changed = strategy_differences(value)
            lines = [f"{field} = {plain_text(v)}" for field, v in changed.items()]
        elif name == MODEL_FACT:
            continue  # names for exports: --json has them
        else:
            lines = [plain_text(value)]
        for at, line in enumerate(lines or ["all defaults"]):
            yield ("" if at else printable(name)), printable(line)


def _named(entry: Mapping[str, Any]) -> tuple[str, str, str]:
    return printable(entry["name"]), shape_text(entry["shape"]), entry["dtype"]


def _sized(entry: Mapping[str, Any]) -> tuple[str, str]:
    return printable(", ".join(entry["state"])) or "-", size_text(entry["bytes"])


def _dense_cells(entry: Mapping[str, Any]) -> tuple[str, ...]:
    rule = plain_text(entry["rule"])
    return (*_named(entry), count_text(entry["updates"]), rule, *_sized(entry))


def _buffer_cells(entry: Mapping[str, Any]) -> tuple[str, ...]:
    return (*_named(entry), size_text(entry["bytes"]))


def _state_cells(entry: Mapping[str, Any]) -> tuple[str, ...]:
    kind = "per worker" if entry["per_worker"] else "of the job"
    facts = "" if entry["facts"] is None else plain_text(entry["facts"])
    counts = f"{entry['workers']:,}", kind, f"{entry['arrays']:,}"
    return (printable(entry["name"]), *counts, size_text(entry["bytes"]), printable(facts)[:80])


def _table_cells(entry: Mapping[str, Any]) -> tuple[str, ...]:
    counts = [f"{entry[what]:,}" for what in ("rows", "dim")]
    more = (f"{entry['stretches']:,}", count_text(entry["updates"]), plain_text(entry["rule"]))
    changed = [f"{entry['changed_rows']:,}"] if "changed_rows" in entry else []
    return (printable(entry["name"]), *counts, entry["dtype"], *more, *_sized(entry), *changed)


def statistics_parts(found: Mapping[str, Any]) -> Iterator[str | Columns]:
    """A table's statistics, a column for the rows and for each state slot."""
    by_slot = found["statistics"]
    rows = []
    for label, what in _STATISTICS.items():
        rows.append((label, *(_statistic(each, what) for each in by_slot.values())))
    numbers = frozenset(range(1, len(by_slot) + 1))
    yield f"table {printable(found['table'])} of {printable(found['path'])}"
    yield Columns(rows, ("", *map(printable, by_slot)), numbers)
    if any(each["nonfinite_rows"] for each in by_slot.values()):
        yield "min and all below it: of the rows without NaN or Inf"


def _statistic(found: Mapping[str, Any], what: str) -> str:
    if what == "nonfinite_first_keys":
        return keys_text(found[what], found["nonfinite_rows"])
    if what == "norm_max_key":
        return plain_text(found[what])  # as --key takes it
    return number_text(found[what])


def row_parts(found: Mapping[str, Any]) -> Iterator[str | Columns]:
    """The row of one key, a line for each column of the table."""
    slots = found["values"]
    rows = [
        (str(column), *map(str, values))
        for column, values in enumerate(zip(*slots.values(), strict=True))
    ]
    yield f"key {found['key']} of table {printable(found['table'])} of {printable(found['path'])}"
    yield Columns(rows, ("column", *map(printable, slots)), frozenset(range(len(slots) + 1)))


def difference_parts(found: Mapping[str, Any]) -> Iterator[str | Columns]:
    """What differs; unchanged arrays are only counted."""
    yield Columns([(which, printable(found[which])) for which in ("first", "second")])
    if found["identical"]:
        yield "identical"
        return
    if found["facts"]:
        cells = [_fact_cells(fact) for fact in found["facts"]]
        yield from ("", Columns(cells, ("entry", "what", "first", "second"), title="facts"))
    changed = [array for array in found["arrays"] if array["changed"]]
    if changed:
        heads = ("entry", "array", "changed", "of", "largest", "rows", "first keys")
        cells = [_array_cells(array) for array in changed]
        yield from ("", Columns(cells, heads, frozenset({2, 3, 4, 5}), title="values"))
    yield ""
    yield f"{len(found['arrays']) - len(changed)} of {len(found['arrays'])} arrays are identical"


def _entry(found: Mapping[str, Any]) -> str:
    return printable(f"{found['kind']} {found['name']}")


def _fact_cells(fact: Mapping[str, Any]) -> tuple[str, ...]:
    values = (plain_text(fact[which]) for which in ("first", "second"))
    return (_entry(fact), printable(fact["what"]), *values)


def _largest(array: Mapping[str, Any]) -> str:
    gap, others = array["largest_difference"], array["changed_nonfinite"]
    texts = [] if gap is None else [number_text(gap)]
    return ", ".join([*texts, *([f"{others:,} NaN/Inf"] if others else [])])


def _array_cells(array: Mapping[str, Any]) -> tuple[str, ...]:
    counts = [f"{array[what]:,}" for what in ("changed", "elements")]
    rows, keys = array.get("changed_rows"), array.get("changed_first_keys", [])
    names = (_entry(array), printable(array["array"]))
    return (*names, *counts, _largest(array), count_text(rows), keys_text(keys, rows or 0))
