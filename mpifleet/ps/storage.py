"""Saving and loading all servers' tables, asked for by a worker or called in a single process."""

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from mpifleet.checkpoint import Keep
from mpifleet.errors import CheckpointError
from mpifleet.ps.client import unpack_buffers
from mpifleet.ps.loading import Loader
from mpifleet.ps.saving import SaveOptions, Saver
from mpifleet.ps.shard import Shard


class Storage:
    """`save` and `load` are collective over the servers.

    mpi, comm: None in a single process; shard: this server's.
    """

    def __init__(self, mpi: ModuleType | None, comm: Any, shard: Shard) -> None:
        self._saver = Saver(mpi, comm, shard)
        self._loader = Loader(comm, shard)

    def save(
        self,
        directory: Path,
        meta: dict[str, Any],
        buffers: dict[str, np.ndarray],
        options: SaveOptions,
    ) -> None:
        """Write one file. Collective. Raises CheckpointError on every server."""
        self._saver.save(directory, meta, buffers, options)

    def poll(self) -> None:
        """Let a checkpoint that is written behind training take its next step. Not collective."""
        self._saver.poll()

    def settle(self) -> None:
        """Wait for it. Collective. Raises CheckpointError on every server when it failed."""
        self._saver.settle()

    def check(self, path: Path) -> None:
        """Check a file's digests. Collective. Raises CheckpointError on every server."""
        self._saver.settle()
        self._loader.check(path)

    def load(self, directory: Path, checked: bool = False) -> None:
        """Replace the tables. Collective. Raises CheckpointError on every server."""
        self._saver.settle()
        self._loader.load(directory, checked)

    def answer_save(self, request: dict[str, Any], payload: bytes) -> bytes:
        """Serve a SAVE request: empty when done, else what went wrong."""
        try:
            if request["directory"] is None:
                self.settle()
            else:
                facts = request["buffers"] if request["has_payload"] else []
                options = SaveOptions(
                    request["wait"],
                    request["refuse_busy"],
                    Keep(*request["keep"]),
                    request["level"],
                )
                buffers = unpack_buffers(facts, payload)
                self.save(Path(request["directory"]), request["meta"], buffers, options)
        except CheckpointError as error:
            return str(error).encode()
        return b""

    def answer_load(self, request: dict[str, Any], _: bytes) -> bytes:
        """Serve a LOAD request: empty when done, else what went wrong."""
        try:
            path = Path(request["path"])
            if request["check_only"]:
                self.check(path)
            else:
                self.load(path, checked=True)
        except CheckpointError as error:
            return str(error).encode()
        return b""
