"""A job started for a test: under a time limit, watched for orphans and files in /dev/shm."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mpifleet.cli.command import Job, command_line, job_environment
from mpifleet.cli.run import find_launcher
from mpifleet.lifeline.segments import mapped_segments
from tests.python_path import JOB_ENVIRONMENT

ROOT = Path(__file__).resolve().parents[2]
MARK = "MPIFLEET_TEST_JOB"


def run_command(server_num: int, worker_num: int, *program: str) -> list[str]:
    """`mpifleet run` of a script and its arguments, with the Python of this test run."""
    counts = ["--server_num", str(server_num), "--worker_num", str(worker_num)]
    return [sys.executable, "-m", "mpifleet.cli.main", "run", *counts, *program]


def plain_command(ranks: int, *program: str) -> list[str]:
    """The bare mpirun of the same script: what a user without `mpifleet run` would type."""
    job = Job(1, ranks - 1, (sys.executable, "-u", *program), cores=1)
    return command_line(find_launcher(os.environ), job, [])


class StartedJob:
    """A running job.  Every wait has a limit; close() ends whatever is left and tells of it.

    The processes of the job are known by a mark in their environment, whoever their parent is.
    Open a new one through the start_job fixture, which closes it and fails the test on leftovers.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        environment: Mapping[str, str] | None = None,
        terminal: int | None = None,
    ) -> None:
        self._mark = uuid.uuid4().hex
        self._segments: set[str] = set()
        self._paths = (folder / "stdout", folder / "stderr")
        job = Job(0, 1, ("",), cores=1, root=os.geteuid() == 0)
        allowed = job_environment(find_launcher(os.environ), job, os.environ)
        allowed = {name: value for name, value in allowed.items() if "ROOT" in name}
        environ = {**os.environ, **allowed, **JOB_ENVIRONMENT, MARK: self._mark}
        environ.update(environment or {})
        self.started_s = time.monotonic()
        with open(self._paths[0], "wb") as out, open(self._paths[1], "wb") as err:
            self.process = subprocess.Popen(
                list(command),
                env=environ,
                stdin=subprocess.DEVNULL if terminal is None else terminal,
                stdout=out if terminal is None else terminal,
                stderr=err if terminal is None else terminal,
                start_new_session=True,
            )

    @property
    def stdout(self) -> str:
        """What the job printed so far."""
        return self._paths[0].read_text(errors="replace")

    @property
    def stderr(self) -> str:
        """What the job wrote to stderr so far."""
        return self._paths[1].read_text(errors="replace")

    def last_line(self) -> str:
        """The last line on stderr that is not empty."""
        lines = [line for line in self.stderr.splitlines() if line.strip()]
        return lines[-1] if lines else ""

    def wait_until(self, condition: Callable[[], bool], limit_s: float, what: str) -> None:
        """Wait for `condition`; fails with the job's output after limit_s."""
        until_s = time.monotonic() + limit_s
        while not condition():
            self.pids()
            assert time.monotonic() < until_s, f"not in {limit_s} s: {what}\n{self.output()}"
            time.sleep(0.05)

    def wait_ready(self, ranks: int, limit_s: float = 40.0) -> dict[int, int]:
        """Wait for "ready RANK PID" of every rank on stdout; returns the pids by rank."""
        pattern = re.compile(r"^ready (\d+) (\d+)$", re.MULTILINE)

        def ready() -> bool:
            running = self.process.poll() is None or len(pattern.findall(self.stdout)) == ranks
            assert running, f"ended before it was ready\n{self.output()}"
            return len(pattern.findall(self.stdout)) == ranks

        self.wait_until(ready, limit_s, f"{ranks} ranks ready")
        self.pids()
        return {int(rank): int(pid) for rank, pid in pattern.findall(self.stdout)}

    def wait(self, limit_s: float = 10.0) -> int:
        """Wait for the end of the job; returns its exit status as subprocess tells it."""
        self.wait_until(lambda: self.process.poll() is not None, limit_s, "the job ends")
        return int(self.process.wait())

    def pids(self) -> list[int]:
        """Processes of the job that live now; notes the MPI files they map on the way."""
        found = []
        mark = f"{MARK}={self._mark}".encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
                        self._segments |= mapped_segments(entry.name)
        return found

    def leftovers(self, limit_s: float = 5.0) -> list[str]:
        """What the ended job has left after limit_s: processes and files; empty if clean."""
        until_s = time.monotonic() + limit_s
        while True:
            self.process.poll()
            left = [f"process {pid}: {_command_of(pid)}" for pid in self.pids()]
            left += [f"file {path}" for path in sorted(self._segments) if Path(path).exists()]
            if not left or time.monotonic() >= until_s:
                return left
            time.sleep(0.1)

    def close(self) -> list[str]:
        """End the job if it still runs, and return what it had left behind by itself."""
        left = self.leftovers(5.0 if self.process.poll() is not None else 0.0)
        for pid in self.pids():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        for path in self._segments:
            Path(path).unlink(missing_ok=True)
        return [f"{line}\n{self.output()}" for line in left]

    def output(self) -> str:
        """All that the job wrote so far, for a failed test's message."""
        return f"--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}\n---"


def _command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return "?"
