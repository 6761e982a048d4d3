"""This rank's lifeline from fleet.init() to the end of MPI: collective at both ends."""

import atexit
import os
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

from mpifleet.launchenv import LOG_DIR
from mpifleet.lifeline import (
    Address,
    Hub,
    Lifeline,
    RankSegments,
    Stopping,
    end_undisturbed,
    install_excepthook,
    listen_host,
)
from mpifleet.log import set_prefix
from mpifleet.mpi import bcast_json, finalize, gather_json, serial
from mpifleet.ranklog import redirect
from mpifleet.roles import Role, Roles
from mpifleet.strategy import DistributedStrategy


class Watch:
    """From here on a dead, failed or frozen rank ends the job. Building one is collective.

    end_together: called when the script has ended as it should, before MPI ends. Collective.
    watched: called when the lifeline is up, see mpi.abort_on_error.
    """

    def __init__(
        self,
        mpi: ModuleType,
        roles: Roles,
        strategy: DistributedStrategy,
        end_together: Callable[[], None],
        watched: Callable[[], None],
    ) -> None:
        self.comm = roles.world.Dup()
        """A communicator for the end of the job alone."""
        self._mpi = mpi
        self._roles = roles
        self._end_together = end_together
        self._stopping: Stopping | None = None
        rank, world = roles.world.rank, roles.world
        name = roles.name_of(rank)
        hub = Hub.open(listen_host(roles.one_node)) if rank == 0 else None
        address = Address(*bcast_json(world, list(hub.address) if hub else None))
        folder = os.environ.get(LOG_DIR)
        self._lifeline = Lifeline.connect(
            address,
            rank=rank,
            size=world.size,
            role=name,
            roles=[roles.name_of(r) for r in range(world.size)],
            stall_report_s=strategy.stall_report_s,
            stall_end_s=strategy.stall_end_s,
            voice=redirect(roles.role.value, roles.index, rank, folder) if folder else None,
            hub=hub,
        )
        set_prefix(f"rank {rank} ({name})")
        # Exit handlers run last in, first out: a failing exit is seen before the clean end.
        atexit.register(self._at_exit)
        watched()
        install_excepthook(self._lifeline)
        self._segments = self._hide_segments(roles.node)

    @staticmethod
    def _hide_segments(node: Any) -> RankSegments:
        """Take the names of MPI's shared files away, so that no kill leaves them. Collective."""
        segments = RankSegments(node.size)
        if all(gather_json(node, segments.complete)):
            segments.hide()
        return segments

    def set_patience(self, strategy: DistributedStrategy) -> None:
        """Use a strategy's patience from now on; by every rank."""
        self._lifeline.set_patience(strategy.stall_report_s, strategy.stall_end_s)

    def stopping(self) -> Stopping:
        """This rank's part in stopping after a signal; signals count from `heed_stops` on."""
        is_worker = self._roles.role is Role.WORKER
        self._stopping = self._lifeline.stopping(self._roles.num_workers, is_worker)
        return self._stopping

    def heed_stops(self) -> None:
        """From now on SIGTERM and SIGUSR2 ask to stop. After all ranks have their `stopping`."""
        self._lifeline.heed_stops()

    def gone(self, comm_world: str) -> str:
        """Which of the "worker", "server" or "all" ranks will take part in nothing any more, in
        words; "" if all still may.
        """
        servers = () if comm_world == "worker" else self._roles.server_ranks
        workers = () if comm_world == "server" else self._roles.worker_ranks
        ranks = (*workers, *servers)
        names = [f"rank {r} ({self._roles.name_of(r)})" for r in ranks if r in self._lifeline.left]
        return f"{', '.join(names)} came to the end of the script" if names else ""

    def _at_exit(self) -> None:
        """End together, or end the job: an exit handler's exception would end nothing."""
        if self._lifeline.in_forked_child:
            return
        if self._stopping is not None:
            self._stopping.finish()  # a script may have ended without fleet.stop_worker()
        self._lifeline.leave()
        end_undisturbed()
        try:
            self._end_together()
            with serial:
                self.comm.Barrier()
            self._segments.restore(self._roles.node.rank)
            finalize(self._mpi)
        except Exception as error:
            traceback.print_exc()
            self._lifeline.fail(1, f"failed at exit: {type(error).__name__}: {error}")
        self._lifeline.goodbye()


def watch_alone() -> None:
    """The lifeline of a launched job of one rank: the launcher and signals are watched."""
    line = Lifeline.connect(None, rank=0, size=1, role="worker 0", roles=["worker 0"])
    install_excepthook(line)
    atexit.register(line.goodbye)
