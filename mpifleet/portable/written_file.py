"""A file that appears whole under its name, or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from mpifleet.checkpoint.directory import sync_directory
from mpifleet.errors import CheckpointError


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file to write into; it takes the place of `path` once it is on disk.

    Directories above it are made.  Where anything fails inside, what stood there stays; an OSError
    becomes a CheckpointError that names the file.
    """
    private = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(private, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(private, path)  # noqa: PTH105
        sync_directory(path.parent)
    except OSError as cause:
        raise CheckpointError(f"cannot write {path}: {cause}") from cause
    finally:
        with contextlib.suppress(OSError):
            private.unlink(missing_ok=True)
