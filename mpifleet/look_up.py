"""How a look-up of rows goes: distinct keys, pooling, and the way of the gradients back."""

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mpifleet.errors import TableError
from mpifleet.partition import UniqueKeys, unique_keys
from mpifleet.ps.merge import segment_sum
from mpifleet.ps.sparse_gradient import SparseGradient


class Table(Protocol):
    """What of an embedding says how it is looked up; see SparseEmbedding."""

    name: str
    num_rows: int
    num_slots: int
    pooling: str
    shared: bool
    padding_idx: int | None

    @property
    def table_rows(self) -> int:
        """Rows of the whole table."""
        ...


class Plan:
    """How the distinct rows of one look-up become its output, and the way back."""

    def __init__(
        self,
        unique: UniqueKeys,
        bag_of: np.ndarray | None,
        lengths: np.ndarray,
        batch: int,
        mean: bool,
    ) -> None:
        self.unique, self.batch, self.mean = unique, batch, mean
        self.bag_of, self.lengths = bag_of, lengths

    @classmethod
    def make(
        cls,
        embedding: Table,
        flat: np.ndarray,
        lengths: np.ndarray,
        batch: int,
        num_servers: int,
    ) -> "Plan":
        """One sort of the ids, whole-array arithmetic for the rest.

        flat: int64 [n]; lengths: int64 [bags]; batch: samples.  Raises TableError for bags that do
        not fit the pooling, KeyRangeError for an id outside the table.
        """
        table = embedding.name
        if embedding.pooling == "concat":
            odd = np.flatnonzero(lengths != lengths[:1]) if lengths.size else lengths
            if odd.size:
                raise TableError(
                    f"table {table!r}: pooling='concat' needs equally long bags; bag {odd[0]} has "
                    f"{lengths[odd[0]]} ids, bag 0 has {lengths[0]}"
                )
        bag_of: np.ndarray | None = np.repeat(np.arange(lengths.size), lengths)
        slots = bag_of if not embedding.shared else None
        if embedding.pooling == "concat":
            lengths = np.ones(flat.size, np.int64)
            bag_of = np.arange(flat.size)
        if embedding.padding_idx is not None and bag_of is not None:
            keep = flat != embedding.padding_idx
            flat, bag_of = flat[keep], bag_of[keep]
            slots = slots[keep] if slots is not None else None
            lengths = np.bincount(bag_of, minlength=lengths.size)
        elif embedding.pooling == "concat" or (lengths == 1).all():
            bag_of = None
        if slots is not None:
            unique_keys(flat, embedding.num_rows, 1, table)  # the range is per slot
            flat = flat + (slots % embedding.num_slots) * embedding.num_rows
        unique = unique_keys(flat, embedding.table_rows, num_servers, table)
        return cls(unique, bag_of, lengths, batch, embedding.pooling == "mean")

    def pool(self, rows: Tensor) -> Tensor:
        """[u, dim] -> [bags, dim]."""
        inverse = torch.from_numpy(self.unique.inverse)
        if self.bag_of is None:
            return rows.index_select(0, inverse)
        starts = torch.from_numpy(np.cumsum(self.lengths) - self.lengths)
        if not inverse.numel():
            return rows.new_zeros((self.lengths.size, rows.shape[1]))
        mode = "mean" if self.mean else "sum"
        return nn.functional.embedding_bag(inverse, rows, starts, mode=mode)

    def unpool(self, grads: Tensor) -> Tensor:
        """Gradient of `pool`: [bags, dim] -> [u, dim], duplicates summed in order of position."""
        order = self.unique.order
        if self.bag_of is not None:
            order = self.bag_of[order]
            if self.mean:
                lengths = torch.from_numpy(np.maximum(self.lengths, 1))
                grads = grads / lengths.to(grads.dtype)[:, None]
        return segment_sum(grads.contiguous(), order, self.unique.starts)


class Lookup(torch.autograd.Function):
    """pool() of pulled rows; backward hands their gradient to the table instead of to a leaf."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, rows: Tensor, plan: Plan, gradient: SparseGradient) -> Tensor:
        """The pooled rows; the first argument stands for the table in the graph."""
        ctx.plan, ctx.gradient = plan, gradient
        return plan.pool(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Stages the rows' gradient."""
        # This runs again when a graph is kept: each backward adds once, as for any parameter.
        ctx.gradient.stage(ctx.plan.unique, ctx.plan.unpool(grads.detach()))
        return ctx.gradient.placeholder(), None, None, None
