"""fleet.util: what goes in as a number, list or array comes out as one, added up exactly."""

import time

import numpy as np
import pytest

from mpifleet.errors import ConfigError
from mpifleet.roles import Role, Roles
from mpifleet.util import Util
from tests.mpi.outcomes import raised, together
from tests.ranks import MPI

WORLDS = ["worker", "server", "all"]


def same(got, expected):
    """Equal in type, dtype, shape and value."""
    if isinstance(expected, np.ndarray):
        return (
            isinstance(got, np.ndarray)
            and (got.dtype, got.shape) == (expected.dtype, expected.shape)
            and bool((got == expected).all())
        )
    return type(got) is type(expected) and got == expected


@pytest.fixture
def roles(comm):
    return Roles.assign(MPI, comm)


@pytest.fixture
def util(roles):
    return Util(MPI, roles)


def rank_and_size(roles, world):
    """This rank's place among the ranks of `world`; None on ranks that are none of them."""
    if world == "all":
        return roles.world.rank, roles.world.size
    if roles.role.value == world:
        return roles.index, roles.group.size
    return None


@pytest.mark.parametrize("world", WORLDS)
def test_all_reduce_gives_back_what_it_got(comm, roles, util, world):
    place = rank_and_size(roles, world)
    facts = []
    if place:
        rank, size = place
        total = size * (size - 1) // 2  # the sum of all ranks
        cases = [
            (rank, total),
            (rank + 0.5, total + 0.5 * size),
            ([rank, 1], [total, size]),
            ((rank, 1), [total, size]),
            ([[rank], [2]], [[total], [2 * size]]),
            ([], []),
            (True, size),
            (np.array([rank, 1]), np.array([total, size])),
            (np.arange(6).reshape(2, 3) + rank, np.arange(6).reshape(2, 3) * size + total),
            (np.float64(rank), float(total)),
            (np.array(rank), np.array(total)),
            (np.full(3, rank, np.float32), np.full(3, total, np.float32)),
            (np.empty((0, 4)), np.empty((0, 4))),
            (np.array([rank], np.uint64), np.array([total], np.uint64)),
        ]
        facts = [same(util.all_reduce(given, comm_world=world), wanted) for given, wanted in cases]
    assert together(comm, *facts), facts


def test_all_reduce_takes_any_memory_order_and_keeps_its_input(comm, util):
    given = np.arange(12.0).reshape(3, 4).T[::2]
    kept = given.copy()
    got = util.all_reduce(given, comm_world="all")
    assert together(comm, same(got, kept * comm.size), (given == kept).all())


def test_integers_stay_exact(comm, util):
    rank, size = comm.rank, comm.size
    total = size * (size - 1) // 2
    big, bigger = 2**60 + 1, 2**62 + 2**8
    facts = [
        same(util.all_reduce(big + rank, comm_world="all"), size * big + total),
        same(util.all_reduce([-big], comm_world="all"), [-size * big]),
        same(
            util.all_reduce(np.array([bigger + 1], np.uint64), "max", "all"),
            np.array([bigger + 1], np.uint64),
        ),
    ]
    assert together(comm, *facts), facts


def test_narrow_integers_do_not_overflow(comm, util):
    got = util.all_reduce(np.array([100, -100], np.int8), comm_world="all")
    unsigned = util.all_reduce(np.array([2**32 - 1], np.uint32), comm_world="all")
    assert together(
        comm,
        same(got, np.array([100, -100]) * comm.size),
        same(unsigned, np.array([(2**32 - 1) * comm.size], np.uint64)),
    )


def test_min_and_max(comm, util):
    given = [-comm.rank, 5]
    lowest, highest = util.all_reduce(given, "min", "all"), util.all_reduce(given, "max", "all")
    assert together(comm, lowest == [1 - comm.size, 5], highest == [0, 5])


@pytest.mark.ranks(2, 3, 4)
def test_a_rank_may_bring_another_kind_of_number(comm, util):
    """A worker without batches has counted 0, the others 0.5: the sum is right on all."""
    mine = 0 if comm.rank == 0 else 0.5
    got = util.all_reduce(mine, comm_world="all")
    mixed = util.all_reduce(np.full(2, 1, np.float32 if comm.rank else np.float64), "sum", "all")
    assert together(
        comm, same(got, 0.5 * (comm.size - 1)), same(mixed, np.full(2, comm.size, np.float64))
    )


@pytest.mark.ranks(2, 3, 4)
def test_signed_and_unsigned_integers_together_are_an_error_on_every_rank(comm, util):
    """No dtype holds both, and float64 would round: 2**63 + 1 and -1 are both whole numbers."""
    mine = np.array([2**63 + 1], np.uint64) if comm.rank == 0 else np.array([-1], np.int16)
    message = raised(ConfigError, util.all_reduce, mine, "sum", "all")
    others = ", ".join(str(rank) for rank in range(1, comm.size))
    expected = (
        f"all_reduce of int64 on rank(s) {others} and of uint64 on rank(s) 0; "
        "use one of them on all ranks"
    )
    assert together(comm, message == expected), message


@pytest.mark.ranks(2, 3, 4)
def test_different_shapes_are_an_error_on_every_rank(comm, util):
    mine = [1] * (3 if comm.rank == comm.size - 1 else 2)
    message = raised(ConfigError, util.all_reduce, mine, "sum", "all")
    expected = f"all_reduce of shape (2,) on rank 0 and (3,) on rank {comm.size - 1}"
    assert together(comm, message == expected), message


def test_what_cannot_be_added_up(comm, util):
    messages = [
        raised(ConfigError, util.all_reduce, "text", "sum", "all"),
        raised(ConfigError, util.all_reduce, [None], "sum", "all"),
        raised(ConfigError, util.all_reduce, 1, "mean", "all"),
        raised(ConfigError, util.all_reduce, 1, "sum", "workers"),
        raised(ConfigError, util.all_reduce, np.zeros(1, np.float16), "sum", "all"),
    ]
    assert together(
        comm,
        messages[0].endswith("use numbers"),
        messages[1].endswith("use numbers"),
        messages[2] == "mode='mean'; use one of sum, min, max",
        messages[3] == "comm_world='workers'; use one of worker, server, all",
        messages[4] == "no MPI datatype for float16",
    ), messages


@pytest.mark.parametrize("world", WORLDS)
def test_all_gather_of_uneven_things(comm, roles, util, world):
    place = rank_and_size(roles, world)
    facts = []
    if place:
        rank, size = place
        for make in (
            lambda r: r,
            lambda r: [0.5] * r,
            lambda r: "ä" * r,
            lambda r: [[r], [2**60 + r]],
            lambda r: {"loss": r / 3, "last": None},
        ):
            got = util.all_gather(make(rank), comm_world=world)
            facts.append(got == [make(r) for r in range(size)])
    assert together(comm, *facts), facts


@pytest.mark.ranks(2, 3, 4)
def test_gathering_over_all_lists_workers_first(comm):
    label = "server" if comm.rank == 0 else "worker"
    util = Util(MPI, Roles.assign(MPI, comm, label=label))
    expected = [*range(1, comm.size), 0]
    assert together(comm, util.all_gather(comm.rank, "all") == expected)


@pytest.mark.ranks(2, 3, 4)
def test_a_collective_of_the_other_role_is_refused(comm, roles, util):
    other = "server" if roles.role is Role.WORKER else "worker"
    expected = f"comm_world={other!r} on a {roles.role.value}"
    calls = [
        lambda: util.all_reduce(1, comm_world=other),
        lambda: util.all_gather(1, comm_world=other),
        lambda: util.barrier(other),
    ]
    assert together(comm, *(raised(ConfigError, call) == expected for call in calls))


@pytest.mark.ranks(2, 3, 4)
def test_a_barrier_waits_for_the_last(comm, util):
    if comm.rank == comm.size - 1:
        time.sleep(0.2)
    arrived_s, used_s = time.monotonic(), time.process_time()
    util.barrier("all")
    waited_s, used_s = time.monotonic() - arrived_s, time.process_time() - used_s
    waited_long = comm.allgather(waited_s > 0.1)
    assert together(comm, waited_long[0], used_s < 0.15)


def test_shares_of_files_cover_all(comm, roles, util):
    files = [f"part-{i}" for i in range(7)]
    if roles.role is Role.WORKER:
        shares = util.all_gather(util.get_file_shard(files))
        fact = [name for share in shares for name in share] == files
    else:
        fact = "for workers" in raised(ConfigError, util.get_file_shard, files)
    assert together(comm, fact)


def test_printing_on_one_worker(comm, roles, util, capsys):
    util.print_on_rank("hello", 0)
    expected = "hello\n" if roles.role is Role.WORKER and roles.index == 0 else ""
    assert together(comm, capsys.readouterr().out == expected)


def test_a_single_process_needs_no_mpi():
    alone = Util(None, None)
    assert same(alone.all_reduce([1, 2.5]), [1.0, 2.5])
    assert same(alone.all_reduce(np.array([3])), np.array([3]))
    assert alone.all_gather("x") == ["x"]
    assert alone.get_file_shard(["a", "b"]) == ["a", "b"]
    alone.barrier()
