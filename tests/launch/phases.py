"""What the ranks of a small training job do, as they tell it in files; see jobs/ctr_job.py."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.launch.started_job import StartedJob

CTR_JOB = str(Path(__file__).parent / "jobs" / "ctr_job.py")
# Every rank imports torch first, which takes a core for some seconds.
START_LIMIT_S = 150.0


@dataclass(frozen=True)
class Mark:
    """One rank entered one phase at `at_s` of time.monotonic()."""

    phase: str
    at_s: float
    pid: int
    who: str


class Phases:
    """The marks of all ranks of one job, read anew at each look. folder: one file for each rank."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self.environment = {"MPIFLEET_TEST_PHASES": str(folder)}

    def of(self, rank: int) -> list[Mark]:
        """What a rank has done so far."""
        with contextlib.suppress(FileNotFoundError):
            lines = (self._folder / f"rank{rank}").read_text().splitlines(keepends=True)
            words = [line.split() for line in lines if line.endswith("\n")]
            return [Mark(p, float(at_s), int(pid), who) for p, at_s, pid, who in words]
        return []

    def wait(
        self, job: StartedJob, rank: int, phase: str, times: int = 1, limit_s: float = START_LIMIT_S
    ) -> list[Mark]:
        """Wait until a rank has entered `phase` so many times; returns all its marks."""
        return self._watch(
            job, rank, f"{phase} of rank {rank}", limit_s,
            lambda marks: sum(mark.phase == phase for mark in marks) >= times,
        )  # fmt: skip

    def _watch(
        self,
        job: StartedJob,
        rank: int,
        what: str,
        limit_s: float,
        is_there: Callable[[list[Mark]], bool],
    ) -> list[Mark]:
        until_s = time.monotonic() + limit_s
        while not is_there(marks := self.of(rank)):
            assert job.process.poll() is None, f"ended before {what}\n{job.output()}"
            assert time.monotonic() < until_s, f"not in {limit_s} s: {what}\n{job.output()}"
            time.sleep(0.001)
        return marks


def mean_duration_s(marks: list[Mark], phase: str) -> float:
    """How long a phase of one rank has lasted so far, on average; 0 where it was never left."""
    pairs = itertools.pairwise(marks)
    durations = [after.at_s - mark.at_s for mark, after in pairs if mark.phase == phase]
    return sum(durations) / len(durations) if durations else 0.0
