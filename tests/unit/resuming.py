"""A small training run in a single process that is saved, forgotten and resumed."""

import random
from contextlib import nullcontext

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from mpifleet.embedding import SparseEmbedding
from mpifleet.job_states import JobStates
from mpifleet.persistables import Persistables
from mpifleet.ps.saving import SaveOptions
from mpifleet.resume import Resumption
from mpifleet.strategy import DistributedStrategy
from tests.unit.local_job import connect, table_of

ROWS, BATCH, SAMPLES = 40, 8, 64


class Net(nn.Module):
    """A table, dropout and a batch norm: random numbers and buffers matter."""

    def __init__(self):
        super().__init__()
        self.table = SparseEmbedding("clicks", ROWS, 3, num_slots=2)
        self.drop = nn.Dropout(0.4)
        self.norm = nn.BatchNorm1d(6)
        self.out = nn.Linear(6, 1)

    def forward(self, ids):
        return self.out(self.norm(self.drop(self.table(ids)))).squeeze(1)


class Run:
    """One start of the script. Two param groups, a schedule, noise from numpy and Python."""

    def __init__(self, rule="adam", schedule=None, mode="sync"):
        torch.manual_seed(3)
        np.random.seed(4)  # noqa: NPY002 -- the global one is saved
        random.seed(5)
        self.model = Net()
        dense = [*self.model.norm.parameters(), *self.model.out.parameters()]
        groups = [{"params": dense}, {"params": self.model.table.parameters(), "lr": 0.05}]
        make = {
            "adam": lambda: torch.optim.Adam(groups, lr=0.02),
            "momentum": lambda: torch.optim.SGD(groups, lr=0.02, momentum=0.9),
        }
        self.optimizer = connect(self.model, make[rule]())
        schedule = schedule or (lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9))
        self.scheduler = schedule(self.optimizer)
        self.states = JobStates()
        self.states.register("schedule", self.scheduler, per_worker=False)
        self.strategy = DistributedStrategy()
        self.strategy.a_sync = mode == "async"

    @property
    def resumption(self):
        base = Persistables(
            None,
            self.strategy,
            self.model,
            self.optimizer,
            self.optimizer.exchange,
            lambda _: nullcontext(),
        )
        return Resumption(base, self.states)

    def save(self, directory, progress=None, **options):
        self.resumption.save(directory, progress, SaveOptions(**options))

    def resume(self, directory):
        return self.resumption.resume(directory)

    def train(self, first_epoch, last_epoch, *, skip=0, stop=None):
        """Epochs [first, last), the first one from batch `skip` on, the last one to `stop`."""
        for epoch in range(first_epoch, last_epoch):
            order = np.random.default_rng([9, epoch]).permutation(SAMPLES).reshape(-1, BATCH)
            begin = skip if epoch == first_epoch else 0
            for rows in order[begin : stop if epoch == last_epoch - 1 else None]:
                self.step(rows)
            if stop is None or epoch < last_epoch - 1:
                self.scheduler.step()

    def step(self, rows):
        ids = torch.from_numpy(np.stack([rows, rows * 3], 1) % ROWS)
        noise = torch.randn(len(rows)) + random.random() + np.random.normal()  # noqa: NPY002
        self.optimizer.zero_grad()
        functional.mse_loss(self.model(ids), (ids.sum(1) % 2).float() + noise).backward()
        self.optimizer.step()

    def digest(self):
        """All that was learned, as bytes by name."""
        state = self.model.state_dict()
        found = {name: tensor.numpy().tobytes() for name, tensor in state.items()}
        found["rows"] = table_of(self.model.table, self.optimizer).numpy().tobytes()
        found["rates"] = [group["lr"] for group in self.optimizer.param_groups]
        return found
