"""fleet.util: small collectives over the workers, the servers or all ranks, as Fleet names them."""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import numpy as np

from mpifleet.errors import ConfigError
from mpifleet.meeting import wait_for_all
from mpifleet.mpi import gather_json, mpi_type, serial
from mpifleet.partition import file_shard
from mpifleet.roles import Role, Roles

MODES = ("sum", "min", "max")
WORLDS = ("worker", "server", "all")


class Util:
    """Collectives for scripts. mpi and roles are None in a single process.

    meet: entered around every collective with its comm_world, where all wait for all; see
    Session.meet.
    Every call is collective over the ranks of `comm_world`; a rank that is none of them raises.
    """

    def __init__(
        self,
        mpi: ModuleType | None,
        roles: Roles | None,
        meet: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> None:
        self._mpi = mpi
        self._roles = roles
        self._meet = meet

    def all_reduce(self, input: Any, mode: str = "sum", comm_world: str = "worker") -> Any:
        """Element-wise sum, min or max over the ranks; a number, a list or an ndarray as given.

        Integers stay exact int64 (uint64 where given); ranks that bring different kinds of numbers
        all get the kind that holds them. Raises ConfigError where shapes differ, and where some
        bring int64 and others uint64, which no kind holds exactly. Collective.
        """
        if mode not in MODES:
            raise ConfigError(f"mode={mode!r}; use one of {', '.join(MODES)}")
        values = np.array(input, order="C")  # a copy: the input is left as it is
        if values.dtype.kind not in "iufb":
            raise ConfigError(f"all_reduce of {values.dtype}; use numbers")
        if values.dtype.kind != "f":
            values = values.astype(np.uint64 if values.dtype.kind == "u" else np.int64)
        comm = self._comm(comm_world)
        if comm is not None:
            assert self._mpi is not None
            op = {"sum": self._mpi.SUM, "min": self._mpi.MIN, "max": self._mpi.MAX}[mode]
            with self._meet(comm_world), serial:
                values = values.astype(_common_dtype(comm, values), copy=False)
                mpi_type(self._mpi, values.dtype)
                comm.Allreduce(self._mpi.IN_PLACE, values, op=op)
        if isinstance(input, np.ndarray):
            return values
        return values.tolist()

    def all_gather(self, input: Any, comm_world: str = "worker") -> list[Any]:
        """Every rank's number, text or list of them; "all" lists workers first. Collective."""
        comm = self._comm(comm_world)
        if comm is None:
            return [input]
        json.dumps(input)  # what cannot travel fails here, before anybody waits
        with self._meet(comm_world):
            values = gather_json(comm, input)
        if comm_world == "all":
            assert self._roles is not None
            order = (*self._roles.worker_ranks, *self._roles.server_ranks)
            return [values[rank] for rank in order]
        return values

    def barrier(self, comm_world: str = "worker") -> None:
        """Wait for all ranks of `comm_world`, without keeping a core busy. Collective."""
        comm = self._comm(comm_world)
        if comm is not None:
            with self._meet(comm_world):
                wait_for_all(comm)

    def get_file_shard(self, files: Sequence[str]) -> list[str]:
        """This worker's contiguous share of `files`, the same list on every worker."""
        if self._roles is None:
            return file_shard(files, 0, 1)
        if self._roles.role is not Role.WORKER:
            raise ConfigError("get_file_shard is for workers; this rank is a server")
        return file_shard(files, self._roles.index, self._roles.num_workers)

    def print_on_rank(self, message: str, rank_id: int) -> None:
        """Print `message` on the worker with this index only."""
        if self._roles is None:
            is_it = rank_id == 0
        else:
            is_it = self._roles.role is Role.WORKER and self._roles.index == rank_id
        if is_it:
            print(message, flush=True)

    def _comm(self, comm_world: str) -> Any:
        if comm_world not in WORLDS:
            raise ConfigError(f"comm_world={comm_world!r}; use one of {', '.join(WORLDS)}")
        if self._roles is None:
            with self._meet(comm_world):  # refused here where it would be refused in a job
                return None
        if comm_world == "all":
            return self._roles.world
        if self._roles.role.value != comm_world:
            raise ConfigError(f"comm_world={comm_world!r} on a {self._roles.role.value}")
        return self._roles.group


def _common_dtype(comm: Any, values: np.ndarray) -> np.dtype:
    """The dtype that holds every rank's numbers. Collective."""
    facts = gather_json(comm, (list(values.shape), values.dtype.str))
    shapes = [tuple(shape) for shape, _ in facts]
    for rank, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise ConfigError(
                f"all_reduce of shape {shapes[0]} on rank 0 and {shape} on rank {rank}"
            )
    dtypes = [np.dtype(dtype) for _, dtype in facts]
    common = np.result_type(*dtypes)
    signed = [rank for rank, dtype in enumerate(dtypes) if dtype.kind == "i"]
    unsigned = [rank for rank, dtype in enumerate(dtypes) if dtype.kind == "u"]
    if signed and unsigned:
        # numpy would take float64, whose 53 bits round both.
        raise ConfigError(
            f"all_reduce of {dtypes[signed[0]]} on rank(s) {_listed(signed)} and of "
            f"{dtypes[unsigned[0]]} on rank(s) {_listed(unsigned)}; use one of them on all ranks"
        )
    return common


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
