"""The file that HDF5 writes into: a failing disk becomes one error that HDF5 never sees.

HDF5 cannot close a file whose last writes fail; it keeps broken handles and may crash the process
later. So the first error is kept here, later writes are dropped, HDF5 closes in peace, and the
writer then asks `check`.
"""

from __future__ import annotations

import io
import os
from typing import Any


class Sink(io.RawIOBase):
    """A seekable binary file over an open descriptor, which stays the caller's.

    After the first failed operation nothing more is written and reads past what is on disk give
    zeros; `check` raises that operation's OSError.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._position = 0
        self._error: OSError | None = None

    def check(self) -> None:
        """Raise the OSError of the first operation that failed, if one did."""
        if self._error is not None:
            raise self._error

    def readable(self) -> bool:
        """True: HDF5 reads back its own metadata."""
        return True

    def writable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a byte offset; from the end of the file with SEEK_END."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position}.get(whence)
        if start is None:
            start = os.fstat(self._descriptor).st_size
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        """The byte offset of the next read or write."""
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` from the current offset; zeros where the file ends or cannot be read."""
        view = memoryview(buffer).cast("B")
        found = b""
        try:
            found = os.pread(self._descriptor, len(view), self._position)
        except OSError as error:
            self._keep(error)
        view[: len(found)] = found
        view[len(found) :] = bytes(len(view) - len(found))
        self._position += len(view)
        return len(view)

    def write(self, data: Any) -> int:
        """Write all of `data` at the current offset, or drop it after an error."""
        view = memoryview(data).cast("B")
        written = 0
        try:
            while self._error is None and written < len(view):
                at = self._position + written
                written += os.pwrite(self._descriptor, view[written:], at)
        except OSError as error:
            self._keep(error)
        self._position += len(view)
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        """Set the file's length in bytes (None: the current offset)."""
        wanted = self._position if size is None else size
        if self._error is None:
            try:
                os.ftruncate(self._descriptor, wanted)
            except OSError as error:
                self._keep(error)
        return wanted

    def _keep(self, error: OSError) -> None:
        if self._error is None:
            self._error = error
