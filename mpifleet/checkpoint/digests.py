"""Digests of a checkpoint's bytes: in a small file beside it, checked before HDF5 sees the file.

One flipped bit in HDF5's own metadata can crash its library.  The digests find damage; they are no
protection from somebody who changes both files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from mpifleet.checkpoint.about import About
from mpifleet.errors import CheckpointError

SUFFIX = ".sums"
HASH = "xxh3-128"
SUMS_FORMAT = 1
BLOCK_BYTES = 16 << 20
"""Upper bound of the bytes under one digest, written or checked at once."""
BLOCKS = ', "blocks":'
"""What ends the facts in the first line of a file of digests."""
READERS = 2
"""Threads that check."""
PIECE_BYTES = 1 << 20
"""Read and digested at once: so little is still in the processor's cache when it is digested."""


class Block(NamedTuple):
    """`num_bytes` bytes from `start` on have this digest, as hexadecimal text."""

    start: int
    num_bytes: int
    digest: str


def digest_of(data: Any) -> str:
    """The digest of a buffer's bytes."""
    return xxhash.xxh3_128_hexdigest(data)


def sums_path(path: Path) -> Path:
    """Where the digests of the checkpoint at `path` are."""
    return path.with_name(path.name + SUFFIX)


class Sums(NamedTuple):
    """What a whole file must be: its size, and blocks that cover it in order without a gap.

    about: what it holds, which can be told so without HDF5.
    """

    size: int
    blocks: tuple[Block, ...]
    about: About = About()

    @classmethod
    def of_blocks(cls, blocks: Iterable[Block], about: About = About()) -> Sums:  # noqa: B008
        """Blocks in any order. Raises ValueError where they overlap or leave a gap."""
        ordered, end = tuple(sorted(blocks)), 0
        for block in ordered:
            if block.start != end or block.num_bytes < 1:
                raise ValueError(f"bytes from {end} to {block.start} have no digest")
            end += block.num_bytes
        return cls(end, ordered, about)

    def text(self) -> str:
        """One JSON object, a block per line."""
        facts = {"format": SUMS_FORMAT, "hash": HASH, "size": self.size, **self.about.facts()}
        head = json.dumps(facts)[:-1] + BLOCKS + " [\n"
        return head + ",\n".join(json.dumps(list(block)) for block in self.blocks) + "\n]}\n"

    @classmethod
    def read(cls, path: Path) -> Sums:
        """The digests beside the checkpoint at `path`. Raises CheckpointError."""
        where = sums_path(path)
        try:
            found = json.loads(where.read_text(encoding="utf-8"))
            if (found["format"], found["hash"]) != (SUMS_FORMAT, HASH):
                raise ValueError(f"format {found['format']}, hash {found['hash']!r}")
            blocks = [Block(int(s), int(n), str(text)) for s, n, text in found["blocks"]]
            sums = cls.of_blocks(blocks, About.of(found))
            if sums.size != int(found["size"]):
                raise ValueError(f"its blocks have {sums.size} bytes, not {found['size']}")
        except FileNotFoundError as cause:
            raise CheckpointError(
                f"checkpoint {path} is incomplete: its digests ({where.name}) are missing"
            ) from cause
        except (OSError, ValueError, TypeError, KeyError) as cause:
            raise CheckpointError(f"digests {where} are damaged: {cause}") from cause
        return sums


def missing(size: int, blocks: Iterable[Block]) -> Iterator[tuple[int, int]]:
    """Ranges [start, stop) of a file of `size` bytes that no block covers, at most BLOCK_BYTES."""
    end = 0
    for block in (*sorted(blocks), Block(size, 0, "")):
        for start in range(end, block.start, BLOCK_BYTES):
            yield start, min(start + BLOCK_BYTES, block.start)
        end = max(end, block.start + block.num_bytes)


def digest_rest(descriptor: int, blocks: Sequence[Block]) -> list[Block]:
    """The blocks given and those of all bytes of the file that they leave out, read back."""
    rest = missing(os.fstat(descriptor).st_size, blocks)
    return [*blocks, *(block_at(descriptor, start, stop) for start, stop in rest)]


def block_at(descriptor: int, start: int, stop: int) -> Block:
    """The bytes [start, stop) of a file. Raises what digest_at does."""
    return Block(start, stop - start, digest_at(descriptor, start, stop - start))


def digest_at(descriptor: int, start: int, num_bytes: int, piece: bytearray | None = None) -> str:
    """The digest of so many bytes of a file from there on.

    piece: room to read into, of PIECE_BYTES; made where there is none.  Raises OSError; EOFError
    where the file ends before.
    """
    seen, view, done = xxhash.xxh3_128(), memoryview(piece or bytearray(PIECE_BYTES)), 0
    while done < num_bytes:
        room = view[: min(len(view), num_bytes - done)]
        count = os.preadv(descriptor, [room], start + done)
        if not count:
            raise EOFError(f"the file ends at byte {start + done}")
        seen.update(room[:count])
        done += count
    return seen.hexdigest()


def check(
    path: Path, share: int = 0, num_shares: int = 1, told: Callable[[int], object] | None = None
) -> None:
    """Raise CheckpointError where the file is not what its digests say.

    share: of so many ranks that check one file together each takes every num_shares-th block.
    told: called with the number of bytes of each block found good.  Memory: READERS pieces.
    """
    sums = Sums.read(path)
    descriptor = -1
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        size = os.fstat(descriptor).st_size
        if size != sums.size:
            what = "truncated" if size < sums.size else "too long"
            raise CheckpointError(
                f"checkpoint {path} is {what}: it has {size} bytes, its digests are of {sums.size}"
            )
        for block, is_good in _looked_at(descriptor, sums.blocks[share::num_shares]):
            if not is_good:
                raise CheckpointError(
                    f"checkpoint {path} is damaged: bytes {block.start} to "
                    f"{block.start + block.num_bytes} differ from what was written"
                )
            if told is not None:
                told(block.num_bytes)
    except (OSError, EOFError) as cause:
        raise CheckpointError(f"checkpoint {path} cannot be read: {cause}") from cause
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _looked_at(descriptor: int, blocks: Sequence[Block]) -> Iterator[tuple[Block, bool]]:
    """Each block, and whether it is good; READERS blocks at once."""
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    pieces = [bytearray(PIECE_BYTES) for _ in range(READERS)]
    with ThreadPoolExecutor(READERS) as readers:
        # Not all blocks are handed over at once: a damaged one ends the work early.
        for first in range(0, len(blocks), READERS):
            group = blocks[first : first + READERS]
            for start, num_bytes, _ in blocks[first + READERS : first + 2 * READERS]:
                # Have the disk at work meanwhile.
                os.posix_fadvise(descriptor, start, num_bytes, os.POSIX_FADV_WILLNEED)
            found = readers.map(
                lambda b, piece: digest_at(descriptor, b.start, b.num_bytes, piece), group, pieces
            )
            for block, digest in zip(group, found, strict=True):
                yield block, digest == block.digest
