"""Saving and loading all servers' tables, asked for by a worker or called in a single process."""

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from mpifleet.errors import CheckpointError
from mpifleet.ps.client import unpack_buffers
from mpifleet.ps.loading import Loader
from mpifleet.ps.saving import Saver
from mpifleet.ps.shard import Shard
from mpifleet.ps.spec import ShardLayout


class Storage:
    """`save` and `load` are collective over the servers.

    mpi, comm: None in a single process; layouts: of all servers; shard: this server's.
    """

    def __init__(
        self, mpi: ModuleType | None, comm: Any, layouts: Sequence[ShardLayout], shard: Shard
    ) -> None:
        self._saver = Saver(mpi, comm, layouts, shard)
        self._loader = Loader(comm, shard)

    def save(self, directory: Path, meta: dict[str, Any], buffers: dict[str, np.ndarray]) -> None:
        """Write one file. Collective. Raises CheckpointError on every server."""
        self._saver.save(directory, meta, buffers)

    def load(self, directory: Path) -> None:
        """Replace the tables. Collective. Raises CheckpointError on every server."""
        self._loader.load(directory)

    def answer_save(self, request: dict[str, Any], payload: bytes) -> bytes:
        """Serve a SAVE request: empty when done, else what went wrong."""
        facts = request["buffers"] if request["has_payload"] else []
        buffers = unpack_buffers(facts, payload)
        try:
            self.save(Path(request["directory"]), request["meta"], buffers)
        except CheckpointError as error:
            return str(error).encode()
        return b""

    def answer_load(self, request: dict[str, Any], _: bytes) -> bytes:
        """Serve a LOAD request: empty when done, else what went wrong."""
        try:
            self.load(Path(request["directory"]))
        except CheckpointError as error:
            return str(error).encode()
        return b""
