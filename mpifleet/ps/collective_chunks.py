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
    is_open = trouble.is_none()
    _write_all(comm, file if is_open else None, borders, breathe, trouble)
    if file is not None and is_open:
        with trouble.noted(), serial:
            file.close()
    elif file is not None:
        file.abandon()
    blocks: list[Block] = []
    if trouble.is_none():
        with trouble.noted():
            for block in digest_share(temporary, comm.rank, comm.size):
                blocks.append(block)
                breathe()
    return blocks


def _write_all(
    comm: Any,
    file: CollectiveFile | None,
    borders: Borders,
    breathe: Callable[[], None],
    trouble: Trouble,
) -> None:
    """Write until something goes wrong. Collective; file: None where it already has, everywhere."""
    for array in borders.arrays:
        grid = array.chunks
        boxes = [list(_boxes(array, server)) for server in range(comm.size)]
        for turn in range(max(map(len, boxes))):
            corner: tuple[int, ...] = ()
            values = None
            if turn < len(boxes[comm.rank]):
                first, last = boxes[comm.rank][turn]
                # In trouble too: what others sent must be received.
                elements = borders.elements(array, grid.start(first), grid.start(last))
                corner, values = grid.corner(first), elements.reshape(grid.shape_of(elements.size))
            if file is not None:
                breathe()
                with trouble.noted(), serial:
                    file.write(array.path, corner, values)
                if not trouble.is_none():
                    file = None
    borders.finish()


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
