"""All benchmarks in one run: rows of the table, and what is said to be wrong."""

import sys
from pathlib import Path

import pytest

from benchmarks import all as every
from benchmarks import ps_served
from benchmarks.launch import run_command
from benchmarks.report import Comparison, Figure, Goal, compare, print_figures

TIMES = {"ours": [3e-6], "peer": [1e-6]}
GOAL = Goal(2.0, at_most=True)
FIGURES = [compare(TIMES, Comparison("ours", "peer", GOAL)), Figure("plain", 41170.0, "us")]


def lines_of(figures, capsys):
    print_figures(figures)
    return capsys.readouterr().out.splitlines()


def test_rows_of_the_table(capsys):
    rows = every.table_rows({"ps_rows": lines_of(FIGURES, capsys), "ps_served": ["not measured"]})
    assert rows[:2] == ["", "`ps_rows`"]
    assert rows[-2:] == [
        "| ours | 3 us | peer | 3.0 | <= 2 | no |",
        "| plain | 41,170 us |  |  |  |  |",
    ]
    assert {row.count("|") for row in rows[3:]} == {7}
    assert "`ps_served`" not in rows


def test_a_missed_goal_and_a_failure_are_named(monkeypatch, capsys):
    ended = {
        "ps_rows": (1, lines_of(FIGURES, capsys)),
        "ps_idle": (143, []),
        "ps_memory": (0, lines_of(FIGURES[1:], capsys)),
        "ps_lanes": (0, []),
        "ps_gaps": (0, []),
        "ps_served": (0, []),
        "checkpoint": (0, []),
        "ctr": (0, []),
        "ctr_nodes": (0, []),
        "ctr_auc": (0, []),
        "ctr_cost": (0, []),
    }
    commands = []

    def run(command, limit_s):
        commands.append(command)
        return ended[command[2].removeprefix("benchmarks.")]

    monkeypatch.setattr(every, "run_command", run)
    assert every.main(["--quick", "--markdown"]) == 1
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        "benchmarks: ps_rows missed ours",
        "benchmarks: ps_idle ended with status 143",
    ]
    assert out.count("| plain |") == 2
    assert [command[3:] for command in commands] == [["--quick"]] * 11


def test_every_benchmark_is_run():
    modules = Path(every.__file__).parent.glob("*.py")
    found = {path.stem for path in modules if "--quick" in path.read_text()}
    assert found - {"all", "program"} == set(every.BENCHMARKS)


def test_without_slurm_one_line_says_so(monkeypatch, capsys):
    monkeypatch.setattr(ps_served, "is_launched", lambda: False)
    monkeypatch.setattr(ps_served, "why_not", lambda: "srun not found")
    assert ps_served.main([]) == 0
    assert tuple(capsys.readouterr()) == ("", "ps_served: not measured: srun not found\n")


@pytest.mark.timeout(60)
def test_a_command_past_its_limit_is_ended():
    code = "import time; print('begun', flush=True); time.sleep(60)"
    status, lines = run_command([sys.executable, "-c", code], limit_s=3.0)
    assert (status, lines) == (-15, ["begun\n"])
