"""The mean of several training threads' gradients, as one step's. Pure."""

from collections.abc import Sequence
from functools import reduce

import numpy as np
import torch

from mpifleet.exchange import Gradients
from mpifleet.partition import UniqueKeys, unique_keys
from mpifleet.ps.merge import segment_sum
from mpifleet.ps.spec import TableSpecs


def mean_of(given: Sequence[Gradients], specs: TableSpecs, num_servers: int) -> Gradients:
    """Added in the order given, then divided by their number; of one, that one.

    What parameters without a gradient carry is zero.  The first one's dense arrays hold the sum.
    Costs one pass over all values and a sort of all keys.
    """
    first, count = given[0], len(given)
    if count == 1:
        return first
    dense = []
    for arrays in zip(*(each.dense for each in given), strict=True):
        total = reduce(lambda left, right: np.add(left, right, out=left), arrays)
        dense.append(np.divide(total, count, out=total))
    present = [reduce(np.maximum, flags) for flags in zip(*(g.present for g in given), strict=True)]
    unique, rows = [], []
    for table, spec in enumerate(specs.sparse):
        parts = [(each.unique[table], each.rows[table]) for each in given]
        keys, values = _sum(parts, spec.num_rows, num_servers, spec.name)
        unique.append(keys)
        rows.append(np.divide(values, count, out=values))
    return Gradients(first.dense_hypers, present, dense, first.sparse_hypers, unique, rows)


def _sum(
    parts: list[tuple[UniqueKeys, np.ndarray]], num_rows: int, num_servers: int, table: str
) -> tuple[UniqueKeys, np.ndarray]:
    keys = np.concatenate([unique.keys for unique, _ in parts])
    values = torch.from_numpy(np.concatenate([rows for _, rows in parts]))
    unique = unique_keys(keys, num_rows, num_servers, table)
    return unique, segment_sum(values, unique.order, unique.starts).numpy()
