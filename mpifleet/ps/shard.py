"""One server's part of every table: values, optimizer state and the arithmetic on them.

The same code runs in a server over window memory and in a single process over plain memory, which
is why both give the same bits.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from mpifleet.partition import chunks
from mpifleet.ps.changed_rows import ChangedRows, Since
from mpifleet.ps.initializers import fill_shard
from mpifleet.ps.message import DenseGradient, RowsGradient
from mpifleet.ps.row_copy import gather_rows, write_rows
from mpifleet.ps.spec import ParamSpec, ShardLayout
from mpifleet.ps.update_rules import UpdateRule, make_rule

State = dict[str, torch.Tensor]


class Shard:
    """Tables of one server, in `memory`.

    layout: what lies where; memory: uint8 [layout.num_bytes]; dense_hypers, sparse_hypers: float64
    [tables, HYPER_SIZE], what the state starts from; exclusive: the writer's lock around every
    change of `memory`; breathe: called between chunks of a long update.
    published: readers see `memory` at any time, so dense updates are computed beside it.
    Memory besides `memory`: optimizer state, and when published one more copy of the dense slices.
    """

    def __init__(
        self,
        layout: ShardLayout,
        memory: np.ndarray,
        dense_hypers: np.ndarray,
        sparse_hypers: np.ndarray,
        *,
        exclusive: Callable[[], AbstractContextManager[Any]] = nullcontext,
        breathe: Callable[[], None] = lambda: None,
        published: bool = False,
    ) -> None:
        self.layout = layout
        self._exclusive = exclusive
        self.breathe = breathe
        specs = layout.specs
        self._views = [
            torch.from_numpy(layout.dense_view(memory, t)) for t in range(len(specs.dense))
        ]
        self._dense = [view.clone() if published else view for view in self._views]
        self.dense_steps = [np.zeros(len(spec.params), np.int64) for spec in specs.dense]
        self._rows = [
            torch.from_numpy(layout.sparse_view(memory, t)) for t in range(len(specs.sparse))
        ]
        self.sparse_steps = np.zeros(len(specs.sparse), np.int64)
        self._dense_hypers, self._sparse_hypers = dense_hypers, sparse_hypers
        self._dense_rules = [make_rule(spec.rule) for spec in specs.dense]
        self._sparse_rules = [make_rule(spec.rule) for spec in specs.sparse]
        self.dense_state = [
            _new_state(*parts)
            for parts in zip(self._dense_rules, self._dense, dense_hypers, strict=True)
        ]
        self.sparse_state = [
            _new_state(*parts)
            for parts in zip(self._sparse_rules, self._rows, sparse_hypers, strict=True)
        ]

        self.changed: ChangedRows | None = None
        self._prepare()

    def track(self, since: Since) -> None:
        """From here on note which rows are written, until told again; see ChangedRows."""
        self.changed = ChangedRows(self.layout.sparse_rows, since)

    def _mark(self, table: int, rows: np.ndarray | slice) -> None:
        if self.changed is not None:
            self.changed.mark(table, rows)

    def _prepare(self) -> None:
        """Have everything compiled before the first push waits for it."""
        none = np.empty(0, np.int64)
        for table, rows in enumerate(self._rows):
            rule, state = self._sparse_rules[table], self.sparse_state[table]
            rule.update_rows(rows, none, rows[:0], state, 1, self._sparse_hypers[table])

    def forget_dense(self, table: int, index: int) -> None:
        """Let the optimizer state of one parameter of a dense table start anew."""
        self.dense_steps[table][index] = 0
        param = self.layout.specs.dense[table].params[index]
        here, _ = self.layout.dense[table].share_of(param)
        first_of = self._dense_rules[table].initial_state(self._dense_hypers[table])
        for slot, first in first_of.items():
            self.dense_state[table][slot][here].fill_(first)

    def forget_sparse(self, table: int) -> None:
        """Let a sparse table's optimizer state start anew."""
        self._mark(table, slice(None))
        self.sparse_steps[table] = 0
        first_of = self._sparse_rules[table].initial_state(self._sparse_hypers[table])
        for slot, first in first_of.items():
            self.sparse_state[table][slot].fill_(first)

    # -- values -----------------------------------------------------------------------------------

    def initialize_rows(self) -> None:
        """Give every row of every sparse table its first value."""
        for table, (spec, rows) in enumerate(
            zip(self.layout.specs.sparse, self._rows, strict=True)
        ):
            self._mark(table, slice(None))
            with self._exclusive():
                fill_shard(
                    rows.numpy(),
                    spec.initializer,
                    self.layout.server,
                    self.layout.num_servers,
                    seed=spec.seed,
                    scale=spec.scale,
                )

    def dense(self, table: int) -> np.ndarray:
        """This server's elements of a dense table, as updated last."""
        return self._dense[table].numpy()

    def rows(self, table: int) -> np.ndarray:
        """This server's rows [rows, dim] of a sparse table."""
        return self._rows[table].numpy()

    def set_dense(self, table: int, values: np.ndarray) -> None:
        """Replace this server's elements of a dense table and publish them."""
        self._dense[table].copy_(torch.from_numpy(values))
        self._publish()

    def set_rows(self, table: int, first: int, values: np.ndarray) -> None:
        """Replace rows [first, first + len(values)) of a sparse table."""
        self._mark(table, slice(first, first + len(values)))
        with self._exclusive():
            self._rows[table][first : first + len(values)] = torch.from_numpy(values)

    def gather(self, table: int, rows: np.ndarray, out: np.ndarray) -> None:
        """out[i] = row rows[i] of a sparse table; rows int64 [n], out [n, dim]. O(bytes moved)."""
        gather_rows(self._rows[table], rows, self.breathe, torch.from_numpy(out))

    # -- updates ----------------------------------------------------------------------------------

    def apply_dense(self, gradients: Sequence[DenseGradient]) -> None:
        """Update all dense tables by one gradient each; parameters not present keep their step."""
        for table, gradient in enumerate(gradients):
            self._apply_dense(table, gradient)
        self._publish()

    def _apply_dense(self, table: int, gradient: DenseGradient) -> None:
        spec, part = self.layout.specs.dense[table], self.layout.dense[table]
        steps, rule = self.dense_steps[table], self._dense_rules[table]
        steps += gradient.present
        grads = torch.from_numpy(gradient.values)
        for start, stop, step in _runs(spec.params, gradient.present, steps):
            low, high = max(start, part.start) - part.start, min(stop, part.stop) - part.start
            if low >= high:
                continue
            for first, last in chunks(high - low, self._dense[table].itemsize):
                chunk = slice(low + first, low + last)
                state = {slot: values[chunk] for slot, values in self.dense_state[table].items()}
                values = self._dense[table][chunk]
                rule.apply_dense(values, grads[chunk], state, step, gradient.hyper)
                self.breathe()

    def _publish(self) -> None:
        for view, values in zip(self._views, self._dense, strict=True):
            if view is not values:
                for first, last in chunks(values.numel(), values.itemsize):
                    with self._exclusive():
                        view[first:last] = values[first:last]
                    self.breathe()

    def apply_rows(self, gradients: Sequence[RowsGradient]) -> None:
        """Update the touched rows of all sparse tables, each row at most once per gradient."""
        for table, gradient in enumerate(gradients):
            self.sparse_steps[table] += gradient.num_pushed > 0
            row_bytes = gradient.values.shape[1] * gradient.values.itemsize
            for start, stop in chunks(gradient.rows.size, row_bytes):
                grads = torch.from_numpy(gradient.values[start:stop])
                self._apply_rows(table, gradient.rows[start:stop], grads, gradient.hyper)

    def _apply_rows(
        self, table: int, rows: np.ndarray, grads: torch.Tensor, hyper: np.ndarray
    ) -> None:
        self._mark(table, rows)
        # This process is the only writer: everything but the last copy happens outside the lock.
        values, state = self._rows[table], self.sparse_state[table]
        step = int(self.sparse_steps[table])
        rule = self._sparse_rules[table]
        changed = rule.update_rows(values, rows, grads, state, step, hyper, self.breathe)
        write_rows(values, rows, changed, self.breathe, self._exclusive)


def _new_state(rule: UpdateRule, values: torch.Tensor, hyper: np.ndarray) -> State:
    """Fresh optimizer state; zeros cost no memory until they are touched."""
    first = rule.initial_state(hyper)
    return {
        slot: torch.full_like(values, first[slot]) if first[slot] else torch.zeros_like(values)
        for slot in rule.slots
    }


def _runs(
    params: Sequence[ParamSpec], present: np.ndarray, steps: np.ndarray
) -> Iterator[tuple[int, int, int]]:
    """Longest ranges (start, stop, step) of neighbouring present parameters of equal step."""
    code = np.where(present != 0, steps, 0)
    cuts = np.flatnonzero(np.diff(code)) + 1
    for first, last in zip([0, *cuts.tolist()], [*cuts.tolist(), len(params)], strict=True):
        if last > first and code[first]:
            yield params[first].start, params[last - 1].stop, int(code[first])
