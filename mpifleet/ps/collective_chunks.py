"""Chunks of a compressed checkpoint through HDF5's MPI driver: all servers hold the file open."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mpifleet.checkpoint import Block, CollectiveFile, Newcomer, digest_share, reserve
from mpifleet.mpi import serial
from mpifleet.ps.agreement import Trouble
from mpifleet.ps.saved_chunks import Borders, SavedArray

PIECE_BYTES = 16 << 20
"""Upper bound of what a server writes at once, far below the 2 GiB at which MPI's file operations
break; but at least one chunk."""


def write_collectively(
    comm: Any,
    newcomer: Newcomer | None,
    temporary: Path,
    borders: Borders,
    breathe: Callable[[], None],
    trouble: Trouble,
) -> list[Block]:
    """Write all chunks and have them on disk; digests of this server's share. Collective.

    Array by array, a box of whole chunks of every server at a time; servers agree after each.
    What goes wrong is in `trouble`.  The space is reserved before: where some server cannot write
    in the middle of HDF5's call, others may wait for it in there.
    """
    file: CollectiveFile | None = None
    with trouble.noted():
        if newcomer is not None:
            reserve(newcomer.descriptor, sum(array.num_bytes for array in borders.arrays))
    if trouble.is_none():
        with trouble.noted(), serial:
            file = CollectiveFile(temporary, comm)
    is_well = trouble.is_none()
    for array in borders.arrays:
        grid = array.chunks
        boxes = [list(_boxes(array, server)) for server in range(comm.size)]
        for turn in range(max(map(len, boxes))):
            corner: tuple[int, ...] = ()
            values = None
            if turn < len(boxes[comm.rank]):
                first, last = boxes[comm.rank][turn]
                elements = borders.elements(array, grid.start(first), grid.start(last))
                corner, values = grid.corner(first), elements.reshape(grid.shape_of(elements.size))
            if is_well:
                breathe()
                with trouble.noted(), serial:
                    assert file is not None
                    file.write(array.path, corner, values)
                is_well = trouble.is_none()
    borders.finish()
    with trouble.noted(), serial:
        if file is not None:
            file.close()
    if trouble.is_none():
        with trouble.noted():
            return digest_share(temporary, comm.rank, comm.size)
    return []


def _boxes(array: SavedArray, server: int) -> Iterator[tuple[int, int]]:
    """The chunks of a server in boxes [first, last) of at most PIECE_BYTES, each within a row."""
    grid = array.chunks
    most = max(1, PIECE_BYTES // (grid.size * grid.itemsize))
    first, end = array.owned(server)
    while first < end:
        row_end = (first // grid.per_row + 1) * grid.per_row
        last = min(end, row_end, first + most)
        yield first, last
        first = last
