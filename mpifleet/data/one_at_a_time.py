"""One process at a time makes the files of a directory, while others that want them wait."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from mpifleet.errors import DataError

__all__ = ["LOCK_NAME", "one_at_a_time"]

LOCK_NAME = ".lock"
_LOOK_AGAIN_S = 0.1
# What a file system without locks says.  Files must be renamed into place anyway, so that several
# makers only repeat each other's work there.
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}


@contextlib.contextmanager
def one_at_a_time(directory: str | os.PathLike[str], limit_s: float) -> Iterator[None]:
    """Holds the lock of `directory`, which is made if need be, for the time of the block.

    Look again inside the block whether the files are there: another process may have made them.
    The lock is a file that stays; it is free as soon as its holder ends, however that happens.
    Raises DataError when another process holds it for `limit_s` seconds.
    """
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    with open(root / LOCK_NAME, "ab") as stream:
        give_up_s = time.monotonic() + limit_s
        while not _taken(stream.fileno()):
            if time.monotonic() > give_up_s:
                raise DataError(
                    f"{root}: another process has been making the files here for {limit_s:.0f} s; "
                    "end it or wait for it, then start again"
                )
            time.sleep(_LOOK_AGAIN_S)
        yield


def _taken(fd: int) -> bool:
    """Whether the lock is ours; closing the file gives it back."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True
