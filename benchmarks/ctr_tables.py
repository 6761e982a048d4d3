"""The tables of a click-through model on the servers, and a worker's steps without the model."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import numpy as np

from mpifleet.compose import job_settings
from mpifleet.exchange import Gradients
from mpifleet.partition import unique_keys
from mpifleet.ps.exchange import RemoteExchange
from mpifleet.ps.initializers import table_seed
from mpifleet.ps.job import Job
from mpifleet.ps.rule_spec import RuleSpec, hyper_of_group
from mpifleet.ps.spec import DenseSpec, ParamSpec, SparseSpec, TableSpecs
from mpifleet.roles import Roles
from mpifleet.strategy import DistributedStrategy

ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}


class CtrTables:
    """A job with float32 rows [num_rows, dim], `dense_size` dense parameters, and adam on both.

    Collective, as free is.
    """

    def __init__(
        self,
        mpi: ModuleType,
        roles: Roles,
        sync: bool,
        num_rows: int,
        dim: int,
        dense_size: int,
    ) -> None:
        # Without a torch optimizer, whose first one loads 60 MiB of torch.
        rule = RuleSpec("adam")
        hypers = hyper_of_group(rule, ADAM)[None]
        flat = ParamSpec("flat", (dense_size,), 0, dense_size)
        seed = table_seed(0, "rows")
        self._rows = SparseSpec("rows", num_rows, dim, "float32", rule, "uniform", 0.01, seed)
        self._hypers = hypers
        self._flat = np.zeros(dense_size, np.float32)
        self._job = Job(
            mpi,
            roles,
            TableSpecs((DenseSpec("dense", "float32", rule, (flat,)),), (self._rows,)),
            replace(job_settings(DistributedStrategy()), sync=sync, home="node"),
            {},
            hypers,
            hypers,
            [self._flat],
            None,
        )
        client = self._job.client
        self._exchange = RemoteExchange(client, sync) if client is not None else None

    def serve(self) -> None:
        """Apply pushes until all workers have stopped. On the server."""
        self._job.serve()

    def step(self, keys: np.ndarray) -> None:
        """Pull the rows of `keys` int64 [n], push gradients of them and of all that is dense."""
        assert self._exchange is not None
        unique = unique_keys(keys, self._rows.num_rows, self._exchange.num_servers, "rows")
        rows = self._exchange.pull_rows(0, unique)
        gradients = Gradients(
            self._hypers,
            [np.ones(1, np.uint8)],
            [np.full_like(self._flat, 0.01)],
            self._hypers,
            [unique],
            [rows],
        )
        self._exchange.step(gradients, [self._flat])

    def stop(self) -> None:
        """Say that this worker has nothing more. On workers."""
        assert self._exchange is not None
        self._exchange.flush()
        self._exchange.finish()

    def free(self) -> None:
        """Give the windows back. Collective."""
        self._exchange = None
        self._job.free()
