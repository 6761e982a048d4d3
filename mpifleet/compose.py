"""From strategy to behaviour: the one place where flags become settings and an exchange."""

import platform
from pathlib import Path
from types import ModuleType

from mpifleet._version import __version__
from mpifleet.errors import ConfigError
from mpifleet.mpi import library
from mpifleet.optimizer import DistributedOptimizer
from mpifleet.patience import Patience
from mpifleet.ps.client import Client
from mpifleet.ps.exchange import RemoteExchange
from mpifleet.ps.job import Settings
from mpifleet.ps.local_exchange import LocalExchange
from mpifleet.strategy import DistributedStrategy
from mpifleet.strategy_rules import check_together

# A frozen rank keeps others waiting: the lifeline, which knows who is frozen, is to end the job
# before one of those gives up and names whom it waited for.
LIFELINE_FIRST_S = 3.0
STARTED = "having reached fleet.init_worker() or fleet.run_server()"


def job_settings(strategy: DistributedStrategy) -> Settings:
    """What the strategy says about a parameter-server job. Raises ConfigError."""
    check_together(strategy.to_dict())
    return Settings(
        sync=strategy.mode == "sync",
        home=strategy.table_home,
        skip_nonfinite=strategy.nonfinite == "skip",
        mailbox_bytes=strategy.mailbox_mib << 20,
        patience=Patience(strategy.stall_report_s, strategy.stall_end_s + LIFELINE_FIRST_S),
        dense_sync=strategy.dense_sync,
        staleness=strategy.a_sync_configs.staleness,
    )


def job_facts(mpi: ModuleType, strategy: DistributedStrategy) -> dict[str, str]:
    """What must be the same on all ranks, as text by name."""
    facts = {
        STARTED: "yes",
        "the version of mpifleet": __version__,
        "the MPI library": library(mpi),
        "the version of Python": platform.python_version(),
    }
    for field, value in strategy.to_dict().items():
        facts[f"strategy.{field}"] = str(value)
    return facts


def remote_exchange(client: Client, settings: Settings) -> RemoteExchange:
    """A worker's exchange with the servers."""
    return RemoteExchange(
        client,
        settings.sync,
        dense_sync=settings.dense_sync,
        staleness=settings.staleness,
    )


def steps_together(strategy: DistributedStrategy) -> bool:
    """Whether a worker's training threads make one step together; else each makes its own."""
    return strategy.mode != "async" or strategy.a_sync_configs.staleness >= 0


def local_exchange(
    optimizer: DistributedOptimizer,
    strategy: DistributedStrategy,
    load_from: Path | None,
    load_strict: bool = True,
) -> LocalExchange:
    """All tables in this process. Sync, hybrid and async are the same thing there."""
    check_together(strategy.to_dict())
    if strategy.mode not in ("sync", "hybrid", "async"):
        raise ConfigError(f"mode {strategy.mode!r} has no exchange in a single process")
    return LocalExchange(
        optimizer.specs,
        *optimizer.hypers(),
        optimizer.first_values(),
        skip_nonfinite=strategy.nonfinite == "skip",
        load_from=load_from,
        load_strict=load_strict,
    )
