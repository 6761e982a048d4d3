"""How a checkpoint fits the tables of a job: the same answer on every rank, from names alone."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mpifleet.checkpoint import Checkpoint
from mpifleet.ps.load_report import LoadedEntry, LoadReport
from mpifleet.ps.spec import DenseSpec, ParamSpec, SparseSpec, TableSpecs
from mpifleet.ps.update_rules import make_rule


def fit(
    specs: TableSpecs, checkpoint: Checkpoint, strict: bool, table: str | None = None
) -> LoadReport:
    """What a load takes of the file. Nothing is read but names, shapes and attributes.

    strict: optimizer state that lacks a slot is a misfit; else it starts anew.  table: the only
    one that counts.
    """
    entries: list[LoadedEntry] = []
    if table is None:
        params = [(spec, param) for spec in specs.dense for param in spec.params]
        names = [param.name for _, param in params]
        entries += [_param(checkpoint, spec, param, strict) for spec, param in params]
        entries += _extra("parameter", checkpoint, names, checkpoint.dense_names)
    chosen = [spec for spec in specs.sparse if table in (None, spec.name)]
    entries += [_table(checkpoint, spec, strict) for spec in chosen]
    if table is None:
        names = [spec.name for spec in chosen]
        entries += _extra("table", checkpoint, names, checkpoint.sparse_names)
    return LoadReport(str(checkpoint.path), tuple(entries), checkpoint.about.kind)


def missing_entry(kind: str, name: str, path: Any) -> LoadedEntry:
    """Of the model, and not in the file."""
    return LoadedEntry(kind, name, "missing", f"{kind} {name!r} is not in the checkpoint ({path})")


def extra_entry(kind: str, name: str, path: Any) -> LoadedEntry:
    """Of the file, and not in the model."""
    reason = f"{kind} {name!r} is not in the model ({path})"
    return LoadedEntry(kind, name, "extra", reason)


def misfit_entry(kind: str, name: str, theirs: Any, ours: Any, path: Any) -> LoadedEntry:
    """Of another shape or dtype."""
    reason = f"{kind} {name!r} is {theirs} in the file, {ours} here ({path})"
    return LoadedEntry(kind, name, "misfit", reason)


def _extra(
    kind: str, checkpoint: Checkpoint, ours: Collection[str], theirs: Sequence[str]
) -> Iterator[LoadedEntry]:
    for name in theirs:
        if name not in ours:
            yield extra_entry(kind, name, checkpoint.path)


def _param(checkpoint: Checkpoint, spec: DenseSpec, param: ParamSpec, strict: bool) -> LoadedEntry:
    if param.name not in checkpoint.dense_names:
        return missing_entry("parameter", param.name, checkpoint.path)
    found = checkpoint.dense_shape(param.name)
    theirs, ours = (found.shape, np.dtype(found.dtype).name), (param.shape, spec.dtype)
    if theirs != ours:
        return misfit_entry("parameter", param.name, theirs, ours, checkpoint.path)
    saved = (found.attrs, found.state_names)
    return _stateful("parameter", param.name, spec, saved, checkpoint, strict)


def _table(checkpoint: Checkpoint, spec: SparseSpec, strict: bool) -> LoadedEntry:
    if spec.name not in checkpoint.sparse_names:
        return missing_entry("table", spec.name, checkpoint.path)
    found = checkpoint.sparse(spec.name)
    theirs = (found.num_rows, found.dim, found.dtype)
    ours = (spec.num_rows, spec.dim, spec.dtype)
    if theirs != ours:
        return misfit_entry("table", spec.name, theirs, ours, checkpoint.path)
    saved = (found.attrs, found.state_names)
    return _stateful("table", spec.name, spec, saved, checkpoint, strict)


def _stateful(
    kind: str,
    name: str,
    spec: DenseSpec | SparseSpec,
    saved: tuple[Mapping[str, Any], Collection[str]],
    checkpoint: Checkpoint,
    strict: bool,
) -> LoadedEntry:
    """Values that fit: does the state? It is taken whole or not at all.

    Half of it would be wrong: adam's step count without its second moments makes huge steps.
    """
    (attrs, slots), rule = saved, spec.rule.name
    if "rule" not in attrs:
        reason = f"{name} was imported: its optimizer state starts anew"
        return LoadedEntry(kind, name, "state anew", reason, was_told=True)
    if attrs["rule"] != rule:
        reason = (
            f"{name} was saved under rule {attrs['rule']} and is used under {rule}: its "
            "optimizer state starts anew"
        )
        return LoadedEntry(kind, name, "state anew", reason)
    lacking = [slot for slot in make_rule(spec.rule).slots if slot not in slots]
    if lacking:
        reason = f"state {lacking[0]!r} of {name!r} is not in {checkpoint.path}"
        more = "" if strict else ": its optimizer state starts anew"
        return LoadedEntry(kind, name, "misfit" if strict else "state anew", reason + more)
    return LoadedEntry(kind, name, "taken")
