"""Models, batches and the joint-batch oracle that tests of training on several workers share."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from mpifleet.embedding import SparseEmbedding
from tests.mpi.jobs import TINY_BYTES, WORLD, Place
from tests.oracles.lazy_rules import lazy_step

ROWS, DIM, BATCH, SLOTS, INPUTS = 41, 4, 4, 3, 6


class Linear(nn.Module):
    """inputs @ weight + the sum of the looked-up rows' elements: exact on a dyadic grid."""

    def __init__(self, rows=ROWS, dtype=torch.float64):
        super().__init__()
        self.table = SparseEmbedding(
            "t", rows, DIM, pooling="sum", initializer="constant", scale=0.5, dtype=dtype
        )
        self.weight = nn.Parameter(torch.randint(-4, 5, (INPUTS,)).to(dtype) / 4)
        self.bias = nn.Parameter(torch.zeros((), dtype=dtype))

    def forward(self, inputs, ids):
        return inputs @ self.weight + self.bias + self.table(ids).sum(1)


class Net(nn.Module):
    """A small net whose every gradient is dense in digits."""

    def __init__(self, rows=ROWS, width=9):
        super().__init__()
        self.table = SparseEmbedding("t", rows, DIM, pooling="mean", dtype=torch.float64)
        self.hidden = nn.Linear(DIM + INPUTS, width, dtype=torch.float64)
        self.out = nn.Linear(width, 1, dtype=torch.float64)

    def forward(self, inputs, ids):
        joined = torch.cat([self.table(ids), inputs], 1)
        return self.out(torch.tanh(self.hidden(joined))).squeeze(1)


def exact_batch(worker, step, rows=ROWS, count=BATCH):
    """inputs, ids, targets of small whole numbers; every third step needs one server's rows."""
    rng = np.random.default_rng([worker, step])
    ids = rng.integers(0, rows, (count, SLOTS))
    ids = ids // 6 * 6 if step % 3 == 0 else ids  # multiples of 1, 2 and 3 servers
    inputs = rng.integers(-1, 2, (count, INPUTS)).astype(np.float64)
    targets = rng.integers(-3, 4, count).astype(np.float64)
    return torch.from_numpy(inputs), torch.from_numpy(ids), torch.from_numpy(targets)


def train(steps, schedule=None, count=BATCH):
    """A worker function: `steps` steps, then what the servers hold, and what they began with."""

    def work(worker):
        model, optimizer = worker.model, worker.optimizer
        first = {**worker.dense(), "table": worker.table()}
        scheduler = schedule(optimizer) if schedule else None
        worker.barrier()
        losses = []
        for step in range(steps):
            inputs, ids, targets = exact_batch(worker.index, step, model.table.table_rows, count)
            loss = functional.mse_loss(model(inputs, ids), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if scheduler is not None:
                scheduler.step()
        worker.settled()
        return first, {**worker.dense(), "table": worker.table()}, losses

    return work


class Oracle:
    """One process: dense parameters under torch.optim, the table under a rule of tests/oracles."""

    def __init__(self, first, build_optimizer, rule, **hyper):
        self.params = {
            name: nn.Parameter(torch.from_numpy(values.copy()))
            for name, values in first.items()
            if name != "table"
        }
        self.table = first["table"].copy()
        self.optimizer = build_optimizer(list(self.params.values()))
        self.rule, self.hyper = rule, hyper
        slots = {"sgd": (), "momentum": ("momentum_buffer",), "adagrad": ("sum",)}
        self.state = {
            slot: np.full_like(self.table, hyper.get("initial_accumulator_value", 0.0))
            for slot in slots.get(rule, ("exp_avg", "exp_avg_sq"))
        }
        self.step_count = 0

    def step(self, losses_of, ids, divide):
        """losses_of(params, rows): the workers' losses; ids: all keys of the step."""
        rows = torch.from_numpy(self.table.copy()).requires_grad_()
        self.optimizer.zero_grad()
        torch.stack(losses_of(self.params, rows)).sum().backward()
        for param in self.params.values():
            param.grad /= divide
        self.optimizer.step()
        keys = np.unique(ids)
        self.step_count += 1
        self.table, self.state = lazy_step(
            self.rule,
            self.table,
            keys,
            rows.grad.numpy()[keys] / divide,
            self.state,
            self.step_count,
            lr=self.optimizer.param_groups[0]["lr"],
            **self.hyper,
        )

    def values(self):
        dense = {name: param.detach().numpy() for name, param in self.params.items()}
        return {**dense, "table": self.table}


def linear_loss(params, rows, batch):
    """Loss of Linear, from its parameters and all rows of its table."""
    inputs, ids, targets = batch
    pooled = functional.embedding_bag(ids, rows, mode="sum")
    return functional.mse_loss(inputs @ params["weight"] + params["bias"] + pooled.sum(1), targets)


def net_loss(params, rows, batch):
    """Loss of Net, from its parameters and all rows of its table."""
    inputs, ids, targets = batch
    joined = torch.cat([functional.embedding(ids, rows).mean(1), inputs], 1)
    hidden = torch.tanh(functional.linear(joined, params["hidden.weight"], params["hidden.bias"]))
    out = functional.linear(hidden, params["out.weight"], params["out.bias"])
    return functional.mse_loss(out.squeeze(1), targets)


def follow(oracle, loss, workers, steps, rows=ROWS, scheduler=None):
    """Take `steps` steps on the joint batch."""
    for step in range(steps):
        batches = [exact_batch(worker, step, rows) for worker in range(workers)]
        oracle.step(
            lambda params, table: [loss(params, table, batch) for batch in batches],  # noqa: B023
            np.concatenate([batch[1].numpy().ravel() for batch in batches]),
            workers,
        )
        if scheduler is not None:
            scheduler.step()
    return oracle.values()


def sgd(params):
    """Plain sgd whose rate keeps a dyadic grid."""
    return torch.optim.SGD(params, lr=0.125)


def build_linear():
    """Linear under plain sgd."""
    model = Linear()
    return model, sgd(model.parameters())


def same_job_places(workers):
    """All jobs with this many workers that fit into the ranks that are there."""
    found = [Place(0, 1)] if workers == 1 else []
    for servers in range(1, WORLD.size - workers + 1):
        for home in ("node", "world"):
            found.append(Place(servers, workers, home))
        found.append(Place(servers, workers, "node", TINY_BYTES))
    return found
