"""Commands that run side by side, each under its own limit; the output of each is shown whole."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tools.processes import TIMED_OUT, Ended, end_group

REPORT_S = 60.0
NOT_BEGUN = 125
"""The status of a task that did not begin."""
_LOOK_S = 0.05


@dataclass(frozen=True)
class Task:
    """One command. limit_s: it is ended, with the status TIMED_OUT, after that.

    after: title of a task that ends before this one begins; where that one failed, this one does
    not begin and has the status NOT_BEGUN.
    """

    title: str
    command: Sequence[str]
    env: Mapping[str, str]
    limit_s: float
    after: str = ""


@dataclass
class _Running:
    lane: int
    index: int
    task: Task
    output: Path
    process: subprocess.Popen[bytes] = field(init=False)
    began_s: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        with open(self.output, "wb") as file:
            self.process = subprocess.Popen(
                list(self.task.command),
                env=dict(self.task.env),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began_s

    def ended(self) -> Ended | None:
        """How it ended, its process group gone; None while it runs within its limit."""
        status = self.process.poll()
        if status is None and self.seconds < self.task.limit_s:
            return None
        seconds = self.seconds
        end_group(self.process)
        output = self.output.read_text(errors="replace")
        return Ended(TIMED_OUT if status is None else status, seconds, output)


def run_side_by_side(
    tasks: Sequence[Task], lanes: int, scratch: Path, until_s: float
) -> Iterator[tuple[int, Ended]]:
    """Runs the tasks, `lanes` at a time; yields (index, how it ended) as each one ends.

    Every other lane takes the first task that may begin, the rest the last: what a caller puts at
    the two ends of `tasks` runs side by side.
    Prints each command and all it printed when it has ended, and what runs once a minute.
    scratch: an empty folder for outputs.  until_s: of time.monotonic(); what would begin later
    counts as timed out.  Leaving the loop early ends what still runs.
    """
    waiting = list(enumerate(tasks))
    running: list[_Running] = []
    failed: set[str] = set()
    reported_s = time.monotonic()
    try:
        while waiting or running:
            while (found := _next(waiting, running, lanes)) is not None:
                lane, (index, task) = found
                left_s = until_s - time.monotonic()
                if left_s <= 0 or task.after in failed:
                    yield index, Ended(TIMED_OUT if left_s <= 0 else NOT_BEGUN, 0.0, "")
                    failed.add(task.title)
                    continue
                task = replace(task, limit_s=min(task.limit_s, left_s))
                running.append(_Running(lane, index, task, scratch / f"output-{index}"))
            for each in list(running):
                if ended := each.ended():
                    running.remove(each)
                    failed |= {each.task.title} if ended.status != 0 else set()
                    _show(each.task, ended)
                    yield each.index, ended
            if time.monotonic() - reported_s > REPORT_S:
                reported_s = time.monotonic()
                _report(running, len(waiting))
            time.sleep(_LOOK_S)
    finally:
        for each in running:
            end_group(each.process)


def _next(
    waiting: list[tuple[int, Task]], running: Sequence[_Running], lanes: int
) -> tuple[int, tuple[int, Task]] | None:
    """(lane, the task to begin there), which waits no longer; None where none may begin now."""
    still_open = {task.title for _, task in waiting} | {each.task.title for each in running}
    able = [place for place, (_, task) in enumerate(waiting) if task.after not in still_open]
    if len(running) == lanes or not able:
        return None
    lane = min(set(range(lanes)) - {each.lane for each in running})
    return lane, waiting.pop(able[-(lane % 2)])


def _report(running: Sequence[_Running], num_waiting: int) -> None:
    names = [f"{each.task.title} ({each.seconds:.0f} s)" for each in running]
    print(f"\nrunning: {', '.join(names)}; {num_waiting} to come", flush=True)


def _show(task: Task, ended: Ended) -> None:
    print(f"\n$ {shlex.join(task.command)}\n{ended.output}", end="", flush=True)
    if ended.status == TIMED_OUT:
        print(f"ended after {ended.seconds:.0f} s", file=sys.stderr, flush=True)
