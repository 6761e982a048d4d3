"""Two servers and two workers on two nodes: exact results, and the bits of a job on one node.

Three ways: the world home over one-sided reads between the nodes, the node home whose far pulls
are served, and a script that imports mpi4py.MPI first.
"""

import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpifleet.checkpoint import newest
from tests.cluster.jobs.counting import LR, NUM_ROWS, STEPS, ids_of
from tests.python_path import JOB_ENVIRONMENT

ROOT = Path(__file__).parents[2]
JOB = Path(__file__).with_name("jobs") / "counting.py"
WORKERS = 2
COUNTS = {**JOB_ENVIRONMENT, "MPIFLEET_SERVER_NUM": "2", "MPIFLEET_WORKER_NUM": "2"}
# What `mpifleet run` sets for every rank: with it a script may start MPI before fleet.init().
LIKE_MPIFLEET_RUN = {"MPI4PY_RC_THREAD_LEVEL": "serialized", "OMPI_MCA_osc": "sm,pt2pt"}
WAYS = {
    "world": (["--home", "world"], {}),
    "node": (["--home", "node"], {}),
    "mpi4py first": (["--home", "world", "--mpi-first"], LIKE_MPIFLEET_RUN),
}

pytestmark = pytest.mark.timeout(150)


def train(cluster, out, arguments, env, nodes=2):
    return cluster.srun(
        [sys.executable, JOB, out, *arguments],
        nodes=nodes,
        ntasks_per_node=4 // nodes,
        env=COUNTS | env,
        timeout=90,
    )


def arrays(folder: Path) -> dict[str, np.ndarray]:
    """Every data set of the checkpoint by its path; rows and their state in order of their keys."""
    found: dict[str, np.ndarray] = {}

    def keep(name: str, item: object) -> None:
        if isinstance(item, h5py.Dataset):
            found[name] = item[()]

    with h5py.File(newest(folder), "r") as file:
        file.visititems(keep)
    order = np.argsort(found["sparse/rows/keys"])
    for name in found:
        if name.startswith("sparse/rows/"):
            found[name] = found[name][order]
    return found


def look_ups() -> np.ndarray:
    """How often each row was looked up by all workers together, int64 [NUM_ROWS]."""
    ids = [ids_of(worker, step) for worker in range(WORKERS) for step in range(STEPS)]
    return np.bincount(np.concatenate(ids, axis=None), minlength=NUM_ROWS)


@pytest.mark.parametrize("way", WAYS)
def test_async_applies_every_gradient_once(cluster, tmp_path, way):
    arguments, env = WAYS[way]
    result = train(cluster, tmp_path, [*arguments, "--mode", "async", "--rule", "sgd"], env)
    assert result.returncode == 0, result.stderr
    saved = arrays(tmp_path)
    # Powers of two and counts below 2^24: float32 holds every sum exactly, in any order.
    expected = -LR * look_ups()
    rows = saved["sparse/rows/rows"]
    np.testing.assert_array_equal(rows, np.repeat(expected[:, None], rows.shape[1], axis=1))
    bias = next(value for name, value in saved.items() if name.endswith("bias/value"))
    np.testing.assert_array_equal(bias, np.full(3, -LR * STEPS * WORKERS))


@pytest.fixture(scope="module")
def one_node_bits(cluster, tmp_path_factory) -> dict[str, np.ndarray]:
    out = tmp_path_factory.mktemp("one")
    arguments = ["--home", "node", "--mode", "sync", "--rule", "adam"]
    result = train(cluster, out, arguments, {}, nodes=1)
    assert result.returncode == 0, result.stderr
    return arrays(out)


@pytest.mark.parametrize("way", WAYS)
def test_sync_gives_the_bits_of_one_node(cluster, tmp_path, one_node_bits, way):
    arguments, env = WAYS[way]
    result = train(cluster, tmp_path, [*arguments, "--mode", "sync", "--rule", "adam"], env)
    assert result.returncode == 0, result.stderr
    saved = arrays(tmp_path)
    assert saved.keys() == one_node_bits.keys()
    assert {"sparse/rows/state/exp_avg_sq", "sparse/rows/rows"} <= saved.keys()
    for name, value in saved.items():
        assert value.tobytes() == one_node_bits[name].tobytes(), name
    assert np.abs(saved["sparse/rows/rows"]).max() > 0


def test_mpi4py_first_without_the_settings_names_the_cure(cluster, tmp_path):
    arguments = ["--home", "world", "--mode", "sync", "--rule", "sgd", "--mpi-first"]
    result = train(cluster, tmp_path, arguments, {})
    assert result.returncode != 0
    assert "MPI4PY_RC_THREAD_LEVEL=serialized" in result.stderr
