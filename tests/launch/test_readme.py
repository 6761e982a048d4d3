"""The example of the README runs unchanged as an MPI job."""

import re

from tests.python_process import ROOT, run_python

LIMIT_S = 90


def test_the_readme_example_trains_on_servers_and_workers(tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    (tmp_path / "train.py").write_text(blocks[0])
    job = ["--server_num", "1", "--worker_num", "2", "train.py"]
    command, plain = ("-m", "mpifleet.cli.main", "run", *job), {"PYTHONPATH": str(ROOT)}
    run_python(*command, cwd=tmp_path, limit_s=LIMIT_S, **plain)
    assert list((tmp_path / "checkpoint").iterdir())
