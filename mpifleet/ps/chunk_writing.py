"""The larger arrays of a compressed checkpoint, written as chunks by all servers together.

There are two roads to the same content.  Compressing takes nearly all the time on both.  Plain
writes need no more than any h5py, and no server waits for another inside a call that it cannot
leave; HDF5's MPI driver is for those who ask for it.
"""

from pathlib import Path
from types import ModuleType
from typing import Any

from mpifleet.checkpoint import MPIO, Block, Newcomer, why_not_collective
from mpifleet.ps.agreement import Trouble, raise_first_failure
from mpifleet.ps.collective_chunks import write_collectively
from mpifleet.ps.placed_chunks import write_placed
from mpifleet.ps.saved_chunks import Borders, SavedArray
from mpifleet.ps.shard import Shard


class ChunkWriter:
    """Writes what one checkpoint after another has in chunks. Its methods are collective.

    mpi, comm: the servers', None in a single process; shard: this server's.
    """

    def __init__(self, mpi: ModuleType | None, comm: Any, shard: Shard) -> None:
        self._mpi, self._comm, self._shard = mpi, comm, shard

    def check(self, driver: str | None) -> None:
        """Raise CheckpointError on every server where one of them cannot write by this driver."""
        if driver is None:
            return
        reason = why_not_collective() if self._comm is not None else "there is no MPI in this job"
        failure = f'driver="{MPIO}" is not possible on server {self._shard.layout.server}: {reason}'
        failure += "; without the driver any h5py writes the same content"
        raise_first_failure(self._comm, failure if reason else "")

    def write(
        self,
        newcomer: Newcomer | None,
        temporary: Path,
        arrays: list[SavedArray],
        level: int,
        driver: str | None,
        blocks: list[Block],
        failure: str,
    ) -> tuple[list[Block], str]:
        """(all digests that this server has to tell, what went wrong on some server).

        newcomer: the laid-out file, on the first server.  temporary: its path.  arrays: all that
        is made of chunks.  level: of gzip.  driver: one that passed `check`.
        blocks: of what this server wrote before.  failure: what went wrong here before; then
        nothing is written.
        """
        trouble = Trouble(self._comm, temporary.parent, failure)
        if not trouble.is_none() or not arrays:
            return blocks, trouble.text
        borders = Borders(self._mpi, self._comm, self._shard.layout.server, arrays)
        to, breathe = (self._comm, newcomer, temporary, borders), self._shard.breathe
        if driver is None:
            blocks += write_placed(*to, level, breathe, trouble)
        else:
            # HDF5 alone knows what it wrote where: the servers read all of the file back.
            blocks = write_collectively(*to, breathe, trouble)
        return blocks, trouble.text
