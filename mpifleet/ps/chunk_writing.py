"""The larger arrays of a compressed checkpoint, written as chunks by all servers together."""

from pathlib import Path
from types import ModuleType
from typing import Any

from mpifleet.checkpoint import Block, Newcomer, why_not_collective
from mpifleet.log import get_logger
from mpifleet.ps.agreement import Trouble, first_failure
from mpifleet.ps.collective_chunks import write_collectively
from mpifleet.ps.placed_chunks import write_placed
from mpifleet.ps.saved_chunks import Borders, saved_arrays
from mpifleet.ps.shard import Shard


class ChunkWriter:
    """Writes what one checkpoint after another has in chunks. `write` is collective.

    mpi, comm: the servers', None in a single process; shard: this server's.
    """

    def __init__(self, mpi: ModuleType | None, comm: Any, shard: Shard) -> None:
        self._mpi, self._comm, self._shard = mpi, comm, shard
        self._said = ""

    def write(
        self, newcomer: Newcomer | None, temporary: Path, level: int, failure: str
    ) -> tuple[list[Block], str]:
        """(digests of what was written, what went wrong on some server). Collective.

        newcomer: the laid-out file, on the first server.  temporary: its path.  level: of gzip.
        failure: what went wrong on this server before; then nothing is written.
        """
        trouble = Trouble(self._comm, temporary.parent, failure)
        arrays = saved_arrays(self._shard)
        if not trouble.is_none() or not arrays:
            return [], trouble.text
        is_collective = self._is_collective()
        borders = Borders(self._mpi, self._comm, self._shard.layout.server, arrays)
        breathe = self._shard.breathe
        if is_collective:
            blocks = write_collectively(self._comm, newcomer, temporary, borders, breathe, trouble)
        else:
            blocks = write_placed(self._comm, newcomer, temporary, borders, level, breathe, trouble)
        borders.finish()
        return blocks, trouble.text

    def _is_collective(self) -> bool:
        """Whether all servers write through HDF5; else the reason is logged, once. Collective."""
        if self._comm is None:
            return False
        reason = first_failure(self._comm, why_not_collective())
        if reason and reason != self._said and self._shard.layout.server == 0:
            get_logger().info("compressed checkpoints: %s", reason)
        self._said = reason
        return not reason
