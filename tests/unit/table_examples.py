"""Small tables for the tests of the parameter server's parts."""

import numpy as np

from mpifleet.ps.rule_spec import HYPER_SIZE, RuleSpec
from mpifleet.ps.spec import DenseSpec, ParamSpec, SparseSpec, TableSpecs


def hyper(*values):
    """Hyper-parameters in their slots, the rest 0: float64 [HYPER_SIZE]."""
    return np.array([*values, *[0.0] * (HYPER_SIZE - len(values))])


HYPERS = {
    "sgd": hyper(0.5),
    "momentum": hyper(0.1, 0.01, 0.9),
    "adagrad": hyper(0.1, 0.0, 0.01, 1e-10, 0.1),
    "adam": hyper(0.01, 0.0, 0.9, 0.999, 1e-8),
    "adamw": hyper(0.01, 0.1, 0.9, 0.999, 1e-8),
}


def dense_spec(name, sizes, rule="sgd", dtype="float32"):
    """A dense table of one-dimensional parameters p0, p1, ... of these sizes."""
    stops = np.cumsum(sizes).tolist()
    params = tuple(
        ParamSpec(f"p{i}", (size,), stop - size, stop)
        for i, (size, stop) in enumerate(zip(sizes, stops, strict=True))
    )
    return DenseSpec(name, dtype, RuleSpec(rule), params)


def sparse_spec(name, num_rows, dim, rule="sgd", dtype="float32"):
    """A sparse table with uniform first values."""
    return SparseSpec(name, num_rows, dim, dtype, RuleSpec(rule), "uniform", 0.5, 7)


def two_and_two(rule="sgd"):
    """Two dense tables, of both dtypes, and two sparse ones."""
    return TableSpecs(
        (dense_spec("dense0", (5, 40, 1), rule), dense_spec("dense1", (33,), rule, "float64")),
        (sparse_spec("emb", 101, 10, rule), sparse_spec("wide", 7, 3, rule, "float64")),
    )
