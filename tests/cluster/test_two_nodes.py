"""The cluster of the tests is what it says: two nodes, separate memory, clean ends."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.processes import processes_of
from tests.cluster.slurm_cluster import SlurmCluster, programs_missing
from tests.python_path import JOB_ENVIRONMENT

JOBS = Path(__file__).with_name("jobs")
ROOT = Path(__file__).parents[2]
ENV = JOB_ENVIRONMENT


def test_both_kinds_of_window_work(cluster):
    result = cluster.srun([sys.executable, JOBS / "two_windows.py"], env=ENV, timeout=60)
    assert result.returncode == 0, result.stderr
    ranks = json.loads(result.stdout.splitlines()[-1])
    assert [rank["node"] for rank in ranks] == ["n1", "n1", "n2", "n2"]
    assert [rank["node_size"] for rank in ranks] == [2] * 4
    assert [rank["level"] for rank in ranks] == ["serialized"] * 4
    for name in ("shared", "unified", "get", "indexed", "added"):
        assert [rank[name] for rank in ranks] == [True] * 4, name


def test_one_rank_that_dies_ends_the_step(cluster):
    code = (
        "import os, time\nfrom mpifleet import mpi\nworld = mpi.load_mpi().COMM_WORLD\n"
        "world.Barrier()\nif world.rank == 3: os._exit(7)\nworld.Barrier()\ntime.sleep(60)"
    )
    begin = time.monotonic()
    result = cluster.srun([sys.executable, "-c", code], env=ENV, timeout=60)
    assert result.returncode != 0
    assert "exit code 7" in result.stderr
    assert time.monotonic() - begin < 30


def test_a_step_past_its_limit_is_ended(cluster):
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        cluster.srun(["sh", "-c", "echo begun; sleep 99.7531"], timeout=4)
    assert caught.value.stdout.count("begun") == 4
    deadline = time.monotonic() + 20
    while left := [line for line in processes_of(cluster.scratch).values() if "99.7531" in line]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_sbatch_waits_for_the_job(cluster, tmp_path):
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/sh\necho $SLURM_JOB_NUM_NODES nodes, $1 > {tmp_path}/said\nexit 3\n")
    result = cluster.sbatch(script, "hello", options=["--nodes=2", f"--output={tmp_path}/out"])
    assert result.returncode == 3, result.stderr
    assert (tmp_path / "said").read_text() == "2 nodes, hello\n"


def test_stopping_leaves_nothing():
    if reason := programs_missing():
        pytest.skip(reason)
    slurm = SlurmCluster()
    slurm.start()
    step = subprocess.Popen(
        ["srun", *slurm.step_options(), "sleep", "97"],
        env=slurm.environment,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 20
        while sum("sleep" in line for line in processes_of(slurm.scratch).values()) < 4:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        slurm.stop()
        step.wait(20)
    assert processes_of(slurm.scratch) == {}
    assert not slurm.scratch.exists()
    assert not slurm.shared_memory.exists()
    assert os.environ.get("SLURM_CONF") is None
