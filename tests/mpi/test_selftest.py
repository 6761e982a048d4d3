"""The trial of links, on links that are known to work: within a node."""

import pytest

from mpifleet.ps import selftest
from mpifleet.roles import Role, Roles
from tests.mpi.outcomes import together
from tests.ranks import MPI


def window_of(roles):
    return MPI.Win.Allocate(selftest._NUM_BYTES, 1, comm=roles.world)


@pytest.mark.ranks(2, 3, 4)
def test_good_links_pass_on_all_ranks(comm):
    roles = Roles.assign(MPI, comm, num_servers=1)
    target = roles.server_ranks[0] if roles.role is Role.WORKER else None
    assert together(comm, selftest.Trial(MPI, roles, window_of(roles), target).run())


@pytest.mark.ranks(3, 4)
def test_one_wrong_row_on_one_rank_fails_on_all(comm, monkeypatch):
    roles = Roles.assign(MPI, comm, num_servers=1)
    target = roles.server_ranks[0] if roles.role is Role.WORKER else None
    trial = selftest.Trial(MPI, roles, window_of(roles), target)
    if comm.rank == 1:
        monkeypatch.setattr(selftest, "_pattern", lambda _: -selftest.np.ones(256 * 16, "f4"))
    assert together(comm, not trial.run())


@pytest.mark.ranks(3, 4)
def test_a_lost_addition_fails_on_all(comm, monkeypatch):
    roles = Roles.assign(MPI, comm, num_servers=1)
    target = roles.server_ranks[0] if roles.role is Role.WORKER else None
    if comm.rank == 0:
        monkeypatch.setattr(selftest, "_ADDS", selftest._ADDS - 1)
    assert together(comm, not selftest.Trial(MPI, roles, window_of(roles), target).run())
