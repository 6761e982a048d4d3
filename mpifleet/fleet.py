"""Fleet's public names: `from mpifleet import fleet`.

Every call works the same under mpirun, srun and mpifleet run, and in a single process started as
`python train.py`, which is then the only worker and holds the tables itself.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from mpifleet.current import begin, current
from mpifleet.embedding import SparseEmbedding
from mpifleet.errors import ConfigError
from mpifleet.launchenv import PREEMPTED
from mpifleet.optimizer import DistributedOptimizer
from mpifleet.partition import file_shard
from mpifleet.paths import Named, path_of
from mpifleet.preemption import preempted
from mpifleet.pull_ahead import ahead
from mpifleet.resuming import register_state, resume, save_checkpoint
from mpifleet.role_makers import (
    MPISymmetricRoleMaker,
    PaddleCloudRoleMaker,
    RoleMaker,
    is_symmetric,
)
from mpifleet.saves import (
    load_dense_params,
    load_one_table,
    load_persistables,
    load_state_dict,
    load_word2vec,
    save_dense_params,
    save_inference_model,
    save_one_table,
    save_persistables,
    save_state_dict,
    save_word2vec,
)
from mpifleet.strategy import BuildStrategy, DistributedStrategy, ExecutionStrategy
from mpifleet.training_threads import TrainingThread
from mpifleet.util import Util

__all__ = [
    "PREEMPTED",
    "BuildStrategy",
    "DistributedStrategy",
    "ExecutionStrategy",
    "MPISymmetricRoleMaker",
    "PaddleCloudRoleMaker",
    "SparseEmbedding",
    "barrier_worker",
    "distributed_model",
    "distributed_optimizer",
    "flush",
    "init",
    "init_server",
    "init_worker",
    "is_first_worker",
    "is_server",
    "is_worker",
    "load_dense_params",
    "load_one_table",
    "load_persistables",
    "load_state_dict",
    "load_word2vec",
    "preempted",
    "pull_ahead",
    "register_state",
    "resume",
    "run_server",
    "run_threads",
    "save_checkpoint",
    "save_dense_params",
    "save_inference_model",
    "save_one_table",
    "save_persistables",
    "save_state_dict",
    "save_word2vec",
    "server_endpoints",
    "server_index",
    "server_num",
    "split_files",
    "stop_worker",
    "util",
    "worker_endpoints",
    "worker_index",
    "worker_num",
]

Model = TypeVar("Model", bound=nn.Module)
Batch = TypeVar("Batch")


def init(
    role_maker: RoleMaker | None = None,
    is_collective: bool = False,
    strategy: DistributedStrategy | None = None,
    *,
    server_num: int | None = None,
    worker_num: int | None = None,
    role: str | None = None,
) -> None:
    """Decide every rank's role and watch over the job from here on. Collective; once.

    server_num, worker_num: how many; else MPIFLEET_SERVER_NUM and MPIFLEET_WORKER_NUM, else one
    server per node.  role: this rank's own, "server" or "worker", given by all ranks or none; else
    MPIFLEET_ROLE.  Raises ConfigError for counts and roles that cannot be, LaunchError when
    launcher and MPI disagree about the number of ranks.
    """
    begin(strategy, server_num, worker_num, role, is_symmetric(role_maker, is_collective))


# -- who am I -------------------------------------------------------------------------------------


def is_server() -> bool:
    """Whether this rank is a server; False in a single process."""
    return current().is_server


def is_worker() -> bool:
    """Whether this rank is a worker; True in a single process."""
    return not current().is_server


def is_first_worker() -> bool:
    """Whether this rank is worker 0."""
    return is_worker() and worker_index() == 0


def worker_index() -> int:
    """This worker's number, from 0. Raises ConfigError on a server."""
    roles = current().roles
    if is_server():
        raise ConfigError("worker_index() on a server; ask is_worker() first")
    return roles.index if roles else 0


def worker_num() -> int:
    """Number of workers."""
    roles = current().roles
    return roles.num_workers if roles else 1


def server_index() -> int:
    """This server's number, from 0. Raises ConfigError on a worker."""
    roles = current().roles
    if roles is None or not is_server():
        raise ConfigError("server_index() on a worker; ask is_server() first")
    return roles.index


def server_num() -> int:
    """Number of servers; 0 in a single process."""
    roles = current().roles
    return roles.num_servers if roles else 0


def worker_endpoints(to_string: bool = False) -> list[str] | str:
    """Where the workers are, as "node/rank" (MPI has no ports); one comma-joined text if asked."""
    return _endpoints("worker", to_string)


def server_endpoints(to_string: bool = False) -> list[str] | str:
    """Where the servers are, as "node/rank"; one comma-joined text if asked."""
    return _endpoints("server", to_string)


def _endpoints(kind: str, to_string: bool) -> list[str] | str:
    roles, alone = current().roles, ["node0/0"] if kind == "worker" else []
    names = roles.endpoints(kind) if roles else alone
    return ",".join(names) if to_string else names


# -- set-up ---------------------------------------------------------------------------------------


def distributed_model(model: Model) -> Model:
    """Name the model whose parameters and tables the job holds. Returns it unchanged."""
    current().model = model
    return model


def distributed_optimizer(
    optimizer: torch.optim.Optimizer,
    strategy: DistributedStrategy | None = None,
    model: nn.Module | None = None,
) -> DistributedOptimizer:
    """Wrap a torch optimizer: its step() pushes gradients to the servers and pulls what they made.

    Called on every rank, servers too, with the same model and optimizer. strategy: else init()'s.
    model: gives parameters their names; else distributed_model's.
    """
    session = current()
    session.set_strategy(strategy)
    session.check_not_started("distributed_optimizer(...)")
    if session.optimizer is not None:
        raise ConfigError("a job has one optimizer; use param groups for different settings")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer={optimizer!r}; use a torch.optim optimizer")
    if model is not None:
        session.model = model
    session.optimizer = DistributedOptimizer(optimizer, session.model)
    return session.optimizer


def init_server(dirname: Named | None = None, *, strict: bool = True) -> None:
    """Prepare a server; dirname: a checkpoint to start from, on every server the same.

    strict=False: take of it what fits; the rest begins as without it, and server 0 logs what.
    """
    if dirname is not None:
        where = path_of("dirname", dirname).absolute()
        current().load_from, current().load_strict = where, strict


def run_server() -> None:
    """Serve until every worker has stopped. Called by every server while workers init_worker()."""
    current().serve()


def init_worker() -> None:
    """Connect to the servers; all workers' parameters are then worker 0's. Collective."""
    session = current()
    if session.is_server:
        raise ConfigError("init_worker() is for workers; this rank is a server: call run_server()")
    session.start()


def stop_worker() -> None:
    """Say that this worker pushes no more; everything it pushed is applied when this returns."""
    current().stop()


# -- training -------------------------------------------------------------------------------------


def pull_ahead(
    batches: Iterable[Batch], look_ups: Callable[[Batch], Mapping[SparseEmbedding, Any]]
) -> Iterator[Batch]:
    """The same batches, with the rows of the next ones pulled while this one trains.

    look_ups: gives {embedding: ids or (ids, offsets)} of a batch, what its forward will look up.
    strategy.pull_ahead says how many batches ahead.  With 0, which is all that sync mode has, no
    row is pulled ahead, but the next batch's keys are sorted while a step waits.  A row pulled
    ahead may miss the last pushes; dense parameters never do. Memory: rows of so many batches.
    """
    session = current()
    session.connected()
    return ahead(batches, look_ups, session.strategy.pull_ahead)


def run_threads(train: Callable[[TrainingThread], None], thread_num: int | None = None) -> None:
    """Call train(thread) in several threads of this worker at once; returns when all have.

    thread: its `index` of `num`, and the `model` and `optimizer` to train with: values are shared
    (Hogwild), gradients its own. In async mode each pushes its own steps; in every other mode they
    step together and push their mean. thread_num: else CPU_NUM, else 1. Raises what one raised.
    torch.autocast belongs inside train(). docs/performance.md compares threads with ranks.
    """
    current().run_threads(train, thread_num)


def flush() -> None:
    """Return once all this worker pushed is applied, with dense parameters read anew."""
    current().flush()


def barrier_worker() -> None:
    """Wait for all workers. Collective over workers."""
    current().util.barrier("worker")


def split_files(files: Sequence[str]) -> list[str]:
    """This worker's contiguous share of `files`; same as util.get_file_shard."""
    return file_shard(files, worker_index(), worker_num())


def __getattr__(name: str) -> Any:
    # fleet.util is Fleet's own spelling; it exists from init() on.
    if name == "util":
        return current().util
    raise AttributeError(f"module 'mpifleet.fleet' has no attribute {name!r}")


util: Util
