"""A torch optimizer whose step() hands the gradients to an exchange."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from mpifleet.errors import ConfigError, NotAvailable, TableError
from mpifleet.exchange import Exchange, Gradients
from mpifleet.model_tables import ModelTables
from mpifleet.ps.rule_spec import HYPER_SIZE, RuleSpec, hyper_of_group, rule_of_group
from mpifleet.ps.spec import ParamSpec
from mpifleet.step_clock import StepClock
from mpifleet.step_marks import mark_steps

Group = dict[str, Any]


class DistributedOptimizer(torch.optim.Optimizer):
    """step() pushes what backward() left in the parameters and tables, and reads the new values.

    It shares its param groups with the wrapped optimizer, so learning-rate schedulers may be built
    on either; the arithmetic is done by the servers with the same class and hyper-parameters.
    Between step() calls a dense parameter's data is a copy of what the servers hold.

    optimizer: torch.optim SGD, Adagrad, Adam, AdamW or SparseAdam.  model: gives the parameters
    their names and says which tables there are beyond the optimizer's groups (frozen ones).
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module | None) -> None:
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups = optimizer.param_groups
        self.state = optimizer.state
        self._inner = optimizer
        self._exchange: Exchange | None = None
        self.model = model
        tables = ModelTables.of(optimizer, model)
        self.specs, self.embeddings = tables.specs, tables.embeddings
        self._rules = [rule_of_group(optimizer, group) for group in optimizer.param_groups]
        self._dense_groups, self._sparse_groups = tables.dense_groups, tables.sparse_groups
        self._params = tables.params
        self.values = [np.zeros(spec.size, np.dtype(spec.dtype)) for spec in self.specs.dense]
        self._grads = [np.zeros_like(flat) for flat in self.values]
        self._present = [np.zeros(len(spec.params), np.uint8) for spec in self.specs.dense]
        self._grad_views = self._views(self._grads)
        self._value_views = self._views(self.values)

    # -- hyper-parameters -------------------------------------------------------------------------

    def groups(self) -> list[Group]:
        """Its param groups; the wrapped optimizer's load_state_dict makes new ones."""
        self.param_groups = self._inner.param_groups
        return self.param_groups

    def hypers(self) -> tuple[np.ndarray, np.ndarray]:
        """Hyper-parameters as they are now: float64 [dense tables, HYPER_SIZE], [sparse, ...]."""
        groups = self.groups()
        if len(groups) != len(self._rules):
            raise ConfigError(
                f"the wrapped optimizer has {len(groups)} param groups, it had {len(self._rules)} "
                "when it was wrapped: add groups before fleet.distributed_optimizer(...)"
            )
        # A frozen table's rule, which never runs, is the first group's.
        dense = [self.hyper_of(number, groups[number]) for number in self._dense_groups]
        sparse = [self.hyper_of(owner or 0, groups[owner or 0]) for owner in self._sparse_groups]
        none = np.zeros((0, HYPER_SIZE))
        return np.vstack([none, *dense]), np.vstack([none, *sparse])

    def hyper_of(self, number: int, group: Group) -> np.ndarray:
        """The hyper-parameters of param group `number` if it held these values.

        Raises ConfigError where they cannot be, or ask for another update rule.
        """
        rule, now = self._rules[number], rule_of_group(self._inner, group)
        # A schedule may take momentum to 0: the momentum rule does that too.
        at_rest = rule.name == "momentum" and now == RuleSpec("sgd", maximize=rule.maximize)
        if now != rule and not at_rest:
            raise ConfigError(
                f"param group {number} asks for {now}, its tables were made for {rule}: a rule "
                "cannot change after fleet.distributed_optimizer(...)"
            )
        return hyper_of_group(rule, group)

    @property
    def rule_names(self) -> list[str]:
        """The update rule of each param group, as its tables were made for it."""
        return [rule.name for rule in self._rules]

    # -- start ------------------------------------------------------------------------------------

    def first_values(self) -> list[np.ndarray]:
        """This rank's dense parameters, flat, one array per dense table."""
        for views, params in zip(self._value_views, self._params, strict=True):
            _copy([param.detach() for param in params], views)
        return self.values

    def connect(self, exchange: Exchange) -> None:
        """Use `exchange` from now on and take over the dense values it holds."""
        self.reroute(exchange)
        self._lend_values()
        if self.model is not None:
            mark_steps(self.model, exchange.clock)
        self.refresh()

    def reroute(self, exchange: Exchange) -> None:
        """Use `exchange` from now on, here and in the tables' modules."""
        self._exchange = exchange
        for table, embedding in enumerate(self.embeddings):
            embedding.connect(exchange, table)

    def refresh(self) -> None:
        """Read the dense parameters from the servers."""
        self._connected().pull_dense(self.values)
        self._write_values()

    def look_anew(self) -> None:
        """Forget the rows that were pulled ahead too: all that is read from here on is new."""
        self.refresh()
        for embedding in self.embeddings:
            embedding.expect_nothing()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over rates and other hyper-parameters; what was learned is in checkpoints."""
        self._inner.load_state_dict(state_dict)
        self.param_groups = self._inner.param_groups

    def add_param_group(self, param_group: Group) -> None:
        """Raises ConfigError: the tables are laid out when the optimizer is wrapped."""
        if hasattr(self, "specs"):
            raise ConfigError("add param groups before fleet.distributed_optimizer(...)")
        super().add_param_group(param_group)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # torch.amp.GradScaler asks for this before it steps; it cannot unscale rows of tables.
        raise NotAvailable(
            "torch.amp.GradScaler is not available in this version: gradients of table rows would "
            "keep the scale; use torch.autocast with bfloat16, which needs none"
        )

    @property
    def exchange(self) -> Exchange:
        """Its way to the tables. Raises TableError before init_worker()."""
        return self._connected()

    @property
    def clock(self) -> StepClock:
        """Where this worker's time goes. Raises TableError before init_worker()."""
        return self._connected().clock

    # -- the torch face ---------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Push this step's gradients, pull the dense parameters. Returns the closure's loss.

        Every worker calls step() once per batch; in sync mode it returns when all active workers'
        gradients are applied. Parameters without a gradient are left out, as torch does.
        """
        exchange = self._connected()
        self._inner._opt_called = True  # type: ignore[attr-defined]  # for schedulers built on it
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        exchange.clock.enter("push")
        gradients = self._collect(exchange.num_servers)
        exchange.step(gradients, self.values, self._read_expected)
        self._write_values()
        exchange.clock.end_step()
        return loss

    def _read_expected(self) -> None:
        for embedding in self.embeddings:
            embedding.read_expected()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of parameters and tables."""
        self._check_own()
        super().zero_grad(set_to_none)
        for embedding in self.embeddings:
            embedding.gradient.clear()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients, also of table rows, to a total 2-norm of at most max_norm.

        torch.nn.utils.clip_grad_norm_ sees parameters only. Returns the norm before. The norm is
        this worker's own.
        """
        self._check_own()
        dense = [p.grad for params in self._params for p in params if p.grad is not None]
        tables = [
            embedding
            for embedding, group in zip(self.embeddings, self._sparse_groups, strict=True)
            if group is not None
        ]
        rows = [e.gradient.merged(e.table_rows, 1, e.name)[1] for e in tables]
        parts = [g.norm().double().cpu() for g in (*dense, *rows) if g.numel()]
        total = torch.stack(parts).norm() if parts else torch.zeros((), dtype=torch.float64)
        factor = min(1.0, max_norm / (float(total) + 1e-6))
        for grad in dense:
            grad.mul_(factor)
        for embedding in tables:
            embedding.gradient.scale_(factor)
        return total

    # -- gradients --------------------------------------------------------------------------------

    def _collect(self, num_servers: int) -> Gradients:
        for table, params in enumerate(self._params):
            self._collect_dense(table, params)
        unique, rows = [], []
        for embedding, group in zip(self.embeddings, self._sparse_groups, strict=True):
            if group is None:
                embedding.gradient.clear()
            keys, grads = embedding.gradient.merged(
                embedding.table_rows, num_servers, embedding.name
            )
            unique.append(keys)
            rows.append(np.ascontiguousarray(grads.cpu().numpy()))
        dense_hypers, sparse_hypers = self.hypers()
        return Gradients(dense_hypers, self._present, self._grads, sparse_hypers, unique, rows)

    def _collect_dense(self, table: int, params: list[nn.Parameter]) -> None:
        views, present = self._grad_views[table], self._present[table]
        targets, sources = [], []
        for index, param in enumerate(params):
            present[index] = param.grad is not None
            if param.grad is None:
                views[index].zero_()
            else:
                grad = param.grad.detach()
                targets.append(views[index])
                sources.append(grad.to_dense() if grad.is_sparse else grad)
        _copy(sources, targets)

    def _lend_values(self) -> None:
        """Let parameters in main memory live in the flat arrays that the servers' values fill.

        Not those whose memory others see too: tied by hand, or shared with another process.
        """
        seen = Counter(p.data_ptr() for params in self._params for p in params if p.numel())
        for views, params in zip(self._value_views, self._params, strict=True):
            for view, param in zip(views, params, strict=True):
                own = not param.is_shared() and seen[param.data_ptr()] < 2
                if own and param.device == view.device and param.is_contiguous():
                    param.data = view

    def _write_values(self) -> None:
        """Have every parameter show the flat arrays' values: copied where it lives elsewhere."""
        for flat, spec, params in zip(self.values, self.specs.dense, self._params, strict=True):
            own: list[tuple[nn.Parameter, ParamSpec]] = []
            lent: list[tuple[nn.Parameter, ParamSpec]] = []
            base = flat.ctypes.data
            for param, place in zip(params, spec.params, strict=True):
                # The array's address, not the view's: torch may have moved a storage of both.
                is_lent = param.data_ptr() == base + place.start * flat.itemsize
                (lent if is_lent else own).append((param, place))
            sources = [torch.from_numpy(flat[p.start : p.stop]).view(p.shape) for _, p in own]
            _copy(sources, [param.detach() for param, _ in own])
            # So that autograd refuses a backward through values that have changed since.
            increment_version([param for param, _ in lent])

    def _views(self, flats: list[np.ndarray]) -> list[list[Tensor]]:
        """One tensor per parameter over each flat array."""
        return [
            [torch.from_numpy(flat[p.start : p.stop]).view(p.shape) for p in spec.params]
            for spec, flat in zip(self.specs.dense, flats, strict=True)
        ]

    def _check_own(self) -> None:
        """Raises ConfigError while training threads have optimizers of their own."""
        if self._exchange is not None:
            self._exchange.num_servers  # noqa: B018 -- refused by what stands there meanwhile

    def _connected(self) -> Exchange:
        if self._exchange is None:
            raise TableError("the optimizer is not connected: call fleet.init_worker() first")
        return self._exchange


def _copy(sources: list[Tensor], targets: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)
