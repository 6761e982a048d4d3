"""Ranks that are about to run different jobs, or one that does not fit, all say so."""

import contextlib

import pytest

from mpifleet.errors import CheckpointError, ConfigError
from mpifleet.ps.agreement import (
    check_shared_memory,
    compare,
    first_failure,
    raise_first_failure,
)
from mpifleet.roles import Roles
from tests.mpi.outcomes import raised, together
from tests.ranks import MPI, WORLD

FACTS = {"version": "1.0", "MPI library": "Open MPI 4.1.4", "table 'emb'": "[1, 2]"}


def test_equal_facts_pass(comm):
    roles = Roles.assign(MPI, comm)
    assert together(comm, raised(ConfigError, compare, roles, dict(FACTS)) == "")


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("odd_rank", range(1, WORLD.size))
@pytest.mark.parametrize("name", FACTS)
def test_the_first_difference_is_named_on_every_rank(comm, name, odd_rank):
    roles = Roles.assign(MPI, comm)
    facts = {**FACTS, name: "other"} if comm.rank == odd_rank else FACTS
    message = raised(ConfigError, compare, roles, facts)
    expected = (
        f"ranks disagree on {name}: rank 0 (worker 0) has {FACTS[name]}, "
        f"rank {odd_rank} ({roles.name_of(odd_rank)}) has other"
    )
    assert together(comm, message == expected), message


@pytest.mark.ranks(2, 3, 4)
def test_of_several_differences_the_first_is_named(comm):
    roles = Roles.assign(MPI, comm)
    facts = dict(FACTS) if comm.rank == 0 else dict.fromkeys(FACTS, "other")
    message = raised(ConfigError, compare, roles, facts)
    assert together(comm, message.startswith("ranks disagree on version: "), "rank 1 " in message)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("has_it", [0, 1])
def test_a_fact_that_some_ranks_lack(comm, has_it):
    roles = Roles.assign(MPI, comm)
    facts = {**FACTS, "table 'tags'": "here"} if comm.rank == has_it else FACTS
    message = raised(ConfigError, compare, roles, facts)
    left, right = ("here", "absent") if has_it == 0 else ("absent", "here")
    assert together(
        comm, f"on table 'tags': rank 0 (worker 0) has {left}, rank 1 " in message, right in message
    )


def test_windows_that_fit_pass(comm):
    roles = Roles.assign(MPI, comm)
    assert together(comm, raised(ConfigError, check_shared_memory, roles, 4096) == "")


@pytest.mark.parametrize("greedy", range(WORLD.size))
def test_too_little_shared_memory_is_an_error_on_every_rank(comm, greedy):
    roles = Roles.assign(MPI, comm)
    num_bytes = 10**6 * 2**20 if comm.rank == greedy else 0
    message = raised(ConfigError, check_shared_memory, roles, num_bytes)
    assert together(
        comm,
        message.startswith(
            "the windows of the node of rank 0 (worker 0) need 1,048,576,000,000 bytes "
        ),
        "of shared memory, /dev/shm has " in message,
        " bytes free: use more nodes or servers" in message,
    ), message


def test_the_shares_of_a_node_are_added_up(comm, monkeypatch):
    monkeypatch.setattr("mpifleet.ps.agreement._free_bytes", lambda _: 100 << 20)
    roles = Roles.assign(MPI, comm)
    share = (100 << 20) // comm.size
    fits = raised(ConfigError, check_shared_memory, roles, share)
    message = raised(ConfigError, check_shared_memory, roles, share + 1)
    needed = f" need {(share + 1) * comm.size:,} bytes of shared memory, "
    free = "/dev/shm has 104,857,600 bytes free"
    assert together(comm, fits == "", needed + free in message), message


def test_a_machine_without_shared_memory_files_is_not_asked(comm):
    roles = Roles.assign(MPI, comm)
    message = raised(ConfigError, check_shared_memory, roles, 2**60, "/no such directory")
    assert together(comm, message == "")


def test_the_first_failure_reaches_every_rank(comm):
    mine = f"rank {comm.rank} failed" if comm.rank >= comm.size // 2 else ""
    assert together(
        comm,
        first_failure(comm, mine) == f"rank {comm.size // 2} failed",
        first_failure(comm, "") == "",
        first_failure(None, "alone") == "alone",
    )


def test_the_first_failure_is_raised_on_every_rank_after_the_meeting(comm):
    events = []

    @contextlib.contextmanager
    def meeting():
        events.append("begun")
        yield
        events.append("ended")

    mine = f"rank {comm.rank} failed" if comm.rank >= comm.size // 2 else ""
    message = raised(CheckpointError, raise_first_failure, comm, mine, meeting())
    raise_first_failure(comm, "")  # nobody failed: nothing is raised
    alone = raised(CheckpointError, raise_first_failure, None, "alone")
    assert together(
        comm,
        message == f"rank {comm.size // 2} failed",
        events == ["begun", "ended"],
        alone == "alone",
    )
