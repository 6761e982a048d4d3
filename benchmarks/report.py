"""Figures of a benchmark: interleaved timing, goals, and one JSON line per figure.

Machines drift while they measure, so roads that are compared take turns, and a ratio is the median
of the ratios within the turns rather than a ratio of medians.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TextIO


@dataclass(frozen=True)
class Goal:
    """A bound on a ratio, the bound itself included."""

    bound: float
    at_most: bool

    def __str__(self) -> str:
        return f"{'<=' if self.at_most else '>='} {self.bound:g}"

    def met_by(self, ratio: float) -> bool:
        """Whether `ratio` is on the wanted side of the bound."""
        return ratio <= self.bound if self.at_most else ratio >= self.bound


@dataclass(frozen=True)
class Figure:
    """One measured number, and how it stands to another one.

    value: median, in `unit`.  against: the name of what it is compared with, ratio: see `compare`
    and `ratio_of`, goal: as text, met: whether the ratio reaches the goal; None where not asked.
    """

    name: str
    value: float
    unit: str
    against: str | None = None
    ratio: float | None = None
    goal: str | None = None
    met: bool | None = None


@dataclass(frozen=True)
class Comparison:
    """What one figure says: the time of `road` over that of `against`, or with `speedup` inverted.

    goal: the bound on that ratio, None for a ratio that is only reported.
    """

    road: str
    against: str
    goal: Goal | None = None
    speedup: bool = False


def interleave(
    roads: Mapping[str, Callable[[int], object]],
    rounds: int,
    calls: Mapping[str, int] | None = None,
) -> dict[str, list[float]]:
    """Seconds per call of each road in each round; within a round the roads take turns.

    roads: called with a number that grows from call to call, to pick another input each time.
    calls: how often a road is called in a round, 1 where it has no entry.  A first round, which
    touches memory and fills caches, is not counted.
    """
    times: dict[str, list[float]] = {name: [] for name in roads}
    for turn in range(rounds + 1):
        for name, road in roads.items():
            count = (calls or {}).get(name, 1)
            start = time.perf_counter()
            for call in range(count):
                road(turn * count + call)
            if turn > 0:
                times[name].append((time.perf_counter() - start) / count)
    return times


def ratio_of(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Median over the rounds of the ratio within a round."""
    return statistics.median(n / d for n, d in zip(numerators, denominators, strict=True))


def plain(name: str, seconds: Sequence[float]) -> Figure:
    """The median time of a road, in us, compared with nothing."""
    return Figure(name, _round(1e6 * statistics.median(seconds)), "us")


def compare(times: Mapping[str, Sequence[float]], asked: Comparison) -> Figure:
    """The figure that `asked` wants, from the times of `interleave`, in us."""
    first, second = times[asked.road], times[asked.against]
    ratio = ratio_of(second, first) if asked.speedup else ratio_of(first, second)
    return Figure(
        name=asked.road + (" speed-up" if asked.speedup else ""),
        value=_round(1e6 * statistics.median(first)),
        unit="us",
        against=asked.against,
        ratio=_round(ratio),
        goal=str(asked.goal) if asked.goal else None,
        met=asked.goal.met_by(ratio) if asked.goal else None,
    )


def figure_of_rates(
    rates: Mapping[str, Sequence[float]],
    name: str,
    against: str,
    goal: Goal | None = None,
    unit: str = "samples/s",
) -> Figure:
    """The median rate of `name` and how many times that of `against` it is, round by round."""
    ratio = ratio_of(rates[name], rates[against])
    return Figure(
        name,
        _round(statistics.median(rates[name])),
        unit,
        against,
        _round(ratio),
        str(goal) if goal else None,
        goal.met_by(ratio) if goal else None,
    )


def print_figures(figures: Sequence[Figure], stream: TextIO | None = None) -> None:
    """One JSON line per figure on `stream`, stdout by default."""
    for figure in figures:
        print(json.dumps(asdict(figure)), file=stream or sys.stdout, flush=True)


def figures_of_lines(lines: Sequence[str]) -> list[dict[str, Any]]:
    """The fields of all figures among printed lines."""
    return [json.loads(line) for line in lines if line.startswith("{")]


def missed(lines: Sequence[str]) -> list[str]:
    """Names of the figures among printed lines that miss their goal."""
    return [figure["name"] for figure in figures_of_lines(lines) if figure["met"] is False]


def _round(number: float) -> float:
    return float(f"{number:.4g}")
