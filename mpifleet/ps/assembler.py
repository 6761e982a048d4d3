"""Messages that came through a lane in pieces, put together one at a time."""

from collections.abc import Callable

import numpy as np

from mpifleet.partition import chunks
from mpifleet.ps.mailbox import Lane, ServerMailbox
from mpifleet.ps.message import Header, Word


class Assembler:
    """Puts the pieces of a lane's messages together, one worker's at a time.

    A message that came in one piece is handed out as a view of the lane itself. One that did not is
    staged: memory is the largest message however many workers there are, the others wait in their
    lanes.  breathe: called between chunks of copying.
    """

    def __init__(
        self, mailbox: ServerMailbox, lane: Lane, breathe: Callable[[], None] = lambda: None
    ) -> None:
        self._mailbox = mailbox
        self._lane = lane
        self._breathe = breathe
        self._worker: int | None = None
        self._staged = np.empty(0, np.uint8)

    def admits(self, worker: int) -> bool:
        """False where the lane holds a piece and another worker's message is being staged."""
        if self._worker in (None, worker):
            return True
        header = self._mailbox.header(worker, self._lane)
        return header.num_bytes == header.total_bytes

    def first(self, workers: np.ndarray) -> int | None:
        """The first of `workers` (int64 [n], their lanes full) that this admits, or None."""
        admitted = workers
        if self._worker is not None:
            headers = self._mailbox.headers(self._lane)[workers]
            whole = headers[:, Word.NUM_BYTES] == headers[:, Word.TOTAL_BYTES]
            admitted = workers[whole | (workers == self._worker)]
        return int(admitted[0]) if admitted.size else None

    def take(self, worker: int) -> tuple[Header, np.ndarray] | None:
        """(header, message) when worker's full lane completes a message, else None.

        The lane of a complete message stays full: the caller clears it when it is done, and takes
        nothing else before that.
        """
        header = self._mailbox.header(worker, self._lane)
        payload = self._mailbox.payload(worker, self._lane, header.num_bytes)
        if header.num_bytes == header.total_bytes:
            return header, payload
        if self._worker not in (None, worker):
            return None
        if self._worker is None:
            self._worker = worker
            # Kept from message to message: giving back so much memory takes milliseconds.
            if self._staged.size < header.total_bytes:
                self._staged = np.empty(header.total_bytes, np.uint8)
        piece = self._staged[header.start : header.start + header.num_bytes]
        for start, stop in chunks(piece.size, 1):
            piece[start:stop] = payload[start:stop]
            self._breathe()
        if header.start + header.num_bytes < header.total_bytes:
            self._mailbox.clear(worker, self._lane)
            return None
        self._worker = None
        return header, self._staged[: header.total_bytes]
