"""The two-node Slurm of tests/cluster, for benchmarks of jobs between nodes."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.cluster.slurm_cluster import SlurmCluster

ROOT = Path(__file__).parents[1]
ENV = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
"""What ranks on its nodes need to find the package and its benchmarks."""


def why_not() -> str:
    """Why no two nodes can be had here, or an empty string."""
    from tests.cluster.slurm_cluster import programs_missing

    return programs_missing()


@contextmanager
def two_nodes() -> Iterator[SlurmCluster]:
    """The cluster, started; stopped at the end, also by SIGTERM."""
    from tests.cluster.slurm_cluster import SlurmCluster

    # SIGTERM, by which a time limit ends a benchmark, must not leave the daemons behind.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    cluster = SlurmCluster()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
