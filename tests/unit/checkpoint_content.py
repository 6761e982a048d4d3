"""What tests of checkpoints write, and how they look at what is there."""

import re
from pathlib import Path

import numpy as np

from mpifleet.checkpoint import (
    DenseEntry,
    SparseShape,
    open_checkpoint,
)

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_ROWS, DIM = 1_003, 4
ODD_NAMES = ["a/b", "..", "100%", "%2F", "fc.1 ü"]


def table(name="emb", *, num_rows=NUM_ROWS, seed=0):
    """A table and its arrays."""
    generator = np.random.default_rng(seed)
    arrays = {
        slot: generator.normal(size=(num_rows, DIM)).astype(np.float32)
        for slot in ("rows", "exp_avg", "exp_avg_sq")
    }
    attrs = {"seed": 2**62, "initializer": "uniform", "updates": 9, "rule": {"name": "adam"}}
    return SparseShape(name, num_rows, DIM, "float32", ("exp_avg", "exp_avg_sq"), attrs), arrays


def content(value=1.0, **table_options):
    """Arguments of write_checkpoint; `value` tells one save from another."""
    weight = np.arange(12, dtype=np.float32).reshape(3, 4).T * np.float32(value)
    dense = [
        DenseEntry("net.weight", weight, {"exp_avg": weight * 2}, 7, {"lr": 0.1}),
        DenseEntry("empty", np.empty((0, 3), np.float64)),
        DenseEntry("scalar", np.float32(np.nan) * np.ones(())),
        *(DenseEntry(name, np.full(2, np.finfo(float).tiny)) for name in ODD_NAMES),
    ]
    buffers = {
        "norm.running_mean": np.array([-0.0, np.inf, 5e-324]),
        "norm.num_batches_tracked": np.array(3, dtype=np.int64),
        "mask": np.array([True, False]),
    }
    meta = {"version": "0.1", "strategy": {"a_sync": True, "k": [1, 2]}, "a/b": None}
    return {
        "dense": dense,
        "sparse": [table(**table_options)],
        "buffers": buffers,
        "meta": meta,
    }


def value_in(directory):
    """The value by which `content` was told from others, as the file has it."""
    with open_checkpoint(directory) as checkpoint:
        return checkpoint.dense("net.weight").value[1, 0]


def leftovers(directory):
    """Names of all files but whole checkpoints and what belongs to them."""
    names = {path.name for path in directory.iterdir()}
    own = {name for name in names if re.fullmatch(r"model-\d{6}\.h5", name)}
    return sorted(names - own - {name + ".sums" for name in own} - {"latest"})
