"""What a server counts about itself, on clocks that the test turns."""

import pytest

from mpifleet.ps.server_load import PERIOD_S, ServerLoad, ServerReport


class Clock:
    """Seconds that pass when told."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


class Counted:
    """A load on two clocks; `lasting` makes work of so many seconds."""

    def __init__(self, tell=None):
        self.wall, self.cpu = Clock(), Clock()
        self.load = ServerLoad(tell, self.wall, self.cpu)

    def pass_by(self, wall_s, cpu_s=0.0):
        self.wall.now_s += wall_s
        self.cpu.now_s += cpu_s

    def work(self, kind, wall_s, cpu_s=0.0, *, found=True, inside=lambda: None):
        def serve():
            self.pass_by(wall_s, cpu_s)
            inside()
            return found

        assert self.load.work(kind, serve) is found


def test_time_is_counted_by_kind_from_the_first_message_on():
    job = Counted()
    job.pass_by(50.0, 1.0)  # before anybody asked for anything
    job.work("dense", 1.0, 0.5)
    job.pass_by(4.0)
    job.work("rows", 2.0, 1.5)
    job.work("rows", 1.0, 0.5)
    report = job.load.report()
    assert (report.dense_s, report.rows_s, report.answers_s) == (1.0, 3.0, 0.0)
    assert (report.elapsed_s, report.cpu_s, report.rows_cpu_s) == (8.0, 2.5, 2.0)
    assert report.busy_share == 0.5


def test_a_look_that_finds_nothing_to_do_is_no_work():
    job = Counted()
    job.work("rows", 1.0)
    job.work("rows", 3.0, found=False)
    report = job.load.report()
    assert (report.rows_s, report.elapsed_s) == (1.0, 4.0)


def test_work_inside_other_work_is_counted_once():
    """A save among the answers applies first what was delivered before it."""
    job = Counted()

    def settle():
        job.work("rows", 2.0, 1.0)
        job.work("dense", 1.0)

    def save():
        job.work("files", 10.0, 3.0, inside=settle)

    job.work("answers", 0.5, 0.25, inside=save)
    job.work("answers", 0.25)
    report = job.load.report()
    assert (report.answers_s, report.files_s, report.rows_s, report.dense_s) == (0.75, 10, 2, 1)
    assert report.rows_cpu_s == 1.0
    assert report.busy_share == 1.0


def test_counts_and_the_depth_of_the_queue():
    load = Counted().load
    load.count(row_pushes=1, rows=300)
    load.count(row_pushes=1, rows=200, dense_pushes=1, answers=4)
    load.work("rows", lambda: True)
    for full in (1, 2, 3):
        load.turn(full)
    report = load.report()
    assert (report.row_pushes, report.dense_pushes, report.rows, report.answers) == (2, 1, 500, 4)
    assert (report.turns, report.lanes_per_turn) == (3, 2.0)


def test_each_period_with_work_is_told_once():
    told = []
    job = Counted(told.append)
    for _ in range(5):
        job.work("rows", PERIOD_S / 2)
        job.load.count(rows=10)
        job.load.turn(1)
    assert [report.rows for report in told] == [20, 20]
    assert [report.elapsed_s for report in told] == [PERIOD_S] * 2


def test_a_server_that_served_nothing():
    report = Counted().load.report()
    assert report == ServerReport()
    assert report.text() == "served nothing"
    stops_alone = ServerReport(elapsed_s=1e-3, rows_s=5e-4, turns=2, full_lanes=2)
    assert stops_alone.text() == "served nothing"
    assert (report.busy_share, report.rows_per_s, report.cpu_per_row_s) == (0, 0, 0)


REPORT = ServerReport(
    elapsed_s=100.0,
    dense_s=9.0,
    rows_s=28.0,
    answers_s=4.0,
    rows_cpu_s=23.4,
    dense_pushes=800,
    row_pushes=1_200,
    rows=26_000_000,
    answers=70,
    turns=10,
    full_lanes=13,
)


def test_the_line_of_a_report():
    assert REPORT.text() == (
        "served 2,000 pushes, 26,000,000 rows at 260,000 rows/s, 70 pulls; "
        "busy 41 % (dense 9 %, rows 28 %, answers 4 %), "
        "0.90 us CPU per row, 1.3 lanes full on average"
    )


def test_the_line_of_a_server_without_rows():
    report = ServerReport(elapsed_s=2.0, dense_s=1.0, dense_pushes=3, turns=1, full_lanes=1)
    assert report.text() == "served 3 pushes; busy 50 % (dense 50 %), 1.0 lanes full on average"


def test_what_came_after_an_earlier_report():
    more = REPORT.since(ServerReport(elapsed_s=40.0, rows=6_000_000))
    assert (more.elapsed_s, more.rows, more.dense_s) == (60.0, 20_000_000, 9.0)
    assert more.rows_per_s == pytest.approx(20e6 / 60)
