"""Checkpoints: numbered HDF5 files in a directory, described in docs/checkpoint-format.md.

The only part of the package that imports h5py.
"""

from mpifleet.checkpoint.about import About, Link
from mpifleet.checkpoint.chain import link_to, members
from mpifleet.checkpoint.chunk_places import ChunkPlaces, Sized
from mpifleet.checkpoint.chunks import Chunks, chunks_of, gzip_level, packed
from mpifleet.checkpoint.collective import (
    MPIO,
    CollectiveFile,
    digest_share,
    reserve,
    why_not_collective,
)
from mpifleet.checkpoint.digests import Block, check
from mpifleet.checkpoint.directory import LATEST, Keep, Newcomer, is_checkable, newest
from mpifleet.checkpoint.layout import (
    CHECKPOINT_FORMAT,
    MODEL_FACT,
    DenseEntry,
    DenseShape,
    SparseShape,
)
from mpifleet.checkpoint.opening import Delta, is_begun, open_checkpoint
from mpifleet.checkpoint.reader import Checkpoint
from mpifleet.checkpoint.writer import (
    Part,
    Places,
    lay_out,
    write_checkpoint,
    write_parts,
    write_unsynced,
    writing,
)

__all__ = [
    "CHECKPOINT_FORMAT",
    "LATEST",
    "MODEL_FACT",
    "MPIO",
    "About",
    "Block",
    "Checkpoint",
    "ChunkPlaces",
    "Chunks",
    "CollectiveFile",
    "Delta",
    "DenseEntry",
    "DenseShape",
    "Keep",
    "Link",
    "Newcomer",
    "Part",
    "Places",
    "Sized",
    "SparseShape",
    "check",
    "chunks_of",
    "digest_share",
    "gzip_level",
    "is_begun",
    "is_checkable",
    "lay_out",
    "link_to",
    "members",
    "newest",
    "open_checkpoint",
    "packed",
    "reserve",
    "why_not_collective",
    "write_checkpoint",
    "write_parts",
    "write_unsynced",
    "writing",
]
