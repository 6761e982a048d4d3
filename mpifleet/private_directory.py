"""A directory beside a user's file for what is needed only for a while."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def private_directory(parent: Path, prefix: str) -> Iterator[Path]:
    """A new directory in `parent`, of mode 0700, removed with all that is in it at the end.

    Also removes those of this user, called `prefix` and more, whose processes were killed: one is
    locked while its process lives.  On a file system without locks they stay.  Raises OSError.
    """
    for left in sorted(parent.glob(f"{prefix}*")):
        with contextlib.suppress(OSError):
            _remove_abandoned(left)
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if path.exists():
            break
        os.close(descriptor)  # another found it before it was locked
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


def _remove_abandoned(path: Path) -> None:
    """Raises OSError where it is no directory of ours, or its process lives."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_uid == os.geteuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)
    finally:
        os.close(descriptor)
