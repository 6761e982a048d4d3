"""One timed job of the click-through benchmark as child processes, ended by force if need be."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.ctr_data import CtrData
from benchmarks.launch import job_command
from benchmarks.quiet import Busy, wait_until_quiet
from tools.processes import end_group, environment

ROOT = Path(__file__).parents[1]
MODULES = {
    "job": "benchmarks.ctr_job",
    "torch": "benchmarks.ctr_torch",
    "roofs": "benchmarks.ctr_roofs",
}
PEERS = ROOT / ".venvs" / "peers"
LIMIT_S = 150.0
QUIET_SHARE = 0.03
QUIET_LIMIT_S = 60.0
ENDING_S = 5.0
LOOK_S = 0.3
LAG = re.compile(r"\b(DENSE|ROWS) p50 \d+, p90 (\d+), max (\d+) of")


class RunError(RuntimeError):
    """A job wrote no figures; the message holds the end of what it printed."""


@dataclass(frozen=True)
class Job:
    """What to run: `ranks` > 1 of a module under mpirun, one process, or Paddle's job.

    kind: "job" (this package), "torch" (plain torch), "roofs", "paddle" or "paddle alone" (without
    its launcher); arguments: of its program; env: more environment.
    """

    kind: str
    arguments: tuple[str, ...] = ()
    ranks: int = 1
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_peer(self) -> bool:
        """Whether it runs in the environment of `make peers`."""
        return self.kind.startswith("paddle")

    def command(self, data: CtrData, out: Path) -> list[str]:
        """The command line; it writes one JSON object to `out`."""
        if self.is_peer:
            files = ["--samples", str(data.train), "--held-out", str(data.test)]
            program = _paddle(self.kind, out.parent)
            return [*program, *files, "--out", str(out), *self.arguments]
        module = MODULES[self.kind]
        arguments = ["--data", str(data.directory), "--out", str(out), *self.arguments]
        if self.ranks > 1:
            return job_command(module, self.ranks, arguments)
        return [sys.executable, "-m", module, *arguments]

    def environment(self) -> dict[str, str]:
        """One thread per process, and ranks that yield when idle, on whatever core is free."""
        extra = {
            "OMP_NUM_THREADS": "1",
            "OMPI_MCA_hwloc_base_binding_policy": "none",
            "PRTE_MCA_hwloc_default_binding_policy": "none",
            "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python",
        }
        result = environment(PEERS if self.is_peer else None, extra | dict(self.env))
        if self.is_peer:
            result.pop("PYTHONPATH", None)
        return result


def has_peers() -> bool:
    """Whether `make peers` was run."""
    return (PEERS / "bin" / "python").exists()


def run(job: Job, data: CtrData, limit_s: float = LIMIT_S, quiet: bool = True) -> dict[str, Any]:
    """What the job wrote, the servers' `lags`, and `others_share` of the cores meanwhile.

    quiet: wait for a quiet machine first, for a while.  Raises RunError.
    """
    with tempfile.TemporaryDirectory(prefix="ctr-") as scratch:
        out, log = Path(scratch) / "figures.json", Path(scratch) / "log"
        if quiet:
            wait_until_quiet(QUIET_SHARE, QUIET_LIMIT_S)
        with open(log, "wb") as stream:
            process = subprocess.Popen(
                job.command(data, out),
                # Paddle leaves descriptions and logs where it runs.
                cwd=scratch if job.is_peer else ROOT,
                env=job.environment(),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            others = _wait(process, out, limit_s)
        finally:
            end_group(process)
        if not out.exists():
            kept = shutil.copy(log, Path(tempfile.gettempdir()) / "ctr-failed.log")
            raise RunError(f"{job} wrote no figures; see {kept}: ...{log.read_text()[-500:]}")
        lags = lags_in(log.read_text(errors="replace"))
        return json.loads(out.read_text()) | {"others_share": others, "lags": lags}


def lags_in(text: str) -> dict[str, int]:
    """What servers say about the age of what pushes were computed from, the largest of each."""
    lags: dict[str, int] = {}
    for lane, p90, most in LAG.findall(text):
        for name, value in ((f"{lane.lower()} p90", p90), (f"{lane.lower()} most", most)):
            lags[name] = max(lags.get(name, 0), int(value))
    return lags


def _wait(process: subprocess.Popen[bytes], out: Path, limit_s: float) -> float:
    """The share of others until the job has ended, or until a little after its figures are there.

    Looked at now and then, and no more once there are figures.
    """
    busy, others = Busy(process.pid), 0.0
    give_up_s = time.monotonic() + limit_s
    while process.poll() is None and time.monotonic() < give_up_s:
        if out.exists():
            give_up_s = min(give_up_s, time.monotonic() + ENDING_S)
        else:
            others = busy.others_share()
        time.sleep(LOOK_S)
    return others


def _paddle(kind: str, log_directory: Path) -> list[str]:
    """The program under Paddle's launcher with one server and one trainer, or alone."""
    launch = ["-m", "paddle.distributed.launch", "--server_num=1", "--trainer_num=1"]
    launcher = [*launch, f"--log_dir={log_directory}"] if kind == "paddle" else []
    return [str(PEERS / "bin" / "python"), *launcher, str(ROOT / "benchmarks/peers/paddle_ctr.py")]
