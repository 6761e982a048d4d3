"""What every server tells the first one, without anybody waiting."""

import json
from types import ModuleType
from typing import Any

import numpy as np

from mpifleet.mpi import serial

_TAG = 2


class Teller:
    """Each server but the first tells one JSON-able value at a time; the first hears them all.

    mpi, comm: the servers', None in a single process.  Nothing here is collective.
    """

    def __init__(self, mpi: ModuleType | None, comm: Any) -> None:
        self._mpi, self._comm = mpi, comm
        self._sent: Any = None
        self._heard: dict[int, Any] = {}

    def tell(self, value: Any) -> None:
        """On the first server nothing."""
        if self._comm is None or self._comm.rank == 0:
            return
        assert self._mpi is not None
        data = np.frombuffer(json.dumps(value).encode(), np.uint8)
        with serial:
            self._sent = self._comm.Isend([data, self._mpi.BYTE], 0, _TAG)
        self._kept = data

    def is_told(self) -> bool:
        """Whether what was told last has left."""
        with serial:
            return self._sent is None or bool(self._sent.Test())

    def hear(self) -> list[Any] | None:
        """On the first server: what all others told, in their order; None while one is missing."""
        if self._comm is None:
            return []
        assert self._mpi is not None
        with serial:
            status = self._mpi.Status()
            while self._comm.Iprobe(self._mpi.ANY_SOURCE, _TAG, status):
                source = status.Get_source()
                if source in self._heard:
                    break  # of the next checkpoint
                data = np.empty(status.Get_count(self._mpi.BYTE), np.uint8)
                self._comm.Recv([data, self._mpi.BYTE], source, _TAG)
                self._heard[source] = json.loads(data.tobytes())
        if len(self._heard) < self._comm.size - 1:
            return None
        heard, self._heard = self._heard, {}
        return [heard[source] for source in sorted(heard)]
