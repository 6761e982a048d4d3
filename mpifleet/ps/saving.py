"""All servers' tables as one checkpoint, written side by side.

The first server lays the file out; then each writes its own shard where it belongs, and tells the
first, which publishes the file once all of it is on disk.  The directory must be the same on all
nodes.  Behind training the same happens on a copy of the shard, in a thread that calls neither MPI
nor HDF5.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from mpifleet.checkpoint import (
    MPIO,
    About,
    Keep,
    Newcomer,
    Part,
    Places,
    lay_out,
    link_to,
    writing,
)
from mpifleet.checkpoint.digests import BLOCK_BYTES
from mpifleet.errors import CheckpointError
from mpifleet.log import get_logger
from mpifleet.mpi import bcast_json
from mpifleet.partition import pieces
from mpifleet.patience import Doze
from mpifleet.ps.agreement import first_failure, raise_first_failure
from mpifleet.ps.chain import Chain
from mpifleet.ps.chunk_writing import ChunkWriter
from mpifleet.ps.save_content import Content
from mpifleet.ps.save_writing import Writing
from mpifleet.ps.saved_chunks import saved_arrays
from mpifleet.ps.shard import Shard
from mpifleet.ps.told import Teller
from mpifleet.states import SavedState

_TOKEN_PATIENCE_S = 10.0


@dataclass(frozen=True)
class SaveOptions:
    """How a checkpoint is written.

    wait: return when it is there; else when the tables are copied.  refuse_busy: raise
    CheckpointError while an earlier one is still being written, instead of waiting for it.
    table: the only one that is saved, None for all there is.  mode: "full"; "base", from which on
    changes are noted; "delta", what changed since the last base or delta.
    level: of gzip, 0 for none; a compressed one is always waited for.  driver: "mpio" to write what
    is compressed through HDF5's MPI driver, else None.  Raises CheckpointError for other drivers,
    and for one without a level.
    """

    wait: bool = True
    refuse_busy: bool = False
    keep: Keep = field(default_factory=Keep)
    table: str | None = None
    mode: str = "full"
    level: int = 0
    driver: str | None = None

    def __post_init__(self) -> None:
        if self.driver not in (None, MPIO):
            raise CheckpointError(f'driver={self.driver!r}; use None or "{MPIO}"')
        if self.driver and not self.level:
            raise CheckpointError(
                f'driver="{MPIO}" is for compressed checkpoints alone: HDF5 writes no array of '
                'others; add compression="gzip", or leave the driver out'
            )

    @classmethod
    def of(cls, facts: dict[str, Any]) -> "SaveOptions":
        """The inverse of dataclasses.asdict."""
        return cls(**{**facts, "keep": Keep(**facts["keep"])})


class Saver:
    """Writes the shards of all servers. `save` and `settle` are collective over `comm`.

    mpi, comm: None in a single process; shard: this server's.
    """

    def __init__(self, mpi: ModuleType | None, comm: Any, shard: Shard) -> None:
        self._comm = comm
        self._shard = shard
        self._server = shard.layout.server
        self._teller = Teller(mpi, comm)
        self._chain = Chain(shard)
        self._chunks = ChunkWriter(mpi, comm, shard)
        self._behind: Writing | None = None

    def save(
        self,
        directory: Path,
        meta: dict[str, Any],
        buffers: dict[str, np.ndarray],
        options: SaveOptions,
        states: Sequence[SavedState] = (),
    ) -> None:
        """Write one file. Collective. Raises CheckpointError on every server."""
        self._chunks.check(options.driver)
        busy = self._behind is not None and not self._behind.poll()
        if options.refuse_busy:
            failure = "an earlier checkpoint is still being written" if busy else ""
            raise_first_failure(self._comm, failure)
        self.settle()
        content, about = self._content(directory, options)
        under_way = self._begin(directory, content, about, meta, buffers, states, options)
        self._chain.begin(about, directory)
        parts = content.parts(self._shard, under_way.places)
        if options.wait or options.level:
            under_way.run(_breathing(parts, self._shard.breathe))
            if options.level:
                self._write_chunks(under_way, content, options)
            self._behind = under_way
            self.settle()
        else:
            copies = [(o, a.copy()) for o, a in _breathing(parts, self._shard.breathe)]
            under_way.run_behind(copies)
            self._behind = under_way

    def _write_chunks(self, under_way: Writing, content: Content, options: SaveOptions) -> None:
        """Write the arrays that are compressed. Collective."""
        if not options.wait and self._server == 0:
            get_logger().info(
                "wait=False: training waits all the same until a compressed checkpoint is written"
            )
        arrays = saved_arrays(self._shard, content)
        under_way.run_chunks(self._chunks, arrays, options.level, options.driver)

    def _content(self, directory: Path, options: SaveOptions) -> tuple[Content, About]:
        """What goes into the file. Collective. Raises CheckpointError on every server."""
        if options.table is not None:
            return Content.of(self._shard, options.table), About("table", options.table)
        about = self._chain.about(options.mode, directory)
        if options.mode == "delta":
            return Content.of_delta(self._comm, self._shard), about
        return Content.of(self._shard), about

    def poll(self) -> None:
        """Let a checkpoint behind training take its next step. Quick; not collective."""
        if self._behind is not None:
            self._behind.poll()

    def settle(self) -> None:
        """Return once nothing is being written. Collective.

        Raises CheckpointError on every server where the last checkpoint failed, once.
        """
        last, self._behind = self._behind, None
        doze = Doze()
        while last is not None and not last.poll():
            self._shard.breathe()
            doze.pause()
        failure = first_failure(self._comm, last.failure if last else "")
        self._chain.end(failure, last.link if last else None)
        if failure:
            raise CheckpointError(failure)

    def loaded(self, path: Path, kind: str) -> None:
        """The tables are all those of this file: of a chain, the next delta follows it. Collective.

        Raises CheckpointError on every server.
        """
        if kind not in ("base", "delta"):
            return
        link, failure = None, ""
        try:
            link = link_to(path) if self._server == 0 else None
        except CheckpointError as error:
            failure = str(error)
        raise_first_failure(self._comm, failure)
        self._chain.loaded(path, link)

    def _begin(
        self,
        directory: Path,
        content: Content,
        about: About,
        meta: dict[str, Any],
        buffers: dict[str, np.ndarray],
        states: Sequence[SavedState],
        options: SaveOptions,
    ) -> Writing:
        """The file laid out, its places known everywhere. Collective. Raises CheckpointError."""
        newcomer: Newcomer | None = None
        places: Places = {}
        failure = temporary = token = ""
        if self._server == 0:
            try:
                with writing(directory):
                    newcomer = Newcomer(directory, about, self._chain.spared(about, directory))
                    what = (content.dense, list(content.sparse.values()), buffers, meta, states)
                    places = lay_out(newcomer, *what, options.level)
                    temporary = str(newcomer.temporary)
                    token = f"{temporary}.{secrets.token_hex(8)}"
                    Path(token).touch(mode=0o600)
            except CheckpointError as error:
                failure = str(error)
        if self._comm is not None:
            told = bcast_json(self._comm, (failure, temporary, token, places))
            failure, temporary, token, places = told
        failure = failure or self._check_same_directory(directory, Path(token))
        if failure:
            if newcomer is not None:
                newcomer.close()
            raise CheckpointError(failure)
        return Writing(newcomer, Path(temporary), places, self._teller, directory, options.keep)

    def _check_same_directory(self, directory: Path, token: Path) -> str:
        """What is wrong with the directory, "" when all servers see the same one. Collective.

        token: a file of a name that no other writer would make.
        """
        failure = ""
        if not appears(token):
            failure = f"{directory} is not the same directory on the node of server {self._server}"
        failure = first_failure(self._comm, failure)
        if self._server == 0:
            token.unlink(missing_ok=True)
        return failure


def _breathing(parts: Iterable[Part], breathe: Callable[[], None]) -> Iterator[Part]:
    """The same bytes in parts of at most BLOCK_BYTES, with a breath before each."""
    for offset, array in parts:
        data = array.reshape(-1).view(np.uint8)
        for start, stop in pieces(data.size, BLOCK_BYTES):
            breathe()
            yield offset + start, data[start:stop]


def appears(path: Path) -> bool:
    """Whether a file becomes visible; network file systems may take a while."""
    end_s = time.monotonic() + _TOKEN_PATIENCE_S
    while not path.exists():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.05)
        if path.parent.is_dir():
            next(path.parent.iterdir(), None)  # refreshes what a network file system remembers
    return True
