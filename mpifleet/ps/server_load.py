"""What a server does with its time, and how much it was given to do: counted always, cheaply."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields

PERIOD_S = 60.0
"""How often a running server looks back at its load."""


@dataclass(frozen=True)
class ServerReport:
    """A server's work over some time.

    elapsed_s: from the first message on.  dense_s, rows_s: merging and applying gradients;
    answers_s: answering pulls; files_s: saving and loading; each without what was done inside it of
    another kind. What is left of elapsed_s is polling and sleep.  cpu_s: processor time of the
    server's thread in all of that, polling included; rows_cpu_s: within rows_s.
    dense_pushes, row_pushes: messages of workers; rows: in them, each as often as it was pushed;
    answers: pulls.  turns: looks at the lanes that found something to do; full_lanes: lanes that
    were full at those looks, together.
    """

    elapsed_s: float = 0.0
    dense_s: float = 0.0
    rows_s: float = 0.0
    answers_s: float = 0.0
    files_s: float = 0.0
    cpu_s: float = 0.0
    rows_cpu_s: float = 0.0
    dense_pushes: int = 0
    row_pushes: int = 0
    rows: int = 0
    answers: int = 0
    turns: int = 0
    full_lanes: int = 0

    def since(self, earlier: ServerReport) -> ServerReport:
        """What was done after an earlier report."""
        return ServerReport(
            *(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self))
        )

    @property
    def busy_share(self) -> float:
        """Part of the time that was neither polling nor sleep, 0 to 1."""
        busy_s = self.dense_s + self.rows_s + self.answers_s + self.files_s
        return busy_s / self.elapsed_s if self.elapsed_s > 0.0 else 0.0

    @property
    def lanes_per_turn(self) -> float:
        """Lanes that were full when the server looked and had something to do; 1 is the one that
        it serves, the others wait.
        """
        return self.full_lanes / max(self.turns, 1)

    @property
    def rows_per_s(self) -> float:
        """Rows served per second, waiting for workers included."""
        return self.rows / self.elapsed_s if self.elapsed_s > 0.0 else 0.0

    @property
    def cpu_per_row_s(self) -> float:
        """Processor time that a pushed row takes."""
        return self.rows_cpu_s / max(self.rows, 1)

    def text(self) -> str:
        """For instance "served 2,000 pushes, 26,600,000 rows at 310,000 rows/s; busy 41 % (dense
        9 %, rows 28 %, answers 4 %), 0.90 us CPU per row, 1.3 lanes full on average".
        """
        num_pushes = self.dense_pushes + self.row_pushes
        if not num_pushes + self.answers or not self.elapsed_s:
            return "served nothing"
        pushes = f"served {num_pushes:,} pushes"
        rows = f", {self.rows:,} rows at {self.rows_per_s:,.0f} rows/s" if self.rows else ""
        answers = f", {self.answers:,} pulls" if self.answers else ""
        kinds = ("dense", "rows", "answers", "files")
        shares = {kind: getattr(self, f"{kind}_s") / self.elapsed_s for kind in kinds}
        parts = ", ".join(f"{kind} {share:.0%}" for kind, share in shares.items() if share > 0.0)
        per_row = f"{1e6 * self.cpu_per_row_s:.2f} us CPU per row, " if self.rows else ""
        text = (
            f"{pushes}{rows}{answers}; busy {self.busy_share:.0%} ({parts}), "
            f"{per_row}{self.lanes_per_turn:.1f} lanes full on average"
        )
        return text.replace("%", " %")


class ServerLoad:
    """Counts a server's work. For one thread; a turn with work costs about 2 us.

    tell: gets the report of every PERIOD_S in which there was work, from within the server's loop.
    wall_s, cpu_s: the clocks.
    """

    def __init__(
        self,
        tell: Callable[[ServerReport], None] | None = None,
        wall_s: Callable[[], float] = time.perf_counter,
        cpu_s: Callable[[], float] = time.thread_time,
    ) -> None:
        self._tell = tell
        self._wall_s, self._cpu_s = wall_s, cpu_s
        self._began: tuple[float, float] | None = None
        self._spent: dict[str, list[float]] = {}
        self._nested = [0.0, 0.0]
        self._counts = dict.fromkeys(
            ("dense_pushes", "row_pushes", "rows", "answers", "turns", "full_lanes"), 0
        )
        self._told = ServerReport()

    def count(self, **more: int) -> None:
        """Add to counts of ServerReport, by name."""
        for name, number in more.items():
            self._counts[name] += number

    def work(self, kind: str, serve: Callable[..., bool], *arguments: object) -> bool:
        """serve(*arguments), its time counted as `kind` where it returns that it did something.

        kind: "dense", "rows", "answers" or "files". What `serve` itself has counted is left out.
        """
        wall_s, cpu_s = self._wall_s(), self._cpu_s()
        before = list(self._nested)
        if self._began is None:
            self._began = (wall_s, cpu_s)
        if not serve(*arguments):
            return False
        spent = (self._wall_s() - wall_s, self._cpu_s() - cpu_s)
        total = self._spent.setdefault(kind, [0.0, 0.0])
        for i, seconds in enumerate(spent):
            total[i] += seconds - (self._nested[i] - before[i])
            self._nested[i] = before[i] + seconds
        return True

    def turn(self, full_lanes: int) -> None:
        """The server looked, found so many full lanes, and has done something."""
        self._counts["turns"] += 1
        self._counts["full_lanes"] += full_lanes
        if self._tell is None or self._began is None:
            return
        elapsed_s = self._wall_s() - self._began[0]
        if elapsed_s - self._told.elapsed_s >= PERIOD_S:
            report = self.report()
            self._tell(report.since(self._told))
            self._told = report

    def report(self) -> ServerReport:
        """All that was counted so far."""
        if self._began is None:
            return ServerReport()
        wall_s, cpu_s = self._began
        return ServerReport(
            elapsed_s=self._wall_s() - wall_s,
            cpu_s=self._cpu_s() - cpu_s,
            rows_cpu_s=self._spent.get("rows", [0.0, 0.0])[1],
            **self._counts,
            **{f"{kind}_s": spent[0] for kind, spent in self._spent.items()},  # type: ignore[arg-type]
        )
