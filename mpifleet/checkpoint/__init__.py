"""Checkpoints: one HDF5 file per save, described in docs/checkpoint-format.md.

The only part of the package that imports h5py.
"""

from mpifleet.checkpoint.layout import CHECKPOINT_FORMAT, FILE_NAME, DenseEntry, SparseEntry
from mpifleet.checkpoint.reader import Checkpoint, open_checkpoint
from mpifleet.checkpoint.writer import write_checkpoint

__all__ = [
    "CHECKPOINT_FORMAT",
    "FILE_NAME",
    "Checkpoint",
    "DenseEntry",
    "SparseEntry",
    "open_checkpoint",
    "write_checkpoint",
]
