"""A directory of numbered checkpoints: which is the newest, how a new one comes in, which go.

model-000007.h5        a whole checkpoint, never changed again
model-000007.h5.sums   its digests; without them it is no checkpoint
latest                 the name of the newest, as text
.model-000008.h5.tmp   one that is being written, locked by its writer
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mpifleet.checkpoint.about import About
from mpifleet.checkpoint.chain import about_of, check_continues, members, units
from mpifleet.checkpoint.digests import Block, Sums, digest_rest, sums_path
from mpifleet.errors import CheckpointError
from mpifleet.log import get_logger

LATEST = "latest"
_NUMBERED = re.compile(r"model-(\d{6,})\.h5")
_TEMPORARY = re.compile(r"\.model-(\d{6,})\.h5\.tmp(\..+)?")
OLD_NAME = "model.h5"
"""Of format version 1: one file per directory, without digests."""


@dataclass(frozen=True)
class Keep:
    """Which checkpoints of a directory stay: the newest `last`, and every one whose number is a
    multiple of `every` (0 for none).  Raises CheckpointError for numbers that cannot be.
    """

    last: int = 1
    every: int = 0

    def __post_init__(self) -> None:
        for name, least in (("last", 1), ("every", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise CheckpointError(f"keep_{name}={value!r}; use a whole number, {least} or more")

    def spares(self, number: int) -> bool:
        """Whether this one stays however old it is."""
        return bool(self.every) and number % self.every == 0


def name_of(number: int) -> str:
    """The file name of a checkpoint."""
    return f"model-{number:06d}.h5"


def _temporary(directory: Path, number: int) -> Path:
    """Where a checkpoint is until it is whole."""
    return directory / f".{name_of(number)}.tmp"


def numbers(directory: Path) -> list[int]:
    """The numbers of the complete checkpoints, ascending: those that have their digests."""
    found = {path.name for path in directory.iterdir()} if directory.is_dir() else set()
    names = (_NUMBERED.fullmatch(name) for name in found)
    return sorted(int(m[1]) for m in names if m and m.string + ".sums" in found)


def newest(where: Path) -> Path:
    """The file to read: `where` itself, or the newest complete checkpoint of that directory.

    What `latest` names counts, where it is complete; else the highest number.  A delta is complete
    where all that it follows is.  Raises CheckpointError where there is none.
    """
    if not where.is_dir():
        if where.is_file():
            return where
        raise CheckpointError(f"no checkpoint at {where}")
    there = numbers(where)
    with contextlib.suppress(OSError, UnicodeDecodeError):
        named = _NUMBERED.fullmatch((where / LATEST).read_text(encoding="utf-8").strip())
        if named and int(named[1]) in there:
            there.append(int(named[1]))
    if there:
        return _newest_whole([where / name_of(number) for number in reversed(there)])
    if (where / OLD_NAME).is_file():
        return where / OLD_NAME
    raise CheckpointError(f"no checkpoint at {where}: it holds no complete {name_of(1)} or later")


def _newest_whole(paths: list[Path]) -> Path:
    """The first that is no delta or has all that it follows. Raises the first one's error."""
    broken: list[str] = []
    for path in paths:
        try:
            members(path)
        except CheckpointError as error:
            broken.append(str(error))
            continue
        if broken:
            get_logger().warning("%s; %s is the newest complete one", broken[0], path)
        return path
    raise CheckpointError(broken[0])


def is_checkable(path: Path) -> bool:
    """Whether a checkpoint must have digests: all but version 1's."""
    return path.name != OLD_NAME or sums_path(path).exists()


class Newcomer:
    """A checkpoint that is being written: a private file, locked while its writer lives.

    Its number is above all others, also those that others are writing now.  Making one removes what
    writers left that were killed.  spared: see `prune`.  Raises OSError; CheckpointError where the
    directory is another's or has not what this one follows.
    """

    def __init__(
        self,
        directory: Path,
        about: About = About(),  # noqa: B008 -- frozen
        spared: str = "",
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.about, self.spared = directory, about, spared
        remove_leftovers(directory)
        if about.follows is not None:
            check_continues(directory, about.follows)
        for number in numbers(directory)[-1:]:
            about.check_goes_with(about_of(directory / name_of(number)), directory)
        self.descriptor, self.number = _reserve(directory)
        self.target = directory / name_of(self.number)
        self.temporary = _temporary(directory, self.number)

    def publish(self, blocks: list[Block], keep: Keep) -> Path:
        """Make it the newest: all its bytes are written and synced.

        blocks: digests of parts of it; what they leave out is read back.  Raises OSError before
        anything is to be seen, or after that with the new one whole.
        """
        sums = Sums.of_blocks(digest_rest(self.descriptor, blocks), self.about)
        os.fchmod(self.descriptor, 0o666 & ~_umask())
        os.fsync(self.descriptor)
        beside = self.temporary.with_name(self.temporary.name + ".sums")
        _write_synced(beside, sums.text())
        os.replace(beside, sums_path(self.target))  # noqa: PTH105
        os.replace(self.temporary, self.target)  # noqa: PTH105
        sync_directory(self.directory)
        if self.number >= max(numbers(self.directory), default=0):
            pointer = self.temporary.with_name(self.temporary.name + ".latest")
            _write_synced(pointer, self.target.name + "\n")
            os.replace(pointer, self.directory / LATEST)  # noqa: PTH105
            sync_directory(self.directory)
        prune(self.directory, keep, self.spared)
        return self.target

    def close(self) -> None:
        """Give the lock back, and remove what was not published."""
        with contextlib.suppress(OSError):
            for path in self.directory.glob(self.temporary.name + "*"):
                path.unlink(missing_ok=True)
            os.close(self.descriptor)


def prune(directory: Path, keep: Keep, spared: str = "") -> None:
    """Remove the checkpoints that need not stay, and version 1's only file, which is older.

    A chain of base and deltas counts as one, and stays whole where one of its files would stay.
    spared: a file that stays, with its chain.
    """
    there = {directory / name_of(number): number for number in numbers(directory)}
    groups = units(there)
    whole = [group for group, is_whole in groups if is_whole][-keep.last :]
    for group, _ in groups:
        if group in whole or any(keep.spares(there[p]) or p.name == spared for p in group):
            continue
        for path in reversed(group):  # a crash meanwhile leaves the older ones of a chain whole
            path.unlink(missing_ok=True)
            sums_path(path).unlink(missing_ok=True)
    (directory / OLD_NAME).unlink(missing_ok=True)


def remove_leftovers(directory: Path) -> None:
    """Remove what writers left that are gone: nobody holds their file locked."""
    for number, path in list(_temporaries(directory)):
        # A writer's lock goes along when its file gets the final name.
        holders = (_temporary(directory, number), directory / name_of(number))
        holder = next((each for each in holders if each.exists()), None)
        with _abandoned(holder) as is_abandoned:
            if is_abandoned:
                path.unlink(missing_ok=True)
    for path in directory.glob("model-*.h5.sums"):
        whole = path.with_suffix("")
        if not whole.exists() and not (directory / f".{whole.name}.tmp").exists():
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _abandoned(path: Path | None) -> Iterator[bool]:
    """Whether no living writer holds the file; within, none can take hold of it.

    None: there is no file to hold.  One that cannot be looked at counts as held, and on a file
    system without locks all do: leftovers stay there.
    """
    if path is None:
        yield True
        return
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield False
    else:
        yield True
    finally:
        os.close(descriptor)


def _temporaries(directory: Path) -> Iterator[tuple[int, Path]]:
    for path in directory.iterdir():
        if match := _TEMPORARY.fullmatch(path.name):
            yield int(match[1]), path


def _reserve(directory: Path) -> tuple[int, int]:
    """(descriptor, number) of a new private file."""
    number = 0
    while True:
        finals = [int(m[1]) for p in directory.iterdir() if (m := _NUMBERED.fullmatch(p.name))]
        taken = [*finals, *(other for other, _ in _temporaries(directory))]
        number = max([number, *taken]) + 1
        path = _temporary(directory, number)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            continue
        with contextlib.suppress(OSError):  # a file system without locks keeps leftovers
            # Waits for one who looks whether this file was left behind, and may remove it.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if _is_at(descriptor, path) and not (directory / name_of(number)).exists():
            return descriptor, number
        # Removed just now, or another writer took the number and was done since the look.
        if _is_at(descriptor, path):
            path.unlink()
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is the one of that name."""
    try:
        found, ours = path.stat(), os.fstat(descriptor)
    except FileNotFoundError:
        return False
    return (found.st_dev, found.st_ino) == (ours.st_dev, ours.st_ino)


def _write_synced(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Have the directory's own entries on disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    """The process's file mode mask, read without setting it."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.search(r"^Umask:\s*(\d+)$", status, re.MULTILINE)[1], 8)  # type: ignore[index]
