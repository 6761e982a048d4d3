"""What a checkpoint holds, found without reading any array: plain values for text and for JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from mpifleet.checkpoint import Checkpoint
from mpifleet.checkpoint.directory import numbers
from mpifleet.cli.saved_states import states_in
from mpifleet.strategy import DistributedStrategy


def contents(checkpoint: Checkpoint, where: Path) -> dict[str, Any]:
    """Facts of the file and of every entry; sizes in bytes, of arrays with their state.

    where: what was asked for; of a directory the numbers of all complete checkpoints are added.
    Raises CheckpointError for a damaged entry, OSError where the file is gone.
    """
    status = checkpoint.path.stat()
    written = datetime.fromtimestamp(status.st_mtime, timezone.utc)
    found: dict[str, Any] = {
        "path": str(checkpoint.path),
        "bytes": status.st_size,
        "format_version": checkpoint.format_version,
        "compression": checkpoint.compression,
        "written": written.isoformat(timespec="seconds"),
    }
    if where.is_dir():
        found["complete"] = numbers(where)
    found["kind"] = checkpoint.about.kind
    if len(checkpoint.members) > 1:
        found["chain"] = [path.name for path in checkpoint.members]
    found["meta"] = checkpoint.meta
    found["dense"] = [_dense(checkpoint, name) for name in checkpoint.dense_names]
    found["sparse"] = [_sparse(checkpoint, name) for name in checkpoint.sparse_names]
    found["buffers"] = [_buffer(checkpoint, name) for name in checkpoint.buffer_names]
    found["states"] = states_in(checkpoint)
    return found


def _dense(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    param = checkpoint.dense_shape(name)
    facts = {key: value for key, value in param.attrs.items() if key != "rule"}
    return {
        "name": name,
        "shape": list(param.shape),
        "dtype": param.dtype,
        "updates": param.step,
        "rule": param.attrs.get("rule"),
        "state": list(param.state_names),
        "bytes": param.num_bytes,
        "attributes": facts,
    }


def _sparse(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    table = checkpoint.sparse(name)
    facts = {key: value for key, value in table.attrs.items() if key not in ("step", "rule")}
    return {
        "name": name,
        "rows": table.num_rows,
        "dim": table.dim,
        "dtype": table.dtype,
        "stretches": table.num_shards,
        "updates": table.attrs.get("step"),
        "rule": table.attrs.get("rule"),
        "state": list(table.state_names),
        "bytes": table.num_bytes,
        "attributes": facts,
        **_changes(checkpoint, name),
    }


def _changes(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """Of a delta how many rows it holds itself; nothing of another checkpoint."""
    stored = checkpoint.stored(name)
    return {} if stored.stretches is None else {"changed_rows": stored.stored_rows}


def _buffer(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    shape, dtype = checkpoint.buffer_shape(name)
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return {"name": name, "shape": list(shape), "dtype": dtype, "bytes": size}


def strategy_differences(strategy: Mapping[str, Any]) -> dict[str, Any]:
    """The saved fields that differ from this version's defaults, by dotted name.

    A field that this version does not know differs.
    """
    defaults = flat(DistributedStrategy().to_dict())
    unknown = object()
    saved = flat(strategy)
    return {name: value for name, value in saved.items() if defaults.get(name, unknown) != value}


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Each value that is not itself a mapping, by its dotted name."""
    out: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            out |= flat(value, f"{prefix}{name}.")
        else:
            out[f"{prefix}{name}"] = value
    return out
