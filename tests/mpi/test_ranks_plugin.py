"""The MPI suite itself: every rank sees the same world, and outcomes reach every rank."""

import pytest

from tests import ranks


def test_every_rank_sees_the_same_world(comm):
    numbers = comm.allgather((comm.rank, comm.size))
    assert numbers == [(rank, ranks.WORLD.size) for rank in range(ranks.WORLD.size)]


def test_the_shared_folder_is_one_folder(comm, shared_tmp_path):
    (shared_tmp_path / str(comm.rank)).touch()
    comm.Barrier()
    names = sorted(path.name for path in shared_tmp_path.iterdir())
    assert names == sorted(str(rank) for rank in range(comm.size))


def test_outcomes_come_in_rank_order(comm):
    assert ranks.Outcomes().exchange(comm.rank, limit_s=30) == list(range(comm.size))


@pytest.mark.ranks(2)
def test_a_missing_rank_is_noticed(comm):
    outcomes = ranks.Outcomes()
    if comm.rank == 0:
        assert outcomes.exchange(ranks.PASSED, limit_s=0.2) is None
    comm.Barrier()
    if comm.rank == 1:
        # The late rank completes the exchange that rank 0 gave up waiting for.
        assert outcomes.exchange(ranks.PASSED, limit_s=30) is not None


@pytest.mark.ranks(3, 4)
def test_the_ranks_marker_keeps_other_sizes_out(comm):
    assert comm.size in (3, 4)
