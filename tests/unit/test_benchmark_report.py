"""Figures of benchmarks: what a ratio is, when a goal is met, and what is printed."""

import io
import json

import pytest

from benchmarks.report import (
    Comparison,
    Goal,
    compare,
    interleave,
    missed,
    plain,
    print_figures,
    ratio_of,
)

TIMES = {"ours": [2e-6, 3e-6, 80e-6], "peer": [1e-6, 2e-6, 40e-6]}


def test_the_ratio_is_taken_within_each_round():
    assert ratio_of(TIMES["ours"], TIMES["peer"]) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("goal", "met"),
    [(Goal(2.0, at_most=True), True), (Goal(1.9, at_most=True), False), (None, None)],
)
def test_a_figure_says_whether_its_goal_is_met(goal, met):
    figure = compare(TIMES, Comparison("ours", "peer", goal))
    assert (figure.value, figure.unit, figure.against, figure.met) == (3.0, "us", "peer", met)


def test_a_speed_up_is_the_inverted_ratio():
    figure = compare(TIMES, Comparison("peer", "ours", Goal(2.0, at_most=False), speedup=True))
    assert (figure.name, figure.ratio, figure.goal, figure.met) == (
        "peer speed-up",
        2,
        ">= 2",
        True,
    )


def test_printed_lines_tell_the_missed_goals():
    figures = [
        plain("peer", TIMES["peer"]),
        compare(TIMES, Comparison("ours", "peer", Goal(1.0, at_most=True))),
    ]
    stream = io.StringIO()
    print_figures(figures, stream)
    lines = stream.getvalue().splitlines()
    names = ["name", "value", "unit", "against", "ratio", "goal", "met"]
    assert list(json.loads(lines[0])) == names
    assert missed(["a word of the job", *lines]) == ["ours"]


def test_roads_take_turns_and_the_first_round_is_not_counted():
    calls = []
    roads = {
        "a": lambda call: calls.append(("a", call)),
        "b": lambda call: calls.append(("b", call)),
    }
    times = interleave(roads, rounds=2, calls={"a": 2})
    assert [name for name, _ in calls] == ["a", "a", "b"] * 3
    assert [call for name, call in calls if name == "a"] == list(range(6))
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": 2, "b": 2}
