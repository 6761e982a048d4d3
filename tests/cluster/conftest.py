"""The two-node Slurm of this folder's tests: started once, stopped at the end."""

import signal
from collections.abc import Iterator
from types import FrameType

import pytest

from tests.cluster.slurm_cluster import SlurmCluster, programs_missing


@pytest.fixture(scope="session")
def cluster() -> Iterator[SlurmCluster]:
    """A running cluster of nodes n1 and n2; skips, with the reason, where there can be none."""
    if reason := programs_missing():
        pytest.skip(reason)
    # SIGTERM, by which a time limit ends the tests, must not leave the daemons behind.
    before = signal.signal(signal.SIGTERM, _interrupt)
    slurm = _started()
    yield slurm
    slurm.stop()
    signal.signal(signal.SIGTERM, before)


def _started() -> SlurmCluster:
    """A started cluster, at other ports where somebody took one between choice and use."""
    for _ in range(2):
        slurm = SlurmCluster()
        try:
            slurm.start()
        except RuntimeError as error:
            if "Address already in use" not in str(error):
                raise
        else:
            return slurm
    slurm = SlurmCluster()
    slurm.start()
    return slurm


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
