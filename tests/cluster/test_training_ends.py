"""How training jobs of 2 servers and 2 workers on two nodes end: well, by a mistake, by a kill."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.slurm_cluster import NODE_ENV
from tests.launch.conftest import start_job  # noqa: F401
from tests.launch.phases import CTR_JOB, Phases, mean_duration_s
from tests.python_path import JOB_ENVIRONMENT

ROOT = Path(__file__).parents[2]
KILL_RUNS = int(os.environ.get("MPIFLEET_KILL_RUNS", "3"))
LIMIT_S = 90.0
END_LIMIT_S = 10.0
ONCE_S = {"start": 0.5, "stop": 0.3}

pytestmark = pytest.mark.timeout(150)


def counts(servers: int = 2, workers: int = 2) -> dict[str, str]:
    """The environment that asks for so many of each role."""
    return {
        **JOB_ENVIRONMENT,
        "MPIFLEET_SERVER_NUM": str(servers),
        "MPIFLEET_WORKER_NUM": str(workers),
    }


def train(cluster, *arguments, env=None, **place):
    command = [sys.executable, CTR_JOB, *map(str, arguments)]
    return cluster.srun(command, env=env or counts(), timeout=LIMIT_S, **place)


def digest_of(result: subprocess.CompletedProcess[str]) -> str:
    """What the job's tables and parameters hash to."""
    assert result.returncode == 0, result.stderr
    (line,) = re.findall("^digest .*$", result.stdout, re.MULTILINE)
    return line


def last_words(stderr: str) -> str:
    """The last line that a rank wrote: srun and its daemons write their own reports after it."""
    lines = [line for line in stderr.splitlines() if line.strip()]
    return [line for line in lines if not line.startswith(("srun: ", "slurmstepd"))][-1]


def test_a_worker_without_batches_on_another_node(cluster):
    result = train(cluster, "--mode", "sync", "--steps", 7, "--meet", "worker1:batches@0")
    digest_of(result)
    assert "stop_worker" not in result.stderr


def test_saved_on_two_nodes_loaded_on_one(cluster, tmp_path):
    saved = digest_of(train(cluster, "--steps", 12, "--meet", "--save", tmp_path))
    alone = {"nodes": 1, "ntasks_per_node": 2, "env": counts(1, 1)}
    assert digest_of(train(cluster, "--steps", 0, "--load", tmp_path, **alone)) == saved


def test_a_directory_of_each_node_is_refused(cluster, tmp_path):
    for node in ("n1", "n2"):
        (tmp_path / node).mkdir()
    # The same words on both nodes, and another directory.
    result = train(cluster, "--apart", tmp_path, "--save", "/proc/self/cwd/saved")
    assert result.returncode != 0
    said = last_words(result.stderr)
    words = "/proc/self/cwd/saved is not the same directory on the node of server 1"
    assert said == f"mpifleet: rank 0 (worker 0) failed: CheckpointError: {words}", result.stderr
    assert list(tmp_path.rglob("*.h5")) == []


def test_mpi_started_by_the_script_names_the_cure_on_every_rank(cluster, tmp_path):
    script = tmp_path / "first.py"
    script.write_text(
        "import mpi4py.MPI, sys, torch\n"
        "from mpifleet import fleet\n"
        "from mpifleet.errors import FleetError\n"
        "fleet.init()\n"
        "model = torch.nn.Linear(2, 1)\n"
        "fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1), model=model)\n"
        "try:\n"
        "    fleet.run_server() if fleet.is_server() else fleet.init_worker()\n"
        "except FleetError as error:\n"
        f"    open(f'{tmp_path}/rank{{mpi4py.MPI.COMM_WORLD.rank}}', 'w').write(str(error))\n"
        "    mpi4py.MPI.COMM_WORLD.Barrier()\n"
        "    raise\n"
    )
    result = cluster.srun([sys.executable, script], env=counts(), timeout=LIMIT_S)
    assert result.returncode != 0
    for rank in range(4):
        said = (tmp_path / f"rank{rank}").read_text()
        assert "thread level MULTIPLE" in said
        assert "MPI4PY_RC_THREAD_LEVEL=serialized" in said


@pytest.mark.parametrize("seed", range(KILL_RUNS))
def test_a_killed_rank_is_named_by_the_others_under_srun(start_job, cluster, tmp_path, seed):  # noqa: F811
    lot = random.Random(seed)
    pairs = 1 + seed % 2
    victim, mode = lot.randrange(2 * pairs), lot.choice(["sync", "async"])
    phase = ("start", "pull", "push", "save", "stop")[seed % 5]
    times, share = lot.randint(2, 4) if phase == "save" else lot.randint(5, 40), lot.random()
    drawn = f"rank {victim} of {2 * pairs} in {phase} number {times}, {share:.2f} of it"
    print(f"seed {seed}, {mode}: {drawn}")
    phases = Phases(tmp_path / "phases")
    steps = "30" if phase == "stop" else "100000"
    script = [CTR_JOB, "--mode", mode, "--steps", steps, "--save", str(tmp_path / "saved")]
    options = cluster.step_options(ntasks_per_node=pairs)
    command = ["srun", *options, str(NODE_ENV), sys.executable, "-u", *script]
    asked = counts(pairs, pairs)
    job = start_job(command, {**cluster.environment, **asked, **phases.environment})
    times = 1 if phase in ONCE_S else times
    marks = phases.wait(job, 0, phase, times, LIMIT_S)
    entered_s = [mark.at_s for mark in marks if mark.phase == phase][times - 1]
    length_s = ONCE_S.get(phase) or mean_duration_s(marks, phase)
    time.sleep(max(0.0, entered_s + share * length_s - time.monotonic()))
    mark = phases.wait(job, victim, "start")[-1]
    with contextlib.suppress(ProcessLookupError):
        os.kill(mark.pid, signal.SIGKILL)
    killed_s = time.monotonic()
    status = job.wait(END_LIMIT_S)
    print(f"{mark.who} killed; ended after {time.monotonic() - killed_s:.1f} s with {status}")
    if phases.of(victim)[-1].phase == "gone":
        return  # too late: its work was done, MPI had ended
    assert status != 0
    name = f"rank {victim} ({mark.who[:-1]} {mark.who[-1]}) on "
    assert name in last_words(job.stderr), job.output()
    assert job.leftovers() == [], job.output()


def test_the_probes_hold_on_two_nodes(cluster):
    pytest_on_all = [sys.executable, "-m", "pytest", "-q", "-pno:cacheprovider", "tests/probes"]
    env = {**JOB_ENVIRONMENT, "MPIFLEET_PROBE_MESSAGES": "2000"}
    options = [f"--chdir={ROOT}"]
    result = cluster.srun(pytest_on_all, env=env, timeout=LIMIT_S, options=options)
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"\d+ passed", result.stdout), result.stdout
