"""When a job is told to take more servers, fewer, or nothing."""

from dataclasses import replace

import pytest

from mpifleet.ps.server_advice import (
    BOTTLENECK_LANES,
    BOTTLENECK_SHARE,
    IDLE_SHARE,
    SHORT_S,
    BottleneckWatch,
    advice,
    is_bottleneck,
)
from mpifleet.ps.server_load import ServerReport


def report(busy_share, lanes, elapsed_s=100.0):
    return ServerReport(
        elapsed_s=elapsed_s,
        rows_s=busy_share * elapsed_s,
        turns=1000,
        full_lanes=round(1000 * lanes),
    )


BUSY, KEEPS_UP, IDLE = report(0.95, 2.5), report(0.95, 1.0), report(0.03, 1.0)


def test_more_servers_where_workers_wait():
    assert advice(BUSY, 2) == (
        "servers are the bottleneck (busy 95 %, 2.5 lanes full per look): use --server_num 3 "
        "where a core is free for it, or a larger batch, which pushes fewer rows and dense "
        "gradients per sample"
    )


@pytest.mark.parametrize(("now", "fewer"), [(2, 1), (3, 1), (8, 4)])
def test_fewer_servers_where_they_are_idle(now, fewer):
    assert advice(IDLE, now) == (
        f"servers are idle (busy 3 %): --server_num {fewer} instead of {now} "
        "would leave more cores to workers"
    )


@pytest.mark.parametrize(
    ("case", "num_servers"),
    [
        (KEEPS_UP, 1),
        (report(0.5, 4.0), 1),
        (IDLE, 1),
        (report(IDLE_SHARE, 1.0), 8),
        (replace(BUSY, elapsed_s=SHORT_S / 2), 1),
        (ServerReport(), 4),
    ],
    ids=["keeps up", "half busy", "one idle server", "not quite idle", "short", "nothing"],
)
def test_nothing_is_said_where_nothing_is_to_be_gained(case, num_servers):
    assert advice(case, num_servers) is None


def test_the_bounds_of_a_bottleneck():
    assert is_bottleneck(report(BOTTLENECK_SHARE, BOTTLENECK_LANES))
    assert not is_bottleneck(report(BOTTLENECK_SHARE - 0.01, 9.0))
    assert not is_bottleneck(report(1.0, BOTTLENECK_LANES - 0.01))


def test_a_running_job_is_told_once_and_not_that_it_is_idle():
    said = []
    watch = BottleneckWatch(2, said.append)
    for minute in (IDLE, KEEPS_UP, BUSY, BUSY):
        watch(minute)
    assert said == [advice(BUSY, 2)]
