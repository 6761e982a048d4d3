"""Starts jobs for tests and fails a test whose job leaves a process or a file behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.launch.started_job import StartedJob


@pytest.fixture
def start_job(tmp_path: Path) -> Iterator[Callable[..., StartedJob]]:
    """start_job(command, environment=None, terminal=None) -> StartedJob, closed after the test."""
    jobs: list[StartedJob] = []

    def start(
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        terminal: int | None = None,
    ) -> StartedJob:
        folder = tmp_path / f"job{len(jobs)}"
        folder.mkdir()
        jobs.append(StartedJob(command, folder, environment, terminal))
        return jobs[-1]

    yield start
    left = [line for job in jobs for line in job.close()]
    assert not left, "left behind:\n" + "\n".join(left)
