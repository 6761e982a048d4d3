"""The batch script of slurm/ trains the example on two nodes, one server and one worker on each."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.slurm_cluster import NODE_ENV
from tests.python_path import JOB_ENVIRONMENT

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(180)
def test_the_batch_script_trains(cluster, tmp_path):
    data = tmp_path / "criteo"
    generator = [sys.executable, "-m", "mpifleet.data.criteo_synthetic", "--out", str(data)]
    generator += ["--rows", "4000", "--test-rows", "1000", "--files", "2", "--seed", "3"]
    subprocess.run(generator, cwd=ROOT, check=True, timeout=60, capture_output=True)
    output = tmp_path / "out"
    result = cluster.sbatch(
        ROOT / "slurm" / "ctr_dnn_ps.sbatch",
        *("--data", "criteo", "--data-dir", str(data), "--batch-size", "100"),
        *("--save", str(tmp_path / "checkpoint")),
        env={"PYTHON": sys.executable, "NODE_WRAPPER": str(NODE_ENV), **JOB_ENVIRONMENT},
        options=[f"--output={output}", f"--chdir={ROOT}"],
        timeout=150,
    )
    said = output.read_text()
    assert result.returncode == 0, said
    assert re.search(r"^test AUC 0\.\d+ \(1000 samples\)$", said, re.MULTILINE), said
    assert list((tmp_path / "checkpoint").iterdir())
