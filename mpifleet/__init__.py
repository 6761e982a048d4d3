"""MPI-native training for PyTorch with the programming model of PaddlePaddle Fleet.

Importing the package loads neither MPI nor torch; its names are resolved on first use.
"""

from typing import TYPE_CHECKING, Any

from mpifleet._version import __version__
from mpifleet.launchenv import PREEMPTED

if TYPE_CHECKING:
    import mpifleet.fleet as fleet
    from mpifleet.strategy import DistributedStrategy

__all__ = ["PREEMPTED", "DistributedStrategy", "__version__", "fleet"]


def __getattr__(name: str) -> Any:
    import importlib

    if name == "fleet":
        return importlib.import_module("mpifleet.fleet")
    if name == "DistributedStrategy":
        return importlib.import_module("mpifleet.strategy").DistributedStrategy
    raise AttributeError(f"module 'mpifleet' has no attribute {name!r}")
