"""A parameter-server job on this rank: everything made at its start and freed at its end."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from mpifleet.errors import ConfigError
from mpifleet.log import get_logger
from mpifleet.meeting import wait_for_all
from mpifleet.mpi import gather_json, serial
from mpifleet.partition import pieces
from mpifleet.patience import Patience, sharpen_sleep
from mpifleet.ps.agreement import check_shared_memory, compare
from mpifleet.ps.breath import Breath
from mpifleet.ps.client import Client, split_request
from mpifleet.ps.homes import make_home
from mpifleet.ps.lag import LagCount
from mpifleet.ps.mailbox import Lane, MailboxLayout, ServerMailbox, WorkerMailbox
from mpifleet.ps.mailbox_plan import plan
from mpifleet.ps.message import Kind
from mpifleet.ps.selftest import choose_home
from mpifleet.ps.server import ParameterServer
from mpifleet.ps.server_advice import BottleneckWatch, advice
from mpifleet.ps.server_load import ServerLoad, ServerReport
from mpifleet.ps.shard import Shard
from mpifleet.ps.spec import TableSpecs, layouts
from mpifleet.ps.storage import Storage
from mpifleet.roles import Role, Roles
from mpifleet.window import MAX_COUNT, Window

_TAG_DENSE = 1
MARGIN_BYTES = 1 << 20
"""For gates, padding, and what MPI itself keeps beside a server's windows."""


@dataclass(frozen=True)
class Settings:
    """What the strategy says about a parameter-server job.

    sync: one mean over the workers per step; dense_sync: of the dense part.  staleness: steps that
    a worker may be ahead of the slowest, -1 for any number.
    """

    sync: bool
    home: str
    skip_nonfinite: bool
    mailbox_bytes: int
    patience: Patience
    dense_sync: bool = False
    staleness: int = -1


@dataclass(frozen=True)
class Served:
    """What a server did. lag: of the pushes of dense gradients and of rows."""

    report: ServerReport
    lag: Mapping[Lane, LagCount]


class Job:
    """Windows, shard and mailbox of this rank. Building and freeing are collective.

    facts: what must be the same on all ranks, as text by name.  dense_hypers, sparse_hypers:
    float64 [tables, HYPER_SIZE].  dense: worker 0's first values, [size] per dense table.
    load_from: directory of a checkpoint to start from, the same on all ranks, or None.
    load_strict: whether it must fit in all.
    """

    def __init__(
        self,
        mpi: ModuleType,
        roles: Roles,
        specs: TableSpecs,
        settings: Settings,
        facts: Mapping[str, str],
        dense_hypers: np.ndarray,
        sparse_hypers: np.ndarray,
        dense: Sequence[np.ndarray],
        load_from: Path | None,
        load_strict: bool = True,
    ) -> None:
        compare(roles, {**facts, **specs.facts()})
        self._compare_start(roles, load_from, load_strict)
        sharpen_sleep()
        self._mpi = mpi
        self._roles = roles
        self._settings = settings
        self._layouts = layouts(specs, roles.num_servers)
        home_name, reason = choose_home(mpi, roles, settings.home)
        self._mailbox_layout = self._plan_mailbox(home_name)
        self._check_memory(home_name)
        self._home = make_home(home_name, mpi, roles, self._layouts)
        self._mailbox_window = self._make_mailbox()
        self._mailbox: ServerMailbox | None = None
        self._shard: Shard | None = None
        self.client: Client | None = None
        if roles.role is Role.SERVER:
            self._mailbox = ServerMailbox(
                self._mailbox_window, self._mailbox_layout, roles.world.rank
            )
            self._shard = self._make_shard(dense_hypers, sparse_hypers)
        else:
            self.client = self._make_client()
        if roles.world.rank == 0:
            place = self._home.place
            get_logger().info("tables lie in %s (%s home: %s)", place, home_name, reason)
        self._first_values(dense, load_from, load_strict)

    @staticmethod
    def _compare_start(roles: Roles, load_from: Path | None, strict: bool) -> None:
        """Raise ConfigError on every rank where servers start from different files. Collective."""
        told = gather_json(roles.world, f"{load_from}{'' if strict else ' (strict=False)'}")
        starts = {roles.name_of(rank): told[rank] for rank in roles.server_ranks}
        if len(set(starts.values())) > 1:
            raise ConfigError(f"servers start from different checkpoints: {starts}")

    def _plan_mailbox(self, home_name: str) -> MailboxLayout:
        specs = self._layouts[0].specs
        served = home_name == "node" and not self._roles.one_node
        return plan(
            self._roles.num_workers,
            self._settings.mailbox_bytes,
            max(layout.dense_message_bytes for layout in self._layouts),
            max((spec.dim * np.dtype(spec.dtype).itemsize for spec in specs.sparse), default=0),
            served,
        )

    def _make_mailbox(self) -> Window:
        is_server = self._roles.role is Role.SERVER
        return Window(
            self._mpi,
            self._roles.world,
            self._mailbox_layout.num_bytes if is_server else 0,
            atomic=True,
            zero_bytes=self._mailbox_layout.lane(0, Lane.DENSE),
        )

    def _check_memory(self, home_name: str) -> None:
        num_bytes = 0
        if self._roles.role is Role.SERVER and (home_name == "node" or self._roles.one_node):
            num_bytes = self._layouts[self._roles.index].num_bytes
            num_bytes += self._mailbox_layout.num_bytes if self._roles.one_node else 0
            num_bytes += MARGIN_BYTES
        check_shared_memory(self._roles, num_bytes)

    def _make_shard(self, dense_hypers: np.ndarray, sparse_hypers: np.ndarray) -> Shard:
        assert self._mailbox is not None
        return Shard(
            self._layouts[self._roles.index],
            self._home.memory,
            dense_hypers,
            sparse_hypers,
            exclusive=self._home.exclusive,
            breathe=Breath(self._mailbox.beat, self._progress),
            published=True,
        )

    def _make_client(self) -> Client:
        mailbox = WorkerMailbox(
            self._mailbox_window,
            self._mailbox_layout,
            self._roles.index,
            self._roles.server_ranks,
            self._settings.patience,
        )
        return Client(self._layouts, self._home, mailbox)

    def _progress(self) -> None:
        with serial:
            self._roles.world.Iprobe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG)

    def _first_values(
        self, dense: Sequence[np.ndarray], load_from: Path | None, strict: bool
    ) -> None:
        """Rows from their initializers, dense parameters from worker 0, or both from a file."""
        world, roles = self._roles.world, self._roles
        with serial:
            if world.rank == roles.worker_ranks[0]:
                for rank, layout in zip(roles.server_ranks, self._layouts, strict=True):
                    for part, flat in zip(layout.dense, dense, strict=True):
                        self._in_pieces(world.Send, flat[part.start : part.stop], rank)
            if self._shard is not None:
                self._receive_dense(self._shard)
                self._storage(self._shard).start_from(load_from, strict)
        wait_for_all(world)

    def _receive_dense(self, shard: Shard) -> None:
        source = self._roles.worker_ranks[0]
        for table in range(len(shard.layout.dense)):
            values = np.empty_like(shard.dense(table))
            self._in_pieces(self._roles.world.Recv, values, source)
            shard.set_dense(table, values)

    def _in_pieces(self, transfer: Callable[..., Any], values: np.ndarray, rank: int) -> None:
        flat = values.view(np.uint8)
        for start, stop in pieces(flat.size, MAX_COUNT):
            transfer([flat[start:stop], self._mpi.BYTE], rank, _TAG_DENSE)

    def _storage(self, shard: Shard) -> Storage:
        return Storage(self._mpi, self._roles.group, shard)

    def serve(self) -> Served:
        """Serve until every worker has stopped; servers say what that was. On servers."""
        assert self._shard is not None
        assert self._mailbox is not None
        speaks = self._roles.index == 0  # one server speaks for all
        watch = BottleneckWatch(self._roles.num_servers, get_logger().warning)
        load = ServerLoad(tell=watch if speaks else None)
        storage = self._storage(self._shard)

        def progress() -> None:
            self._progress()
            storage.poll()

        server = ParameterServer(
            self._shard,
            self._mailbox,
            sync=self._settings.sync,
            dense_sync=self._settings.dense_sync,
            staleness=self._settings.staleness,
            skip_nonfinite=self._settings.skip_nonfinite,
            handlers={
                Kind.SAVE: lambda message: storage.answer_save(*split_request(message)),
                Kind.LOAD: lambda message: storage.answer_load(*split_request(message)),
            },
            progress=progress,
            report_s=self._settings.patience.report_s,
            stamp=self._home.stamp,
            load=load,
        )
        server.run()
        storage.settle()  # what a worker began to save and did not ask for again
        report = load.report()
        get_logger().info("%s", report.text())
        if speaks:
            said = [f"{lane.name} {lag.text()}" for lane, lag in server.lags.items()]
            get_logger().info("updates between a read and its push: %s", "; ".join(said))
            if sentence := advice(report, self._roles.num_servers):
                get_logger().info("%s", sentence)
        return Served(report, server.lags)

    def free(self) -> None:
        """Give all windows back. Collective."""
        self._shard = None
        self.client = None
        self._home.free()
        self._mailbox_window.free()
