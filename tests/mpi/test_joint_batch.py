"""Sync training on N workers is one process on the joint batch.

Bitwise where the arithmetic is exact; to 1e-9 relative in float64 for every rule over 25 steps.
The oracle is plain torch: nn.functional, torch.optim for the dense part, tests/oracles for rows.
"""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

from mpifleet.embedding import SparseEmbedding
from tests.mpi.jobs import TINY_BYTES, WORLD, Place, at_places, places, run
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
    inputs, ids, targets = batch
    pooled = functional.embedding_bag(ids, rows, mode="sum")
    return functional.mse_loss(inputs @ params["weight"] + params["bias"] + pooled.sum(1), targets)


def net_loss(params, rows, batch):
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
    return torch.optim.SGD(params, lr=0.125)


def build_linear():
    model = Linear()
    return model, sgd(model.parameters())


@at_places()
def test_sgd_equals_the_joint_batch_bitwise(comm, place):
    # With three workers the mean is not exact after the first step.
    steps = 1 if place.workers == 3 else 5
    results = run(comm, place, build_linear, train(steps))
    expected = follow(Oracle(results[0][0], sgd, "sgd"), linear_loss, place.workers, steps)
    for first, last, _ in results:
        for name in expected:
            np.testing.assert_array_equal(first[name], results[0][0][name], err_msg=name)
            np.testing.assert_array_equal(last[name], expected[name], err_msg=name)


RULES = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "weight_decay": 0.01}, {}),
    "momentum": (
        torch.optim.SGD,
        {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        {"nesterov": True},
    ),
    "adagrad": (
        torch.optim.Adagrad,
        {"lr": 0.1, "lr_decay": 0.01, "initial_accumulator_value": 0.1},
        {"eps": 1e-10},
    ),
    "adam": (torch.optim.Adam, {"lr": 0.02}, {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}),
    "adamw": (
        torch.optim.AdamW,
        {"lr": 0.02, "weight_decay": 0.1},
        {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8},
    ),
}


@at_places()
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_equals_the_joint_batch(comm, place, rule):
    kind, options, more = RULES[rule]

    def build():
        model = Net()
        return model, kind(model.parameters(), **options)

    results = run(comm, place, build, train(25))
    hyper = {**{k: v for k, v in options.items() if k != "lr"}, **more}
    oracle = Oracle(results[0][0], lambda params: kind(params, **options), rule, **hyper)
    expected = follow(oracle, net_loss, place.workers, 25)
    for _, last, _ in results:
        for name in expected:
            np.testing.assert_allclose(
                last[name], expected[name], rtol=1e-9, atol=1e-11, err_msg=name
            )


SCHEDULES = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.5),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)),
    "onecycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=12),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("on_inner", [False, True], ids=["on-ours", "on-the-wrapped"])
def test_rate_of_step_t_at_the_servers_is_that_of_the_workers(comm, schedule, on_inner):
    place = Place(1, WORLD.size - 1) if WORLD.size > 1 else Place(0, 1)

    def plain(params):
        return torch.optim.SGD(params, lr=0.1, momentum=0.85)

    def build():
        model = Net()
        return model, plain(model.parameters())

    def make(optimizer):
        return SCHEDULES[schedule](optimizer._inner if on_inner else optimizer)

    results = run(comm, place, build, train(10, make))
    oracle = Oracle(results[0][0], plain, "momentum", momentum=0.85)
    scheduler = SCHEDULES[schedule](oracle.optimizer)
    momentum = oracle.optimizer.param_groups[0]

    class WithMomentum:
        """OneCycleLR changes momentum too: the table's oracle takes it from the same group."""

        def step(self):
            scheduler.step()
            oracle.hyper["momentum"] = momentum["momentum"]

    follower = WithMomentum()
    oracle.hyper["momentum"] = momentum["momentum"]
    expected = follow(oracle, net_loss, place.workers, 10, scheduler=follower)
    for name in expected:
        np.testing.assert_allclose(results[0][1][name], expected[name], rtol=1e-9, atol=1e-11)


def build_wide():
    model = Net(rows=3001, width=700)  # in the tiny mailbox both kinds of messages go in pieces
    return model, torch.optim.Adam(model.parameters(), lr=0.02)


def same_job_places(workers):
    """All jobs with this many workers that fit into the ranks that are there."""
    found = [Place(0, 1)] if workers == 1 else []
    for servers in range(1, WORLD.size - workers + 1):
        for home in ("node", "world"):
            found.append(Place(servers, workers, home))
        found.append(Place(servers, workers, "node", TINY_BYTES))
    return found


@pytest.mark.parametrize("workers", range(1, max(2, WORLD.size)))
def test_same_bits_twice_and_at_any_home_mailbox_and_number_of_servers(comm, workers):
    reference = None
    for place in same_job_places(workers):
        for _ in range(2 if place.servers <= 1 else 1):
            results = run(comm, place, build_wide, train(8, count=500))
            bits = [
                (losses, {name: values.tobytes() for name, values in last.items()})
                for _, last, losses in results
            ]
            reference = reference or bits
            assert bits == reference, f"{place} differs"


class DenseOnly(nn.Module):
    """Two layers and no table."""

    def __init__(self, inputs=INPUTS, width=40, outputs=1):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(inputs, width, dtype=torch.float64),
            nn.Tanh(),
            nn.Linear(width, outputs, dtype=torch.float64),
        )

    def forward(self, inputs):
        return self.layers(inputs)


def train_dense(worker):
    losses = []
    for step in range(30):
        inputs, _, targets = exact_batch(worker.index, step)
        worker.optimizer.zero_grad()
        loss = functional.mse_loss(worker.model(inputs).squeeze(1), targets)
        loss.backward()
        worker.optimizer.step()
        losses.append(loss.item())
    return losses, {name: values.tobytes() for name, values in worker.dense().items()}


@pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
@pytest.mark.parametrize("place", same_job_places(1), ids=str)
def test_dense_parameters_of_one_worker_are_never_stale(comm, place, sync):
    """Also in async mode: pushed first, pulled last, so the next forward sees the last step."""

    def build():
        model = DenseOnly()
        return model, torch.optim.Adam(model.parameters(), lr=0.05)

    (alone,) = run(comm, Place(0, 1), build, train_dense)
    (result,) = run(comm, place, build, train_dense, sync=sync)
    assert result == alone


def accuracy_alone(inputs, targets, batch_size):
    """The same by torch in one process on the joint batches, from worker 0's first values."""
    torch.manual_seed(7)
    model = DenseOnly(inputs=64, width=48, outputs=10)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for start in range(0, 3 * 1500, batch_size):
        batch = torch.arange(start, start + batch_size) % 1500
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs[batch]), targets[batch]).backward()
        optimizer.step()
    hits = model(inputs[1500:]).argmax(1) == targets[1500:]
    return hits.double().mean().item()


@pytest.mark.parametrize("place", [p for p in places() if p.home == "node"], ids=str)
@pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
def test_a_classifier_of_digits_learns_without_any_table(comm, place, sync):
    digits = load_digits()
    inputs = torch.from_numpy(digits.data / 16.0)
    targets = torch.from_numpy(digits.target.astype(np.int64))
    held_out = slice(1500, None)

    def build():
        model = DenseOnly(inputs=64, width=48, outputs=10)
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    def work(worker):
        for start in range(worker.index * 25, 3 * 1500, worker.count * 25):
            batch = torch.arange(start, start + 25) % 1500
            worker.optimizer.zero_grad()
            functional.cross_entropy(worker.model(inputs[batch]), targets[batch]).backward()
            worker.optimizer.step()
        worker.settled()
        worker.optimizer.refresh()
        with torch.no_grad():
            hits = worker.model(inputs[held_out]).argmax(1) == targets[held_out]
        worker.barrier()
        return hits.double().mean().item(), worker.dense()

    results = run(comm, place, build, work, sync=sync)
    assert results[0][0] > 0.75  # the last digits were written by others: 0.84 to 0.9 is usual
    if sync:
        assert abs(results[0][0] - accuracy_alone(inputs, targets, 25 * place.workers)) < 0.01
    for _, dense in results:
        for name, values in dense.items():
            np.testing.assert_array_equal(values, results[0][1][name])


class Uneven:
    """A worker function: worker w takes batches[w] steps, then stops while others go on."""

    def __init__(self, batches):
        self.batches = batches

    def __call__(self, worker):
        first = {**worker.dense(), "table": worker.table()}
        worker.barrier()
        for step in range(self.batches[worker.index]):
            inputs, ids, targets = exact_batch(worker.index, step)
            worker.optimizer.zero_grad()
            functional.mse_loss(worker.model(inputs, ids), targets).backward()
            worker.optimizer.step()
        exchange = worker.exchange
        if worker.index:
            exchange.finish()
            return first, None
        # Worker 0 has most batches and is last to stop: what it sees is the end.
        exchange.flush()
        return first, {**worker.refreshed(), "table": worker.table()}


@at_places(least_workers=2)
@pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
def test_workers_with_different_numbers_of_batches_all_finish(comm, place, sync):
    batches = (10, 7, 0) if place.workers == 3 else (10, 1)
    results = run(comm, place, build_linear, Uneven(batches), sync=sync)
    if not sync:
        return
    oracle = Oracle(results[0][0], sgd, "sgd")
    for step in range(10):
        active = [worker for worker, count in enumerate(batches) if step < count]
        joint = [exact_batch(worker, step) for worker in active]
        oracle.step(
            lambda params, rows: [linear_loss(params, rows, batch) for batch in joint],  # noqa: B023
            np.concatenate([batch[1].numpy().ravel() for batch in joint]),
            len(active),
        )
    for name, values in oracle.values().items():
        np.testing.assert_allclose(results[0][1][name], values, rtol=1e-12, atol=1e-13)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("idle", [0, 1, 2])
def test_a_worker_without_batches_holds_nobody_up(comm, idle):
    batches = [4, 4, 4]
    batches[idle] = 0

    def work(worker):
        for step in range(batches[worker.index]):
            inputs, ids, targets = exact_batch(worker.index, step)
            worker.optimizer.zero_grad()
            functional.mse_loss(worker.model(inputs, ids), targets).backward()
            worker.optimizer.step()
        return worker.exchange._step

    assert run(comm, Place(1, 3), build_linear, work) == batches
