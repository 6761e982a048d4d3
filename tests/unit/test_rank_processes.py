"""Which of the ranks among a launcher's children ends first."""

import os
import select
import subprocess
import sys
import time

import pytest

from mpifleet.cli.rank_processes import RankProcesses


@pytest.fixture
def ranks():
    """start(name, value): a sleeping child whose environment says which rank it is."""
    children = []

    def start(name, value):
        sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
        children.append(subprocess.Popen(sleeper, env={**os.environ, name: value}))
        return children[-1]

    yield start
    for child in children:
        child.kill()
        child.wait()


def seen(watched, count):
    """Look until `count` ranks are known."""
    end_s = time.monotonic() + 20
    while len(watched.descriptors) < count:
        assert time.monotonic() < end_s
        watched.look()


def test_the_first_rank_to_end_is_noted(ranks):
    ranks("OMPI_COMM_WORLD_RANK", "0")
    second = ranks("PMI_RANK", "1")
    other = ranks("SOMETHING_ELSE", "2")
    watched = RankProcesses(os.getpid(), 2)
    seen(watched, 2)
    other.kill()
    assert select.select(watched.descriptors, [], [], 0.2)[0] == []
    second.kill()
    watched.note(select.select(watched.descriptors, [], [], 20)[0])
    assert watched.first_gone == [1]
    assert watched.descriptors == []
    watched.close()


def test_ranks_that_come_late_are_found(ranks):
    watched = RankProcesses(os.getpid(), 1)
    watched.look()
    assert watched.descriptors == []
    ranks("OMPI_COMM_WORLD_RANK", "0")
    seen(watched, 1)
    watched.close()


def test_nobody_is_looked_for_where_none_is_expected(ranks):
    ranks("OMPI_COMM_WORLD_RANK", "0")
    time.sleep(0.1)
    watched = RankProcesses(os.getpid(), 0)
    watched.look()
    assert watched.descriptors == []
    watched.close()
