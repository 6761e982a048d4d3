"""A single-process job for tests: model and torch optimizer connected to tables in this process."""

from contextlib import nullcontext

import torch
from torch import nn

from mpifleet.compose import local_exchange
from mpifleet.embedding import SparseEmbedding
from mpifleet.job_states import JobStates
from mpifleet.optimizer import DistributedOptimizer
from mpifleet.partition import unique_keys
from mpifleet.persistables import Persistables
from mpifleet.session import Session
from mpifleet.strategy import DistributedStrategy
from mpifleet.util import Util


def connect(model, optimizer, *, nonfinite="raise"):
    """The distributed optimizer over `model`, started."""
    strategy = DistributedStrategy()
    strategy.nonfinite = nonfinite
    distributed = DistributedOptimizer(optimizer, model)
    distributed.connect(local_exchange(distributed, strategy, None))
    return distributed


def table_of(embedding, optimizer):
    """All rows as a plain tensor [table_rows, dim], without a gradient."""
    exchange = optimizer._exchange
    table = optimizer.embeddings.index(embedding)
    keys = torch.arange(embedding.table_rows).numpy()
    rows = exchange.pull_rows(table, unique_keys(keys, embedding.table_rows, 1, embedding.name))
    return torch.from_numpy(rows)


def twin(embedding, optimizer, **options):
    """A torch nn.EmbeddingBag, or nn.Embedding for "concat", with the same rows."""
    rows = table_of(embedding, optimizer).clone()
    if embedding.pooling == "concat":
        return nn.Embedding.from_pretrained(rows, freeze=False, **options)
    return nn.EmbeddingBag.from_pretrained(rows, freeze=False, mode=embedding.pooling, **options)


def single(name="t", rows=20, dim=3, optimizer=torch.optim.SGD, lr=0.5, **options):
    """A table alone under its optimizer: (embedding, distributed optimizer)."""
    options.setdefault("dtype", torch.float64)
    embedding = SparseEmbedding(name, rows, dim, **options)
    return embedding, connect(embedding, optimizer(embedding.parameters(), lr=lr))


def persistables(optimizer, model):
    """What saves and loads a single-process job."""
    exchange = optimizer._exchange
    return Persistables(None, DistributedStrategy(), model, optimizer, exchange, nullcontext)


class LocalSession(Session):
    """What fleet's calls find as the session of this process, around a job made by `connect`."""

    def __init__(self, model, optimizer):
        self.roles, self.strategy = None, DistributedStrategy()
        self.model, self.optimizer, self.exchange = model, optimizer, optimizer.exchange
        self.load_from, self._job, self.states = None, None, JobStates()
        self.util = Util(None, None, self.meet)
