"""The larger arrays of a compressed checkpoint, written as chunks by all servers together.

There are two roads to the same content.  Compressing takes nearly all the time on both.  Through
HDF5's MPI driver the servers work on one array at a time, so arrays of few chunks take longer.
"""

import math
from pathlib import Path
from types import ModuleType
from typing import Any

from mpifleet.checkpoint import Block, Newcomer, why_not_collective
from mpifleet.log import get_logger
from mpifleet.ps.agreement import Trouble, first_failure
from mpifleet.ps.collective_chunks import write_collectively
from mpifleet.ps.placed_chunks import write_placed
from mpifleet.ps.saved_chunks import Borders, SavedArray
from mpifleet.ps.shard import Shard

LEAST_CHUNKS = 8
"""Arrays of fewer chunks for each server are not written through HDF5's MPI driver."""


class ChunkWriter:
    """Writes what one checkpoint after another has in chunks. `write` is collective.

    mpi, comm: the servers', None in a single process; shard: this server's.
    """

    def __init__(self, mpi: ModuleType | None, comm: Any, shard: Shard) -> None:
        self._mpi, self._comm, self._shard = mpi, comm, shard
        self._said = ""

    def write(
        self,
        newcomer: Newcomer | None,
        temporary: Path,
        arrays: list[SavedArray],
        level: int,
        blocks: list[Block],
        failure: str,
    ) -> tuple[list[Block], str]:
        """(all digests that this server has to tell, what went wrong on some server). Collective.

        newcomer: the laid-out file, on the first server.  temporary: its path.  arrays: all that
        is made of chunks.  level: of gzip.
        blocks: of what this server wrote before.  failure: what went wrong here before; then
        nothing is written.
        """
        trouble = Trouble(self._comm, temporary.parent, failure)
        if not trouble.is_none() or not arrays:
            return blocks, trouble.text
        num_servers, breathe = self._shard.layout.num_servers, self._shard.breathe
        least = LEAST_CHUNKS * num_servers if self._is_collective() else math.inf
        borders = self._borders([array for array in arrays if array.chunks.count < least])
        blocks += write_placed(self._comm, newcomer, temporary, borders, level, breathe, trouble)
        large = [array for array in arrays if array.chunks.count >= least]
        if large and trouble.is_none():
            # HDF5 alone knows what it wrote where: the servers read all of the file back.
            borders = self._borders(large)
            blocks = write_collectively(self._comm, newcomer, temporary, borders, breathe, trouble)
        return blocks, trouble.text

    def _borders(self, arrays: list[SavedArray]) -> Borders:
        return Borders(self._mpi, self._comm, self._shard.layout.server, arrays)

    def _is_collective(self) -> bool:
        """Whether all servers write through HDF5; else the reason is logged, once. Collective."""
        if self._comm is None:
            return False
        reason = first_failure(self._comm, why_not_collective())
        if reason and reason != self._said and self._shard.layout.server == 0:
            get_logger().info(
                "compressed checkpoints: server 0 alone opens them in HDF5 and finds every chunk's "
                "place, because %s",
                reason,
            )
        self._said = reason
        return not reason
