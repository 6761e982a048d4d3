"""Roles and their communicators at every world size."""

import numpy as np
import pytest

from mpifleet.errors import ConfigError
from mpifleet.roles import Role, Roles
from tests.mpi.outcomes import raised, together
from tests.ranks import MPI, WORLD

COUNTS = range(1, WORLD.size) if WORLD.size > 1 else [0]


@pytest.mark.parametrize("num_servers", COUNTS)
def test_ranks_of_a_role_have_a_communicator(comm, num_servers):
    roles = Roles.assign(MPI, comm, num_servers=num_servers)
    num_workers = comm.size - num_servers
    is_server = comm.rank >= num_workers  # one node: servers are its last ranks
    leads = roles.leaders != MPI.COMM_NULL
    assert together(
        comm,
        roles.role is (Role.SERVER if is_server else Role.WORKER),
        (roles.num_workers, roles.num_servers) == (num_workers, num_servers),
        roles.worker_ranks == tuple(range(num_workers)),
        roles.server_ranks == tuple(range(num_workers, comm.size)),
        roles.group.size == (num_servers if is_server else num_workers),
        roles.index == (comm.rank - num_workers if is_server else comm.rank),
        roles.world.size == roles.node.size == comm.size,
        roles.world.rank == comm.rank,
        roles.one_node,
        roles.nodes == (0,) * comm.size,
        leads == (roles.index == 0),
        not leads or roles.leaders.size == 1,
        [roles.node_rank(rank) for rank in range(comm.size)] == list(range(comm.size)),
        roles.name_of(0) == "worker 0",
        not num_servers or roles.name_of(comm.size - 1) == f"server {num_servers - 1}",
    )


def test_one_server_per_node_by_default(comm):
    roles = Roles.assign(MPI, comm)
    assert together(comm, roles.num_servers == min(1, comm.size - 1), roles.one_node)


def test_library_traffic_does_not_meet_the_users(comm):
    """A receive of anything from anyone on the user's communicator sees the user's message only."""
    roles = Roles.assign(MPI, comm, num_servers=COUNTS[-1])
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    got = np.zeros(1, np.int64)
    anything = comm.Irecv(got, MPI.ANY_SOURCE, MPI.ANY_TAG)
    for ours in (roles.world, roles.node):
        sent = ours.Isend(np.array([1000 + comm.rank]), right, 5)
        mine = np.zeros(1, np.int64)
        ours.Recv(mine, left, 5)
        sent.Wait()
    too_early = anything.Test()
    comm.Barrier()
    comm.Send(np.array([comm.rank]), right, 5)
    anything.Wait()
    compared = [MPI.Comm.Compare(comm, ours) for ours in (roles.world, roles.node)]
    assert together(
        comm, not too_early, got[0] == left, mine[0] == 1000 + left, MPI.IDENT not in compared
    )


@pytest.mark.ranks(2, 3, 4)
def test_each_rank_may_bring_its_role(comm):
    label = "Server" if comm.rank % 2 == 0 else "worker"
    roles = Roles.assign(MPI, comm, label=label)
    evens, odds = tuple(range(0, comm.size, 2)), tuple(range(1, comm.size, 2))
    assert together(
        comm,
        roles.server_ranks == evens,
        roles.worker_ranks == odds,
        roles.index == comm.rank // 2,
        roles.group.size == len(odds if comm.rank % 2 else evens),
        roles.name_of(comm.rank) == f"{label.lower()} {comm.rank // 2}",
    )


def test_symmetric_roles(comm):
    """All ranks are on one node here: right at two ranks, an error at any other number."""
    if comm.size == 2:
        roles = Roles.assign(MPI, comm, symmetric=True)
        assert together(comm, (roles.server_ranks, roles.worker_ranks) == ((0,), (1,)))
    else:
        message = raised(ConfigError, Roles.assign, MPI, comm, symmetric=True)
        expected = f"2 ranks on every node; node 0 has {comm.size} of {comm.size}"
        assert together(comm, expected in message)


@pytest.mark.parametrize("num_servers", [-1, WORLD.size, WORLD.size + 5])
def test_impossible_counts_are_errors_on_every_rank(comm, num_servers):
    message = raised(ConfigError, Roles.assign, MPI, comm, num_servers=num_servers)
    hint = f"use 1..{comm.size - 1}" if comm.size > 1 else "start at least 2 ranks"
    expected = f"{num_servers} servers among {comm.size} ranks leave no room; {hint}"
    assert together(comm, message == expected)


@pytest.mark.parametrize("label", ["sever", None])
def test_a_label_that_one_rank_has_wrong_is_an_error_on_every_rank(comm, label):
    last = comm.size - 1
    mine = label if comm.rank == last else "worker"
    if label is None and comm.size == 1:
        pytest.skip("no other rank has a label")
    message = raised(ConfigError, Roles.assign, MPI, comm, label=mine)
    expected = f"rank {last}: unknown role {label or ''!r}; use 'server', 'worker'"
    assert together(comm, message == expected)


@pytest.mark.parametrize("label", ["server", "worker"])
def test_a_missing_role_is_an_error_on_every_rank(comm, label):
    missing = "worker" if label == "server" else "server"
    message = raised(ConfigError, Roles.assign, MPI, comm, label=label)
    if comm.size == 1 and label == "worker":
        assert message == ""  # holds its tables itself
    else:
        assert together(comm, message == f"none of the {comm.size} ranks is a {missing}")


@pytest.mark.ranks(3, 4)
def test_ranks_that_ask_for_different_numbers_of_servers_are_told(comm):
    asked = 2 if comm.rank == 1 else 1
    text = raised(ConfigError, lambda: Roles.assign(MPI, comm, num_servers=asked))
    assert together(comm, "rank 0 has [1, False], rank 1 has [2, False]" in text)
