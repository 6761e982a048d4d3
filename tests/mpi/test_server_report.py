"""What servers say of their work at the end: every push and row once, in both modes."""

import numpy as np
import pytest

from tests.mpi.jobs import TINY_BYTES, Place, at_places, attempt
from tests.mpi.test_conservation import STEPS, build, draws, train


def reports_of(comm, place, **options):
    """What each server returned, in order; fails where any rank did."""
    outcomes = attempt(comm, place, build, train, **options)
    assert not [outcome.trace for outcome in outcomes if outcome.error]
    return [outcome.value.report for outcome in outcomes if outcome.name.startswith("server")]


def rows_pushed(place):
    """Distinct keys of every worker in every step, all servers together."""
    steps = ((worker, step) for worker in range(place.workers) for step in range(STEPS))
    return sum(np.unique(draws(*step)[0]).size for step in steps)


@pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
@at_places()
def test_every_push_and_row_is_counted_once(comm, place, sync):
    reports = reports_of(comm, place, sync=sync)
    assert len(reports) == place.servers
    for report in reports:
        assert report.dense_pushes == report.row_pushes == place.workers * STEPS
        assert 0 < report.busy_share <= 1
        assert 0 < report.rows_cpu_s < report.cpu_s
        assert 1 <= report.lanes_per_turn <= 3 * place.workers
    assert sum(report.rows for report in reports) == (rows_pushed(place) if reports else 0)


@pytest.mark.ranks(2)
def test_messages_in_pieces_count_once(comm):
    place = Place(1, 1, mailbox_bytes=TINY_BYTES)
    (report,) = reports_of(comm, place, sync=False)
    assert (report.dense_pushes, report.row_pushes) == (STEPS, STEPS)
    assert report.rows == rows_pushed(place)
