"""`kill -9` at every stage of a save: the newest checkpoint is whole, of one moment, and loads.

A server of two kills itself before a call to the system that a save is made of; which one is drawn
from the seed.  Half of MPIFLEET_KILL_RUNS seeds are run.

Seen with seeds 0 to 49 on a busy machine: every newest checkpoint was whole and of one moment; one
killed server left a file for checking the directory, which the next save removes since.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest

from mpifleet.checkpoint import open_checkpoint, write_checkpoint
from mpifleet.checkpoint.directory import numbers
from tests.launch.jobs.saving_job import EVERY, ROWS
from tests.launch.phases import CTR_JOB, START_LIMIT_S
from tests.launch.started_job import run_command

JOB = str(Path(CTR_JOB).with_name("saving_job.py"))
# Half as many as of other kills: a run takes twice as long.
RUNS = (int(os.environ.get("MPIFLEET_KILL_RUNS", "12")) + 1) // 2
FIRST = int(os.environ.get("MPIFLEET_KILL_FIRST", "0"))
SERVERS = (1, 2)  # their ranks: rank 0 is the worker
# A save makes about 60 of these calls on the first server and 20 on the other.
MOST_CALLS = {1: 300, 2: 100}

pytestmark = pytest.mark.timeout(START_LIMIT_S + 60)


@pytest.mark.parametrize("seed", range(FIRST, FIRST + RUNS))
def test_a_server_killed_in_a_save_leaves_a_whole_checkpoint(start_job, tmp_path, seed):
    lot = random.Random(seed)
    victim = lot.choice(SERVERS)
    call = lot.randrange(MOST_CALLS[victim])
    folder = tmp_path / "saved"
    job = start_job(run_command(2, 1, JOB, str(folder), "kill", str(victim), str(call)))
    assert job.wait(START_LIMIT_S) != 0, job.output()
    assert f"rank {victim} (server {victim - 1})" in job.last_line(), job.output()
    if not numbers(folder):  # killed before the first save was whole
        assert "ready" not in job.stdout, "a save had been waited for"
        return
    with open_checkpoint(folder) as checkpoint:
        block = checkpoint.sparse_block("t", 0, ROWS)["rows"]
        dense = checkpoint.dense("dense").value
    steps = int(block[0, 0])
    assert steps > 0
    assert steps % EVERY == 0
    np.testing.assert_array_equal(block, steps)
    np.testing.assert_array_equal(dense, steps)
    # The next save finds no trace of the killed one.
    write_checkpoint(folder, dense=[], buffers={}, meta={})
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]
