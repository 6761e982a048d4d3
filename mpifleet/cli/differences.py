"""What differs between two checkpoints: entries, their facts, and values block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from mpifleet.checkpoint import Checkpoint, blocks
from mpifleet.checkpoint.reader import Box
from mpifleet.cli.contents import contents, flat
from mpifleet.cli.row_statistics import FIRST_KEYS
from mpifleet.cli.saved_states import state_differences

KINDS = ("dense", "sparse", "buffers")
_NOT_COMPARED = ("name", "bytes", "stretches", "changed_rows")
"""As much follows from the rest, or is layout alone."""
_LAYOUT = ("shape", "rows", "dim", "dtype")
Entry = Mapping[str, Any]
Pair = tuple[Checkpoint, Checkpoint]
Told = Callable[[int], object]


class ArrayDifference:
    """Counts the changed elements of one array, which comes block by block.

    Values count, not bits: NaN equals NaN, and -0.0 equals 0.0.
    """

    def __init__(self) -> None:
        self._elements = self._changed = self._nonfinite = self._rows = 0
        self._largest: float | int | None = None
        self._first_keys: list[int] = []

    def add(self, one: np.ndarray, two: np.ndarray, first_key: int | None = None) -> None:
        """Both of the same shape and dtype; of a table [n, dim], the rows from first_key on."""
        same = (one == two) | ((one != one) & (two != two))
        self._elements += one.size
        if same.all():
            return
        changed = ~same
        count = int(np.count_nonzero(changed))
        gaps = _gaps(one[changed], two[changed])
        self._changed += count
        self._nonfinite += count - gaps.size
        if gaps.size:
            self._largest = max(gaps.max().item(), self._largest or 0)
        if first_key is not None:
            keys = np.flatnonzero(changed.any(axis=1)) + first_key
            self._rows += keys.size
            self._first_keys += keys[: FIRST_KEYS - len(self._first_keys)].tolist()

    def result(self) -> dict[str, Any]:
        """largest_difference: of the changed elements that are finite in both; None without one."""
        return {
            "elements": self._elements,
            "changed": self._changed,
            "changed_nonfinite": self._nonfinite,
            "largest_difference": self._largest,
        }

    def rows(self) -> dict[str, Any]:
        """Of a table: how many rows have a changed element, and the first of their keys."""
        return {"changed_rows": self._rows, "changed_first_keys": self._first_keys}


def _gaps(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    """Absolute differences [n] of the pairs that are finite; exact for integers."""
    if one.dtype.kind == "b":
        return np.ones(one.size, np.uint8)
    if one.dtype.kind in "iu":
        # The difference of two int64 may need 64 bits without a sign: it wraps to just these.
        return (np.maximum(one, two) - np.minimum(one, two)).view(f"u{one.dtype.itemsize}")
    finite = np.isfinite(one) & np.isfinite(two)
    with np.errstate(over="ignore"):
        return np.abs(one[finite].astype(np.float64) - two[finite].astype(np.float64))


def differences(one: Checkpoint, two: Checkpoint, told: Told) -> dict[str, Any]:
    """Facts that differ, and all arrays that both hold in the same shape and dtype, compared.

    told: called with the bytes of each block read.  Memory: a few blocks.  How a table is cut into
    stretches is no difference.  Raises CheckpointError.
    """
    ours, theirs = contents(one, one.path), contents(two, two.path)
    facts = _fact_differences("meta", _meta_facts(ours["meta"]), _meta_facts(theirs["meta"]))
    facts += state_differences(one, two)
    arrays: list[dict[str, Any]] = []
    for kind in KINDS:
        first, second = _by_name(ours[kind]), _by_name(theirs[kind])
        facts += _fact_differences(kind, _entry_facts(first), _entry_facts(second))
        for name in comparable(first, second):
            arrays += _array_differences(kind, (one, two), (first[name], second[name]), told)
    return {
        "first": str(one.path),
        "second": str(two.path),
        "identical": not facts and not any(each["changed"] for each in arrays),
        "facts": facts,
        "arrays": arrays,
    }


def bytes_to_read(one: Checkpoint, two: Checkpoint) -> int:
    """At most how many bytes `differences` reads of both."""
    ours, theirs = contents(one, one.path), contents(two, two.path)
    total = 0
    for kind in KINDS:
        first, second = _by_name(ours[kind]), _by_name(theirs[kind])
        total += sum(2 * first[name]["bytes"] for name in comparable(first, second))
    return total


def comparable(first: Mapping[str, Entry], second: Mapping[str, Entry]) -> list[str]:
    """Names that both have, with the same shape and dtype."""
    return [
        name
        for name in first
        if name in second
        and all(first[name].get(what) == second[name].get(what) for what in _LAYOUT)
    ]


def _by_name(entries: list[Entry]) -> dict[str, Entry]:
    return {entry["name"]: entry for entry in entries}


def _meta_facts(meta: Mapping[str, Any]) -> dict[str, Entry]:
    return {n: value if isinstance(value, dict) else {"value": value} for n, value in meta.items()}


def _entry_facts(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    return {
        name: {what: value for what, value in entry.items() if what not in _NOT_COMPARED}
        for name, entry in entries.items()
    }


def _fact_differences(
    kind: str, first: Mapping[str, Entry], second: Mapping[str, Entry]
) -> list[dict[str, Any]]:
    """What is said of entries; an entry that one of the two lacks differs in "present" alone."""
    found = []
    for name in dict.fromkeys((*first, *second)):
        if name in first and name in second:
            ours, theirs = flat(first[name]), flat(second[name])
        else:
            ours, theirs = {"present": name in first}, {"present": name in second}
        for what in dict.fromkeys((*ours, *theirs)):
            values = ours.get(what), theirs.get(what)
            if values[0] != values[1]:
                names = {"kind": kind, "name": name, "what": what}
                found.append({**names, "first": values[0], "second": values[1]})
    return found


def _array_differences(
    kind: str, pair: Pair, entries: tuple[Entry, Entry], told: Told
) -> Iterator[dict[str, Any]]:
    """One result for the entry's value or rows, and one for each state slot of both."""
    entry, other = entries
    slots = [slot for slot in entry.get("state", ()) if slot in other["state"]]
    if kind == "sparse":
        found = list(_table_differences(pair, entry["name"], slots, told).items())
    else:
        # Pairs: a slot may be called "value" too.
        found = [(s or "value", _compared(kind, pair, entry, s, told)) for s in (None, *slots)]
    for slot, difference in found:
        names = {"kind": kind, "name": entry["name"], "array": slot}
        rows = difference.rows() if kind == "sparse" else {}
        yield {**names, **difference.result(), **rows}


def _table_differences(
    pair: Pair, name: str, slots: list[str], told: Told
) -> dict[str, ArrayDifference]:
    found = {slot: ArrayDifference() for slot in ("rows", *slots)}
    tables = [checkpoint.sparse(name) for checkpoint in pair]
    # The one with more state slots has the larger rows, and so the smaller blocks.
    for first, last in blocks.key_blocks(max(tables, key=lambda table: table.num_bytes)):
        ours, theirs = (checkpoint.sparse_block(name, first, last) for checkpoint in pair)
        for slot, difference in found.items():
            difference.add(ours[slot], theirs[slot], first)
        told(sum(values.nbytes for block in (ours, theirs) for values in block.values()))
    return found


def _compared(kind: str, pair: Pair, entry: Entry, slot: str | None, told: Told) -> ArrayDifference:
    difference = ArrayDifference()
    for box in blocks.boxes(tuple(entry["shape"]), entry["dtype"]):
        ours, theirs = (_block(kind, checkpoint, entry["name"], slot, box) for checkpoint in pair)
        difference.add(ours, theirs)
        told(ours.nbytes + theirs.nbytes)
    return difference


def _block(kind: str, checkpoint: Checkpoint, name: str, slot: str | None, box: Box) -> np.ndarray:
    if kind == "buffers":
        return checkpoint.buffer_block(name, box)
    return checkpoint.dense_block(name, slot, box)
