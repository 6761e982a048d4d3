"""Mailbox memory without MPI: one server's lanes in plain memory, filled as a worker would."""

import numpy as np

from mpifleet.ps.mailbox import MailboxLayout, ServerMailbox
from mpifleet.ps.message import HEADER_BYTES, NO_VERSION, Header, Kind


class PlainWindow:
    """The part of a Window that one process uses on its own memory."""

    def __init__(self, num_bytes):
        self.local = np.zeros(num_bytes, np.uint8)

    def read(self, _rank, offset, out):
        out.reshape(-1).view(np.uint8)[:] = self.local[offset : offset + out.nbytes]

    get = read

    def store(self, _rank, offset, values):
        self.local[offset : offset + values.nbytes] = values.reshape(-1).view(np.uint8)

    put = store

    def flush(self, _rank):
        pass

    def sync(self):
        pass


class Lanes:
    """A server's mailbox and what workers deliver to it, piece by piece."""

    def __init__(self, num_workers, capacity=4096):
        self.layout = MailboxLayout(num_workers, (capacity,) * 4)
        self.window = PlainWindow(self.layout.num_bytes)
        self.server = ServerMailbox(self.window, self.layout, 0)
        self._sequence = 0

    def is_full(self, worker, lane):
        """Whether the lane holds something."""
        return bool(self.server.poll()[worker, lane])

    def deliver(
        self,
        worker,
        lane,
        message,
        *,
        kind=Kind.STEP,
        step=0,
        start=0,
        stop=None,
        version=NO_VERSION,
        argument=0,
    ):
        """What a worker does to deliver one piece [start, stop) of a message (uint8)."""
        assert not self.is_full(worker, lane), "a worker waits for its lane to be empty"
        piece = message[start:stop]
        header = Header(kind, step, argument, message.size, start, piece.size, version)
        base = self.layout.lane(worker, lane)
        self.window.put(0, base, header.encode())
        self.window.put(0, base + HEADER_BYTES, piece)
        self._sequence += 1
        self.window.store(0, self.layout.flags(worker) + lane * 8, np.array([self._sequence]))
        return self._sequence
