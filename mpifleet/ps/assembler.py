"""Messages that came through a lane in pieces, put together one at a time."""

import numpy as np

from mpifleet.ps.mailbox import Lane, ServerMailbox
from mpifleet.ps.message import Header


class Assembler:
    """Puts the pieces of a lane's messages together, one worker's at a time.

    A message that came in one piece is handed out as a view of the lane itself. One that did not is
    staged: memory is one message however many workers there are, the others wait in their lanes.
    """

    def __init__(self, mailbox: ServerMailbox, lane: Lane) -> None:
        self._mailbox = mailbox
        self._lane = lane
        self._worker: int | None = None
        self._staged = np.empty(0, np.uint8)

    def admits(self, worker: int) -> bool:
        """False where the lane holds a piece and another worker's message is being staged."""
        if self._worker in (None, worker):
            return True
        header = self._mailbox.header(worker, self._lane)
        return header.num_bytes == header.total_bytes

    def take(self, worker: int) -> tuple[Header, np.ndarray] | None:
        """(header, message) when worker's full lane completes a message, else None.

        The lane of a complete message stays full: the caller clears it when it is done.
        """
        header = self._mailbox.header(worker, self._lane)
        payload = self._mailbox.payload(worker, self._lane, header.num_bytes)
        if header.num_bytes == header.total_bytes:
            return header, payload
        if self._worker not in (None, worker):
            return None
        if self._worker is None:
            self._worker = worker
            self._staged = np.empty(header.total_bytes, np.uint8)
        self._staged[header.start : header.start + header.num_bytes] = payload
        if header.start + header.num_bytes < header.total_bytes:
            self._mailbox.clear(worker, self._lane)
            return None
        message, self._worker = self._staged, None
        return header, message
