"""An embedding whose rows live on the parameter servers."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mpifleet.errors import TableError
from mpifleet.exchange import Exchange
from mpifleet.look_up import Lookup, Plan
from mpifleet.ps.sparse_gradient import SparseGradient
from mpifleet.pull_ahead import Expected, ExpectedLookUps
from mpifleet.table_options import check_table_options


class SparseEmbedding(nn.Module):
    """Look up rows of a table [num_rows, dim] that is spread over the servers by key.

    A forward pulls the distinct rows it needs; a backward keeps their gradient until the
    optimizer's step() pushes it. Nothing is pushed from under torch.no_grad().

    name: unique among the model's tables.  num_rows: keys are 0..num_rows - 1, per slot when not
    shared.  pooling: "sum" or "mean" of the ids of a slot, or "concat" of them.
    num_slots: slots of a sample; their results stand side by side.  shared: one table for all
    slots, else each slot has num_rows rows of its own.  initializer: "uniform" in [-scale, scale],
    "normal" with deviation `scale`, "constant" or "zeros"; a row's first value depends on table
    name, seed and key only.  padding_idx: an id that contributes zeros and is never trained.
    Raises ConfigError naming table and option for a value that cannot be.

    The parameter `weight` [0, dim] stands for the table: its param group in the optimizer gives the
    table's update rule and learning rate; a table in no group is frozen. It holds no rows:
    torch.save(model.state_dict()) saves none of them, fleet.save_persistables() does. Nor does its
    gradient have any: torch.nn.utils.clip_grad_norm_ clips dense parameters only, the distributed
    optimizer's own clip_grad_norm_ clips rows too.
    """

    def __init__(
        self,
        name: str,
        num_rows: int,
        dim: int,
        *,
        pooling: str = "concat",
        num_slots: int = 1,
        shared: bool = True,
        initializer: str = "uniform",
        scale: float | None = None,
        seed: int = 0,
        padding_idx: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        check_table_options(locals())
        super().__init__()
        self.name = name
        self.num_rows = int(num_rows)
        self.dim = int(dim)
        self.pooling = pooling
        self.num_slots = int(num_slots)
        self.shared = shared
        self.initializer = initializer
        self.scale = self.dim**-0.5 if scale is None else float(scale)
        self.seed = int(seed)
        self.padding_idx = padding_idx
        self.weight = nn.Parameter(torch.empty(0, dim, dtype=dtype))
        self._take_weight()
        self._exchange: Exchange | None = None
        self._table = -1
        self._expected: ExpectedLookUps[Plan] = ExpectedLookUps()

    def _take_weight(self) -> None:
        self.gradient = SparseGradient(self.weight)
        self.weight.sparse_embedding = self  # type: ignore[attr-defined]

    def __getstate__(self) -> dict[str, Any]:
        # A copy is a table that is not connected yet, with gradients of its own; only rows that
        # were loaded for inference are the copy's too.
        state = {name: value for name, value in vars(self).items() if name != "gradient"}
        state["_expected"] = ExpectedLookUps()
        if not getattr(self._exchange, "is_for_copies", False):
            state |= {"_exchange": None, "_table": -1}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._take_weight()

    @property
    def table_rows(self) -> int:
        """Rows of the whole table: num_rows, or num_rows per slot when not shared."""
        return self.num_rows if self.shared else self.num_rows * self.num_slots

    def connect(self, exchange: Exchange, table: int) -> None:
        """Use `exchange` for pulls and call this table number `table` there."""
        self._exchange, self._table = exchange, table

    def forward(self, ids: Tensor, offsets: Tensor | None = None) -> Tensor:
        """Rows of `ids`, pooled per slot, slots side by side: [B, num_slots * dim].

        ids int64 [B, L]: with num_slots == 1 one slot of L ids, else L == num_slots and one id per
        slot; [B, num_slots, L]: L ids per slot; or flat [n] with offsets int64 [B * num_slots],
        where each bag begins, bags in sample-major order.
        pooling "concat" gives [B, num_slots * ids per slot * dim]; all bags must be equally long.
        Raises KeyRangeError for an id outside [0, num_rows), TableError before init_worker().
        """
        exchange, training = self._connected(), torch.is_grad_enabled()
        expected = self._expected.take(ids, offsets) if training else None
        clock = exchange.clock
        before = clock.enter("unique" if training else "other")
        plan = (expected and expected.plan) or self._plan(ids, offsets)
        clock.enter("pull" if training else "other")
        rows = (expected and expected.rows) or exchange.begin_rows(self._table, plan.unique)
        pulled = torch.from_numpy(rows.take())
        if training:
            clock.enter(before if before == "backward" else "forward")
        weight = self.weight if training else self.weight.detach()
        pooled = Lookup.apply(weight, pulled, plan, self.gradient)
        if not plan.batch:
            return pooled.reshape(0, self._empty_width(ids)).to(self.weight.device)
        return pooled.reshape(plan.batch, -1).to(self.weight.device)

    def expect(
        self, ids: Tensor, offsets: Tensor | None = None, num_steps: int = 1
    ) -> Expected[Plan]:
        """Begin the pull of a training forward at most num_steps steps from now; a later one pulls
        anew.  0: only sort its keys, when a step waits next.  See fleet.pull_ahead.
        """
        exchange = self._connected()
        kept = ids.clone(), offsets.clone() if offsets is not None else None
        expected = Expected(*kept, lambda: self._timed_plan(*kept))
        if num_steps:
            plan = expected.plan = expected.make_plan()
            before = exchange.clock.enter("pull")
            expected.rows = exchange.begin_rows(self._table, plan.unique)
            exchange.clock.enter(before)
            expected.last_step = self._expected.steps + num_steps
        self._expected.add(expected)
        return expected

    def _timed_plan(self, ids: Tensor, offsets: Tensor | None) -> Plan:
        clock = self._connected().clock
        before = clock.enter("unique")
        try:
            return self._plan(ids, offsets)
        finally:
            clock.enter(before)

    def forget_expected(self, expected: Expected[Plan]) -> bool:
        """Expect this look-up no more; whether it had not been made."""
        return self._expected.discard(expected)

    def read_expected(self) -> None:
        """Read now what this rank can read itself of the next expected look-up's rows."""
        self._expected.read_near()

    def expect_nothing(self) -> None:
        """Have later look-ups pull anew."""
        self._expected.clear()

    def _connected(self) -> Exchange:
        if self._exchange is None:
            raise TableError(
                f"table {self.name!r} is not connected: call fleet.distributed_optimizer(...) "
                "and fleet.init_worker() before the first forward"
            )
        return self._exchange

    def _plan(self, ids: Tensor, offsets: Tensor | None) -> "Plan":
        for what, given in (("ids", ids), ("offsets", offsets)):
            if not isinstance(given, Tensor) and not (given is None and what == "offsets"):
                raise TableError(
                    f"table {self.name!r}: {what}={given!r:.100} is of type "
                    f"{type(given).__name__}; use a tensor, for instance torch.tensor({what})"
                )
        flat, lengths, batch = self._bags(ids.detach().cpu(), offsets)
        return Plan.make(self, flat, lengths, batch, self._connected().num_servers)

    def _empty_width(self, ids: Tensor) -> int:
        """Width of the output for no samples: what the ids' shape would give any number of them."""
        per_slot = 1
        if self.pooling == "concat" and (ids.dim() == 3 or self.num_slots == 1):
            per_slot = ids.shape[-1] if ids.dim() > 1 else 0
        return self.num_slots * per_slot * self.dim

    def _bags(self, ids: Tensor, offsets: Tensor | None) -> tuple[np.ndarray, np.ndarray, int]:
        """(flat ids, length of each bag, batch size)."""
        shape = tuple(ids.shape)
        if offsets is not None:
            return self._ragged(ids, offsets.detach().cpu().numpy())
        if ids.dim() == 2:
            per_slot = shape[1] if self.num_slots == 1 else 1
            fits = self.num_slots in (1, shape[1])
        else:
            per_slot = shape[-1] if ids.dim() == 3 else 0
            fits = ids.dim() == 3 and shape[1] == self.num_slots
        if not fits:
            raise TableError(
                f"table {self.name!r}: ids of shape {list(shape)} do not fit {self.num_slots} "
                f"slot(s); use [B, L], [B, {self.num_slots}, L], or flat ids with offsets"
            )
        lengths = np.full(shape[0] * self.num_slots, per_slot, np.int64)
        return ids.numpy().reshape(-1), lengths, shape[0]

    def _ragged(self, ids: Tensor, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        if ids.dim() != 1 or offsets.ndim != 1 or offsets.size % self.num_slots:
            raise TableError(
                f"table {self.name!r}: flat ids need 1-D offsets, {self.num_slots} per sample; got "
                f"ids {list(ids.shape)} and offsets {list(offsets.shape)}"
            )
        lengths = np.diff(offsets, append=ids.numel()).astype(np.int64)
        wrong = np.flatnonzero(lengths < 0)
        if wrong.size or (offsets.size and offsets[0] != 0) or (not offsets.size and ids.numel()):
            at = int(wrong[0]) if wrong.size else 0
            raise TableError(
                f"table {self.name!r}: offsets must begin at 0 and not decrease up to "
                f"{ids.numel()}; see offset {at}"
            )
        return ids.numpy(), lengths, offsets.size // self.num_slots

    def extra_repr(self) -> str:
        """What repr(model) shows."""
        return f"{self.name!r}, {self.table_rows}, {self.dim}, pooling={self.pooling!r}"
