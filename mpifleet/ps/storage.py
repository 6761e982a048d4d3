"""Saving and loading all servers' tables, asked for by a worker or called in a single process."""

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from mpifleet.errors import CheckpointError
from mpifleet.log import get_logger
from mpifleet.ps.client import unpack_buffers
from mpifleet.ps.load_report import EVERYTHING, LoadOptions, LoadReport
from mpifleet.ps.loading import Loader
from mpifleet.ps.saving import SaveOptions, Saver
from mpifleet.ps.shard import Shard
from mpifleet.states import SavedState, unpack_states


class Storage:
    """`save` and `load` are collective over the servers.

    mpi, comm: None in a single process; shard: this server's.
    """

    def __init__(self, mpi: ModuleType | None, comm: Any, shard: Shard) -> None:
        self._shard = shard
        self._saver = Saver(mpi, comm, shard)
        self._loader = Loader(comm, shard)

    def save(
        self,
        directory: Path,
        meta: dict[str, Any],
        buffers: dict[str, np.ndarray],
        options: SaveOptions,
        states: Sequence[SavedState] = (),
    ) -> None:
        """Write one file. Collective. Raises CheckpointError on every server."""
        self._saver.save(directory, meta, buffers, options, states)

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

    def load(
        self, directory: Path, checked: bool = False, options: LoadOptions = EVERYTHING
    ) -> LoadReport:
        """Replace the tables. Collective. Raises CheckpointError on every server."""
        self._saver.settle()
        report = self._loader.load(directory, checked, options)
        if report.is_whole and options.table is None:
            self._saver.loaded(Path(report.path), report.kind)
        return report

    def start_from(self, directory: Path | None, strict: bool) -> None:
        """Give every row its first value: a checkpoint's, or its initializer's. Collective.

        strict=False: what the checkpoint does not have begins as without it; server 0 says what.
        """
        if directory is None or not strict:
            self._shard.initialize_rows()
        if directory is not None:
            report = self.load(directory, options=LoadOptions(strict))
            if not strict and self._shard.layout.server == 0:
                get_logger().info("%s", report.text())

    def answer_save(self, request: dict[str, Any], payload: bytes) -> bytes:
        """Serve a SAVE request: empty when done, else what went wrong."""
        try:
            if request["directory"] is None:
                self.settle()
            else:
                facts = request["buffers"] if request["has_payload"] else []
                options = SaveOptions.of(request["options"])
                size = request["states_bytes"] if request["has_payload"] else 0
                buffers = unpack_buffers(facts, payload)
                states = unpack_states(payload[len(payload) - size :])
                self.save(Path(request["directory"]), request["meta"], buffers, options, states)
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
                self.load(path, True, LoadOptions(request["strict"], request["table"]))
        except CheckpointError as error:
            return str(error).encode()
        return b""
