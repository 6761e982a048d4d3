"""The example of the README runs unchanged as an MPI job."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_S = 90


def test_the_readme_example_trains_on_servers_and_workers(tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    (tmp_path / "train.py").write_text(blocks[0])
    command = [sys.executable, "-m", "mpifleet.cli.main", "run"]
    command += ["--server_num", "1", "--worker_num", "2", "train.py"]
    result = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert list((tmp_path / "checkpoint").iterdir())
