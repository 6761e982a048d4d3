"""One sparse table of the package on one server, and its roads of a pull and a push."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import numpy as np
import torch

from mpifleet.compose import job_settings
from mpifleet.partition import UniqueKeys, unique_keys
from mpifleet.ps.initializers import initial_rows, table_seed
from mpifleet.ps.job import Job
from mpifleet.ps.mailbox import Lane
from mpifleet.ps.message import Kind
from mpifleet.ps.rule_spec import HYPER_SIZE, hyper_of_group, rule_of_group
from mpifleet.ps.spec import SparseSpec, TableSpecs
from mpifleet.roles import Roles
from mpifleet.strategy import DistributedStrategy


class TableRoads:
    """A job with one table of float32 [num_rows, dim] and one server. Collective, as free is.

    home: "node" or "world", as the attribute of that name.  optimizer: class, its other options
    being torch's defaults.
    """

    def __init__(
        self,
        mpi: ModuleType,
        roles: Roles,
        home: str,
        num_rows: int,
        dim: int,
        rate: float,
        optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
    ) -> None:
        self.home = home
        chosen = optimizer([torch.zeros(1)], lr=rate)  # type: ignore[call-arg]
        group = chosen.param_groups[0]
        rule = rule_of_group(chosen, group)
        self._hypers = hyper_of_group(rule, group)[None]
        seed = table_seed(0, "rows")
        self._spec = SparseSpec("rows", num_rows, dim, "float32", rule, "uniform", 0.01, seed)
        self._job = Job(
            mpi,
            roles,
            TableSpecs((), (self._spec,)),
            replace(job_settings(DistributedStrategy()), sync=False, home=home),
            {},
            np.empty((0, HYPER_SIZE)),
            self._hypers,
            [],
            None,
        )
        self._steps = 0

    def serve(self) -> None:
        """Apply pushes until the worker stops. On the server."""
        self._job.serve()

    def first_rows(self, keys: np.ndarray) -> np.ndarray:
        """What rows `keys` hold before any push, float32 [n, dim]."""
        spec = self._spec
        return initial_rows(spec.initializer, keys, spec.dim, seed=spec.seed, scale=spec.scale)

    def pull(self, keys: np.ndarray) -> np.ndarray:
        """Rows of distinct keys, in the order of `keys`."""
        assert self._job.client is not None
        return self._job.client.pull_rows(0, _as_they_are(keys))

    def pull_any(self, keys: np.ndarray) -> np.ndarray:
        """Rows of keys that may repeat, sorted and made distinct on the way, in key order."""
        assert self._job.client is not None
        return self._job.client.pull_rows(0, unique_keys(keys, self._spec.num_rows, 1, "rows"))

    def push(self, keys: np.ndarray, grads: np.ndarray) -> None:
        """Push gradients of distinct keys; returns when the table's version shows them applied."""
        client = self._job.client
        assert client is not None
        self._steps += 1
        client.push_rows(self._steps, self._hypers, [_as_they_are(keys)], [grads])
        client.wait_version(Lane.ROWS, self._steps)

    def stop(self) -> None:
        """Let the server's `serve` return. On the worker."""
        assert self._job.client is not None
        self._job.client.announce(Kind.STOP)

    def free(self) -> None:
        """Give the windows back. Collective."""
        self._job.free()


def _as_they_are(keys: np.ndarray) -> UniqueKeys:
    """Distinct keys on one server in their own order, so that all roads read the same sequence."""
    positions = np.arange(keys.size)
    return UniqueKeys(keys, keys, np.array([0, keys.size]), positions, positions, positions)
