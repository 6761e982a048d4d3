"""One run of a script from fleet.init() to its exit: roles, lifeline, job, and a clean end."""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType

from torch import nn

from mpifleet.compose import (
    STARTED,
    job_facts,
    job_settings,
    local_exchange,
    remote_exchange,
    steps_together,
)
from mpifleet.errors import ConfigError, TableError
from mpifleet.exchange import Exchange
from mpifleet.job_states import JobStates
from mpifleet.launchenv import (
    LaunchEnv,
    check_size,
    read_launch_env,
    requested_role,
    requested_servers,
)
from mpifleet.lifeline import Stopping
from mpifleet.local_state import local_tensors, share
from mpifleet.log import get_logger
from mpifleet.meeting import wait_for_all
from mpifleet.memory_reuse import keep_freed_memory
from mpifleet.mpi import abort_on_error, check_threads_allowed, load_mpi
from mpifleet.optimizer import DistributedOptimizer
from mpifleet.persistables import Persistables
from mpifleet.ps.agreement import compare
from mpifleet.ps.job import Job
from mpifleet.roles import Role, Roles, check_single
from mpifleet.strategy import DistributedStrategy
from mpifleet.training_threads import Train, make_threads, run_threads
from mpifleet.util import Util
from mpifleet.watch import Watch, watch_alone


class Session:
    """State of one fleet.init(). Building one is collective over all ranks of the job.

    server_num, worker_num: None for what the launch says.  role: this rank's own label.
    symmetric: even ranks are servers, odd ones workers.
    """

    _watch: Watch | None = None
    stopping: Stopping | None = None  # what fleet.preempted() asks

    def __init__(
        self,
        strategy: DistributedStrategy | None,
        server_num: int | None = None,
        worker_num: int | None = None,
        role: str | None = None,
        symmetric: bool = False,
    ) -> None:
        self.strategy = _checked(strategy or DistributedStrategy())
        self.model: nn.Module | None = None
        self.optimizer: DistributedOptimizer | None = None
        self.load_from: Path | None = None
        self.load_strict = True
        self.states = JobStates()
        self.exchange: Exchange | None = None
        self._mpi: ModuleType | None = None
        self.roles: Roles | None = None
        self._job: Job | None = None
        self._served = False
        get_logger()
        env = read_launch_env()
        if env.launcher != "none" or "mpi4py.MPI" in sys.modules:
            self._join(env, server_num, worker_num, role, symmetric)
        else:
            check_single(server_num, worker_num, role)
        self.util = Util(self._mpi, self.roles, self.meet)

    def _join(
        self,
        env: LaunchEnv,
        server_num: int | None,
        worker_num: int | None,
        role: str | None,
        symmetric: bool,
    ) -> None:
        mpi = load_mpi()
        watched = abort_on_error(mpi)
        comm = mpi.COMM_WORLD
        check_size(env, comm.size, mpi.Get_library_version())
        servers, workers = requested_servers()
        servers = server_num if server_num is not None else servers
        workers = worker_num if worker_num is not None else workers
        label = role or requested_role()
        if comm.size == 1 and not servers:
            watched()
            check_single(servers, workers, label)
            if env.launcher != "none":
                watch_alone()
            return
        if servers is None and workers is not None and label is None and not symmetric:
            servers = comm.size - workers
            if servers < 1:
                raise ConfigError(
                    f"{workers} workers among {comm.size} ranks leave no server; "
                    f"use 1..{comm.size - 1}"
                )
        self._mpi = mpi
        self.roles = Roles.assign(mpi, comm, num_servers=servers, label=label, symmetric=symmetric)
        self.roles.check_counts(servers, workers)
        self._watch = Watch(mpi, self.roles, self.strategy, self._end_together, watched)

    # -- start ------------------------------------------------------------------------------------

    def set_strategy(self, strategy: DistributedStrategy | None) -> None:
        """Take another strategy than init()'s, before the start; None for that one."""
        if strategy is not None:
            self.check_not_started("another strategy")
            self.strategy = _checked(strategy)

    def check_not_started(self, what: str) -> None:
        """Raise ConfigError where `what` comes too late."""
        if self._has_started:
            raise ConfigError(f"{what} must come before init_worker() or run_server()")

    @property
    def _has_started(self) -> bool:
        return self._job is not None or self.exchange is not None

    @property
    def is_server(self) -> bool:
        """Whether this rank is a server; False in a single process."""
        return self.roles is not None and self.roles.role is Role.SERVER

    def start(self) -> None:
        """Make tables and windows and connect the optimizer. Collective; once."""
        if self.optimizer is None:
            raise ConfigError("call fleet.distributed_optimizer(...) before starting")
        if self._has_started:
            raise ConfigError("this rank has started already: init_worker() or run_server() twice")
        if self._watch is not None:
            self._watch.set_patience(self.strategy)
        if not self.is_server:
            keep_freed_memory()
        if self.strategy.preemptible:
            self.stopping = self._watch.stopping() if self._watch is not None else Stopping(None)
        if self.roles is None:
            start = (self.load_from, self.load_strict)
            self.exchange = local_exchange(self.optimizer, self.strategy, *start)
        else:
            assert self._mpi is not None
            settings = job_settings(self.strategy)
            self._job = Job(
                self._mpi,
                self.roles,
                self.optimizer.specs,
                settings,
                job_facts(self._mpi, self.strategy),
                *self.optimizer.hypers(),
                self.optimizer.first_values(),
                self.load_from,
                self.load_strict,
            )
            if self._job.client is not None:
                self.exchange = remote_exchange(self._job.client, settings)
        if self.exchange is not None:
            self.optimizer.connect(self.exchange)
        if self.roles is not None and not self.is_server and self.model is not None:
            share(self.roles.group, local_tensors(self.model, self.optimizer, everything=True))
        if self.stopping is not None:  # every rank has its own by now
            (self._watch.heed_stops if self._watch else self.stopping.heed_alone)()

    def serve(self) -> None:
        """Start and serve until every worker has stopped. On servers."""
        if not self.is_server:
            raise ConfigError("run_server() is for servers; this rank is a worker")
        self.start()
        assert self._job is not None
        self._job.serve()
        self._served = True

    # -- workers ----------------------------------------------------------------------------------

    def connected(self) -> Exchange:
        """The exchange of a started worker. Raises TableError before init_worker()."""
        if self.exchange is None:
            what = "run_server()" if self.is_server else "init_worker()"
            raise TableError(f"not started: this call needs fleet.{what} first, on a worker")
        return self.exchange

    @contextmanager
    def meet(self, comm_world: str) -> Iterator[None]:
        """Around a collective of "worker", "server" or "all" ranks. Collective over them.

        Workers that wait in it are not waited for by others' steps: without this, workers with
        fewer batches would wait for those that wait for their steps. Raises StallError when a rank
        has ended and will never come. After an error inside nobody meets again.
        """
        away: AbstractContextManager[None] = nullcontext()
        if comm_world == "worker" and self.stopping is not None and self.exchange is not None:
            clock = self.exchange.clock
            away = self.stopping.meeting(lambda: clock.steps)
        with away, self._meet(comm_world):
            yield

    @contextmanager
    def _meet(self, comm_world: str) -> Iterator[None]:
        roles, exchange = self.roles, self.exchange
        waits = exchange is not None and exchange.waits_for_others  # refused from a thread
        if roles is None:
            yield
            return
        if comm_world == "all" and exchange is not None and not exchange.is_finished:
            raise ConfigError('comm_world="all" while servers serve: stop_worker() comes first')
        rests = comm_world == "worker" and waits
        comm = roles.world if comm_world == "all" else roles.group
        report_s = self.strategy.stall_report_s
        if rests and exchange is not None:
            exchange.pause()
        wait_for_all(comm, lambda: self.gone(comm_world), report_s)
        yield
        if rests and exchange is not None:
            exchange.resume()
            wait_for_all(comm, lambda: self.gone(comm_world), report_s)
            if self.optimizer is not None and not exchange.is_finished:
                # Others may have stepped meanwhile: all go on from the same parameters, and no row
                # that was pulled ahead is older than those.
                self.optimizer.look_anew()

    def gone(self, comm_world: str) -> str:
        """Which of these ranks will take part in nothing any more, in words."""
        return self._watch.gone(comm_world) if self._watch is not None else ""

    def flush(self) -> None:
        """Return once this worker's pushes are applied; parameters are then the servers' own."""
        self.connected().flush()
        assert self.optimizer is not None
        self.optimizer.look_anew()

    def run_threads(self, train: Train, thread_num: int | None) -> None:
        """Call train(thread) in that many training threads of this worker, until all return."""
        exchange, optimizer = self.connected(), self.optimizer
        assert optimizer is not None
        together = steps_together(self.strategy)
        threads = make_threads(exchange, self.model, optimizer, thread_num, together)
        if self.roles is not None and len(threads) > 1:
            check_threads_allowed()
        assert self.model is not None
        self.states.used_threads(len(threads))
        run_threads(threads, self.model, optimizer, train, self._use)

    def _use(self, exchange: Exchange) -> None:
        self.exchange = exchange

    def stop(self) -> None:
        """Push no more; worker 0 says where its time went."""
        exchange = self.connected()
        if self.stopping is not None:
            self.stopping.finish()
        split = exchange.clock.split()
        exchange.finish()
        if split.steps and (self.roles is None or self.roles.index == 0):
            get_logger().info("%s", split.summary())

    def persistables(self) -> Persistables:
        """What saves and loads this job. On a started worker."""
        exchange, optimizer = self.connected(), self.optimizer
        assert optimizer is not None
        return Persistables(self.roles, self.strategy, self.model, optimizer, exchange, self.meet)

    # -- end --------------------------------------------------------------------------------------

    def _end_together(self) -> None:
        """Stop what was not stopped and free the windows. Collective."""
        roles = self.roles
        assert roles is not None
        if self._job is None:
            # A rank that leaves while others start would keep them waiting: they are told so.
            compare(roles, {STARTED: "no"})
        elif self.exchange is not None and not self.exchange.is_finished:
            get_logger().warning("the script ended without fleet.stop_worker(): stopping now")
            self.exchange.finish()
        elif self.is_server and not self._served:
            raise ConfigError("a server left before its workers had stopped")
        assert self._watch is not None
        # Not roles.world: the script may be in a collective of its own there on other ranks.
        wait_for_all(self._watch.comm)
        if self._job is not None:
            self._job.free()


def _checked(strategy: DistributedStrategy) -> DistributedStrategy:
    if not isinstance(strategy, DistributedStrategy):
        raise ConfigError(f"strategy={strategy!r}; use a fleet.DistributedStrategy")
    return strategy
