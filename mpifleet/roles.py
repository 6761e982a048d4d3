"""Which rank is a server and which a worker, and the communicators that follow."""

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from mpifleet.errors import ConfigError
from mpifleet.mpi import bcast_json, gather_json


class Role(enum.Enum):
    """What a rank does in a parameter-server job."""

    SERVER = "server"
    WORKER = "worker"


def default_num_servers(nodes: Sequence[int]) -> int:
    """One server per node, at most half of the ranks, at least one.

    nodes: the node of every rank.  A single rank is a worker that holds its own tables: 0.
    """
    if len(nodes) == 1:
        return 0
    return max(1, min(len(set(nodes)), len(nodes) // 2))


def place(nodes: Sequence[int], num_servers: int) -> list[Role]:
    """Role of every rank when `num_servers` servers are spread evenly over the nodes.

    nodes: the node of every rank.  Servers take the last ranks of each node, so that rank 0, whose
    output a terminal shows, is a worker wherever its node has one.
    Raises ConfigError when no worker or no server would be left.
    """
    size = len(nodes)
    if size == 1 and num_servers == 0:
        return [Role.WORKER]
    if not 1 <= num_servers <= size - 1:
        hint = f"use 1..{size - 1}" if size > 1 else "start at least 2 ranks"
        raise ConfigError(f"{num_servers} servers among {size} ranks leave no room; {hint}")
    free = Counter(nodes)
    quota: Counter[int] = Counter()
    turn = sorted(free)
    while sum(quota.values()) < num_servers:
        # A node keeps a worker as long as another node can take the server, rank 0's the longest.
        spare = [n for n in turn if quota[n] < free[n] - 1]
        spare = spare or [n for n in reversed(turn) if quota[n] < free[n]]
        quota[min(spare, key=lambda node: quota[node])] += 1
    roles = [Role.WORKER] * size
    for rank in range(size - 1, -1, -1):
        if quota[nodes[rank]]:
            quota[nodes[rank]] -= 1
            roles[rank] = Role.SERVER
    return roles


def place_symmetric(nodes: Sequence[int]) -> list[Role]:
    """Fleet's MPI heritage: two processes per node, even rank = server, odd rank = worker.

    Raises ConfigError when a node holds another number of ranks.
    """
    for node, count in sorted(Counter(nodes).items()):
        if count != 2:
            raise ConfigError(
                f"symmetric roles need 2 ranks on every node; node {node} has {count} "
                f"of {len(nodes)} (mpirun -npernode 2, srun --ntasks-per-node=2)"
            )
    return [Role.WORKER if rank % 2 else Role.SERVER for rank in range(len(nodes))]


def from_labels(labels: Sequence[str]) -> list[Role]:
    """Role of every rank from what each rank brought itself, "server" or "worker".

    Raises ConfigError naming an unknown label and its rank, or a missing role.
    """
    roles = []
    for rank, label in enumerate(labels):
        try:
            roles.append(Role(label.lower()))
        except ValueError:
            valid = ", ".join(repr(role.value) for role in Role)
            raise ConfigError(f"rank {rank}: unknown role {label!r}; use {valid}") from None
    for role in Role if len(roles) > 1 else (Role.WORKER,):
        if role not in roles:
            raise ConfigError(f"none of the {len(roles)} ranks is a {role.value}")
    return roles


def decide(nodes: Sequence[int], asked: Sequence[Sequence[Any]]) -> list[Role]:
    """Role of every rank from what each asked for: [own label, number of servers, symmetric].

    nodes: the node of every rank.  Raises ConfigError where ranks ask for different layouts or for
    one that cannot be.
    """
    layout = list(asked[0][1:])
    for rank, (_, *theirs) in enumerate(asked):
        if theirs != layout:
            raise ConfigError(
                f"ranks disagree on [number of servers, symmetric]: rank 0 has {layout}, "
                f"rank {rank} has {theirs}"
            )
    num_servers, symmetric = layout
    labels = [label for label, *_ in asked]
    if any(labels):
        return from_labels([label or "" for label in labels])
    if symmetric:
        return place_symmetric(nodes)
    return place(nodes, default_num_servers(nodes) if num_servers is None else num_servers)


def check_single(servers: int | None, workers: int | None, role: str | None) -> None:
    """Raise ConfigError for what a single process cannot be; None where nothing was asked for."""
    if servers or workers not in (None, 1) or role not in (None, "worker"):
        raise ConfigError(
            f"server_num={servers}, worker_num={workers}, role={role!r} in a single process, which "
            "is worker 0 of 1; start more ranks by mpifleet run, mpirun or srun"
        )


@dataclass(frozen=True)
class Roles:
    """Every rank's role, decided once from the world communicator. Building one is collective.

    world: a duplicate of the given communicator, so that library traffic never meets the user's;
    group: the ranks of this rank's role; node: the ranks that share this rank's memory;
    leaders: the first rank of each node within `group`, COMM_NULL on the others;
    nodes: the node of every rank, numbered by its lowest rank;
    server_ranks, worker_ranks: world ranks in server and worker order.
    """

    role: Role
    world: Any
    group: Any
    node: Any
    leaders: Any
    nodes: tuple[int, ...]
    server_ranks: tuple[int, ...]
    worker_ranks: tuple[int, ...]

    @classmethod
    def assign(
        cls,
        mpi: ModuleType,
        comm: Any,
        *,
        num_servers: int | None = None,
        label: str | None = None,
        symmetric: bool = False,
    ) -> "Roles":
        """Decide the roles of all ranks of `comm`. Collective.

        num_servers: None for one per node.  label: this rank's own role, on every rank or on none.
        symmetric: even rank = server, odd rank = worker.  Raises ConfigError on every rank.
        """
        world = comm.Dup()
        node = world.Split_type(mpi.COMM_TYPE_SHARED)
        nodes = tuple(gather_json(world, bcast_json(node, world.rank)))
        roles = decide(nodes, gather_json(world, [label, num_servers, symmetric]))
        role = roles[world.rank]
        group = world.Split(list(Role).index(role))
        is_leader = group.Split(nodes[world.rank]).rank == 0
        return cls(
            role=role,
            world=world,
            group=group,
            node=node,
            leaders=group.Split(0 if is_leader else mpi.UNDEFINED),
            nodes=nodes,
            server_ranks=tuple(r for r, is_ in enumerate(roles) if is_ is Role.SERVER),
            worker_ranks=tuple(r for r, is_ in enumerate(roles) if is_ is Role.WORKER),
        )

    @property
    def index(self) -> int:
        """This rank's number within its role."""
        return int(self.group.rank)

    @property
    def num_servers(self) -> int:
        """Number of server ranks."""
        return len(self.server_ranks)

    @property
    def num_workers(self) -> int:
        """Number of worker ranks."""
        return len(self.worker_ranks)

    @property
    def one_node(self) -> bool:
        """Whether all ranks share one node's memory."""
        return len(set(self.nodes)) == 1

    def check_counts(self, servers: int | None, workers: int | None) -> None:
        """Raise ConfigError for counts asked for, where not None, that the roles do not have."""
        for what, asked, there in (
            ("servers", servers, self.num_servers),
            ("workers", workers, self.num_workers),
        ):
            if asked is not None and asked != there:
                raise ConfigError(
                    f"{asked} {what} were asked for; {self.world.size} ranks started are "
                    f"{self.num_servers} servers and {self.num_workers} workers"
                )

    def name_of(self, rank: int) -> str:
        """Role and number of a world rank, for instance "server 0"."""
        if rank in self.server_ranks:
            return f"server {self.server_ranks.index(rank)}"
        return f"worker {self.worker_ranks.index(rank)}"

    def endpoints(self, kind: str) -> list[str]:
        """Where the "worker" or "server" ranks are, as "node0/1": node and rank."""
        ranks = self.worker_ranks if kind == "worker" else self.server_ranks
        return [f"node{self.nodes[rank]}/{rank}" for rank in ranks]

    def node_rank(self, rank: int) -> int | None:
        """Rank within this rank's node communicator of a world rank; None on another node."""
        if self.nodes[rank] != self.nodes[self.world.rank]:
            return None
        return sum(1 for r in range(rank) if self.nodes[r] == self.nodes[rank])
