"""Whole parameter-server jobs inside one test, where fleet.init() runs once per process.

Every rank of the communicator calls `run`. The first servers + workers ranks make up the job,
train, and free it; then all ranks get what the workers returned, or fail together.
"""

from __future__ import annotations

import contextlib
import itertools
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mpifleet import mpi as mpi_module
from mpifleet.compose import job_settings, local_exchange, remote_exchange
from mpifleet.embedding import SparseEmbedding
from mpifleet.exchange import Exchange
from mpifleet.job_states import JobStates
from mpifleet.meeting import wait_for_all
from mpifleet.optimizer import DistributedOptimizer
from mpifleet.patience import Patience
from mpifleet.ps.job import Job, Settings
from mpifleet.roles import Roles
from mpifleet.session import Session
from mpifleet.strategy import DistributedStrategy
from mpifleet.util import Util
from tests.ranks import MPI, WORLD

TINY_BYTES = 64 << 10
"""Mailbox of one worker in which a message of a few thousand elements goes in several pieces."""
DEFAULT_BYTES = 4 << 20


@dataclass(frozen=True)
class Place:
    """How many servers and workers, which home, how much mailbox for each worker.

    No server: one process that holds the tables itself.
    """

    servers: int
    workers: int
    home: str = "node"
    mailbox_bytes: int = DEFAULT_BYTES

    def __str__(self) -> str:
        text = f"{self.servers}s{self.workers}w-{self.home}"
        return text + ("-tiny" if self.mailbox_bytes < DEFAULT_BYTES else "")


def places(size: int = WORLD.size, *, least_workers: int = 1) -> list[Place]:
    """Jobs that use all `size` ranks: both homes at every size, one and two servers from 3 on.

    Home and number of servers change together, so that the suite stays short; over all sizes every
    home is met with one server, with two, and with several workers.
    """
    if size == 1:
        return [Place(0, 1)] if least_workers == 1 else []
    most = min(size - least_workers, 2)
    if most < 1:
        return []
    homes = ("node", "world") if size % 2 else ("world", "node")
    servers = (1, most) if size > 2 else (1, 1)
    return [Place(s, size - s, home) for s, home in zip(servers, homes, strict=True)]


def at_places(**options: Any) -> pytest.MarkDecorator:
    """Parametrise a test over `places`; where there is none it is skipped."""
    return pytest.mark.parametrize("place", places(**options), ids=str)


@dataclass
class Worker:
    """What a worker function gets. model: what `build` made; session: saves and loads."""

    index: int
    count: int
    model: Any
    optimizer: DistributedOptimizer
    exchange: Exchange
    session: Session

    def barrier(self) -> None:
        """Wait for all workers."""
        self.session.util.barrier()

    def settled(self) -> None:
        """Return when everything that any worker pushed is applied. Collective over workers."""
        self.exchange.flush()
        self.barrier()

    def dense(self) -> dict[str, np.ndarray]:
        """The parameters as this worker has them, by name; tables left out."""
        return {
            name: param.detach().numpy().copy()
            for name, param in self.model.named_parameters()
            if not hasattr(param, "sparse_embedding")
        }

    def refreshed(self) -> dict[str, np.ndarray]:
        """The parameters as the servers have them."""
        self.optimizer.refresh()
        return self.dense()

    def table(self, embedding: SparseEmbedding | None = None) -> np.ndarray:
        """All rows of a table [num_rows, dim], of the model's first one by default."""
        embedding = embedding or self.optimizer.embeddings[0]
        keys = torch.arange(embedding.table_rows)
        pooling, rows, slots = embedding.pooling, embedding.num_rows, embedding.num_slots
        embedding.pooling, embedding.num_rows, embedding.num_slots = "sum", embedding.table_rows, 1
        padding, embedding.padding_idx = embedding.padding_idx, None
        try:
            with torch.no_grad():
                return embedding(keys[:, None]).numpy().copy()
        finally:
            embedding.pooling, embedding.num_rows, embedding.num_slots = pooling, rows, slots
            embedding.padding_idx = padding


@dataclass(frozen=True)
class Outcome:
    """How a job went on one rank: role and number, what work or serve() gave, or the error."""

    name: str
    value: Any = None
    error: str = ""
    trace: str = ""


Build = Callable[[], tuple[nn.Module, torch.optim.Optimizer]]
Work = Callable[[Worker], Any]


def run(comm: Any, place: Place, build: Build, work: Work, **options: Any) -> list[Any]:
    """What every worker's `work` returned, in worker order, on all ranks. Collective.

    Fails on all ranks when any rank raised. Options as `attempt`'s.
    """
    outcomes = attempt(comm, place, build, work, **options)
    failed = [outcome for outcome in outcomes if outcome.error]
    assert not failed, "\n".join(f"{outcome.name}: {outcome.trace}" for outcome in failed)
    return [outcome.value for outcome in outcomes if outcome.name.startswith("worker")]


def attempt(
    comm: Any,
    place: Place,
    build: Build,
    work: Work,
    *,
    sync: bool = True,
    hybrid: bool = False,
    staleness: int = -1,
    skip: bool = False,
    load_from: Path | None = None,
    load_strict: bool = True,
    end_s: float = 25.0,
) -> list[Outcome]:
    """How the job went on each of its ranks, known on all ranks of `comm`. Collective.

    build: model and torch optimizer, called on every rank, with another seed on each: worker 0's
    values must win.  hybrid: instead of sync.  staleness: the bound, with sync=False.
    skip: the policy for gradients that are not finite.  end_s: patience.
    """
    size = place.servers + place.workers
    wait_for_all(comm)  # whoever computed meanwhile has the cores
    with mpi_module.serial:
        part = comm.Split(0 if comm.rank < size else MPI.UNDEFINED)
    mine: list[Outcome] = []
    if part != MPI.COMM_NULL:
        strategy = DistributedStrategy()
        strategy.a_sync = hybrid or not sync
        strategy.dense_sync = hybrid
        strategy.a_sync_configs = {"staleness": staleness}
        strategy.nonfinite = "skip" if skip else "raise"
        torch.manual_seed(7 + comm.rank)
        start = (load_from, load_strict)
        with _job(part, place, build, strategy, start, end_s) as (name, job, worker):
            mine.append(_serve(name, job) if worker is None else _work(name, worker, work))
        with mpi_module.serial:
            part.Free()
    wait_for_all(comm)
    with mpi_module.serial:
        parts = comm.allgather(mine)
    outcomes = list(itertools.chain.from_iterable(parts))
    return sorted(outcomes, key=lambda outcome: outcome.name)


@contextlib.contextmanager
def _job(
    comm: Any,
    place: Place,
    build: Build,
    strategy: DistributedStrategy,
    start: tuple[Path | None, bool],
    end_s: float,
) -> Iterator[tuple[str, Job | None, Worker | None]]:
    roles = Roles.assign(MPI, comm, num_servers=place.servers) if place.servers else None
    model, inner = build()
    optimizer = DistributedOptimizer(inner, model)
    job, exchange = None, None
    if roles is None:
        exchange = local_exchange(optimizer, strategy, *start)
    else:
        settings = _settings(strategy, place, end_s)
        hypers, first = optimizer.hypers(), optimizer.first_values()
        job = Job(MPI, roles, optimizer.specs, settings, {}, *hypers, first, *start)
        if job.client is not None:
            exchange = remote_exchange(job.client, settings)
    worker = None
    name = roles.name_of(roles.world.rank) if roles else "worker 0"
    if exchange is not None:
        optimizer.connect(exchange)
        session = FaceOfJob(roles, strategy, model, optimizer, exchange)
        index, count = (roles.index, roles.num_workers) if roles else (0, 1)
        worker = Worker(index, count, model, optimizer, exchange, session)
    yield name, job, worker
    if job is not None and roles is not None:
        wait_for_all(roles.world)
        job.free()
        _free(roles)


class FaceOfJob(Session):
    """What fleet.save_persistables and its like call, on a job that was made here."""

    def __init__(
        self,
        roles: Roles | None,
        strategy: DistributedStrategy,
        model: nn.Module,
        optimizer: DistributedOptimizer,
        exchange: Exchange,
    ) -> None:
        self.roles, self.strategy = roles, strategy
        self.model, self.optimizer, self.exchange = model, optimizer, exchange
        self.states = JobStates()
        self.util = Util(MPI if roles else None, roles, self.meet)


def _settings(strategy: DistributedStrategy, place: Place, end_s: float) -> Settings:
    """The strategy's, with what only a test would ask for: a tiny mailbox, short patience."""
    return replace(
        job_settings(strategy),
        home=place.home,
        mailbox_bytes=place.mailbox_bytes * place.workers,
        patience=Patience(end_s, end_s),
    )


def _serve(name: str, job: Job | None) -> Outcome:
    assert job is not None
    try:
        return Outcome(name, job.serve())
    except Exception as error:
        return Outcome(name, None, _said(error), traceback.format_exc())


def _work(name: str, worker: Worker, work: Work) -> Outcome:
    value, error, trace = None, "", ""
    try:
        value = work(worker)
    except Exception as failure:
        error, trace = _said(failure), traceback.format_exc()
    try:
        worker.exchange.finish()
    except Exception as failure:
        error, trace = error or _said(failure), trace or traceback.format_exc()
    return Outcome(name, value, error, trace)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _free(roles: Roles) -> None:
    with mpi_module.serial:
        for comm in (roles.leaders, roles.node, roles.group, roles.world):
            if comm != MPI.COMM_NULL:
                comm.Free()
