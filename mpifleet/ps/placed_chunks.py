"""Chunks of a compressed checkpoint through one writer of HDF5: any h5py will do.

The first server has the file open.  Every server compresses its own chunks, tells their sizes,
hears their places from the first and writes them there, all servers at the same time.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mpifleet.checkpoint import Block, ChunkPlaces, Newcomer, Sized, packed, write_unsynced
from mpifleet.mpi import bcast_json, gather_json
from mpifleet.ps.agreement import Trouble
from mpifleet.ps.saved_chunks import Borders, SavedArray

PIECE_BYTES = 16 << 20
"""Upper bound of what a server compresses, holds and writes at once; but at least one chunk."""


def write_placed(
    comm: Any,
    newcomer: Newcomer | None,
    temporary: Path,
    borders: Borders,
    level: int,
    breathe: Callable[[], None],
    trouble: Trouble,
) -> list[Block]:
    """Write all chunks and have them on disk; digests of this server's. Collective.

    comm: the servers', None in a single process.  newcomer: the file, on the first server.
    What goes wrong is in `trouble`.  Memory: PIECE_BYTES twice.
    """
    blocks: list[Block] = []
    places: ChunkPlaces | None = None
    chunks = borders.chunks()
    with contextlib.ExitStack() as stack:
        descriptor = -1
        with trouble.noted():
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CLOEXEC)
            stack.callback(os.close, descriptor)
            places = ChunkPlaces(newcomer) if newcomer is not None else None
        is_last = False
        while not is_last:
            piece: list[tuple[Sized, np.ndarray]] = []
            with trouble.noted():
                piece += _piece(chunks, level, breathe)
            offsets, is_last = _offsets(comm, places, [size for size, _ in piece], trouble)
            if not trouble.text:
                with trouble.noted():
                    parts = zip(offsets, (data for _, data in piece), strict=True)
                    blocks += write_unsynced(descriptor, parts)
        with trouble.noted():
            if places is not None:
                places.close()
            if not trouble.text:
                os.fdatasync(descriptor)
    borders.drain(chunks)
    return blocks


def _piece(
    chunks: Iterator[tuple[SavedArray, int, np.ndarray]], level: int, breathe: Callable[[], None]
) -> Iterator[tuple[Sized, np.ndarray]]:
    """The next PIECE_BYTES of chunks, compressed; none where all are done."""
    done = 0
    for array, chunk, elements in chunks:
        breathe()
        small, mask = packed(elements, array.chunks, level)
        size = Sized(array.path, array.chunks.corner(chunk), len(small), mask)
        yield size, np.frombuffer(small, np.uint8)
        done += elements.nbytes
        if done >= PIECE_BYTES:
            return


def _offsets(
    comm: Any, places: ChunkPlaces | None, sized: list[Sized], trouble: Trouble
) -> tuple[list[int], bool]:
    """(places of this server's chunks, whether this was the last round). Collective.

    In trouble there are none, and it was the last.
    """
    mine = (trouble.text, sized)
    told = gather_json(comm, mine) if comm is not None else [mine]
    trouble.text = next((text for text, _ in told if text), "")
    found: list[list[int]] = []
    if places is not None and not trouble.text:
        with trouble.noted():
            found = [places.place(Sized(*each) for each in theirs) for _, theirs in told]
    server = 0
    if comm is not None:
        server = comm.rank
        trouble.text, found = bcast_json(comm, (trouble.text, found))
    if trouble.text:
        return [], True
    return found[server], not any(theirs for _, theirs in told)
