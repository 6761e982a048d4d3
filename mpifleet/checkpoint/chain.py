"""Chains of checkpoints in a directory: a base and deltas, each naming the one before it.

All is read from the small files with the digests, so that a directory is understood without HDF5.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from mpifleet.checkpoint.about import About, Link
from mpifleet.checkpoint.digests import BLOCKS, digest_of, sums_path
from mpifleet.errors import CheckpointError

MAX_MEMBERS = 500
"""A reader holds all files of a chain open; most systems let a process open 1024."""


def about_of(path: Path) -> About:
    """What the checkpoint at `path` says that it is; "full" where it says nothing to be read."""
    try:
        return _read_about(path) or About()
    except OSError:
        return About()


def _read_about(path: Path) -> About | None:
    """The same, but None where digests are damaged, and raises OSError where they cannot be read
    now.
    """
    try:
        with open(sums_path(path), encoding="utf-8") as file:
            head = file.readline(1 << 16)
        return About.of(json.loads(head[: head.rindex(BLOCKS)] + "}"))
    except FileNotFoundError:
        return About()
    except (ValueError, KeyError):
        return None


def link_to(path: Path) -> Link:
    """The link by which a delta follows the checkpoint at `path`. Raises CheckpointError."""
    try:
        return Link(path.name, digest_of(sums_path(path).read_bytes()))
    except OSError as cause:
        raise CheckpointError(f"digests of {path} cannot be read: {cause}") from cause


def members(path: Path) -> list[Path]:
    """The files that together are the checkpoint at `path`: itself; of a delta its base, the deltas
    between and itself, in this order.

    Raises CheckpointError naming one that is missing or is not the one that was followed.
    """
    chain = [path]
    while (link := about_of(chain[-1]).follows) is not None:
        before = path.with_name(link.name)
        story = f"checkpoint {chain[-1]} is a delta after {link.name}"
        if not before.is_file() or not sums_path(before).is_file():
            raise CheckpointError(f"{story}, which is missing in {path.parent}")
        if link_to(before) != link:
            raise CheckpointError(
                f"{story}, but {before} is not the file that it was written after"
            )
        if about_of(before).kind not in ("base", "delta"):
            raise CheckpointError(f"{story}, which is neither a base nor a delta")
        if len(chain) == MAX_MEMBERS:
            raise CheckpointError(f"checkpoint {path} stands on more than {MAX_MEMBERS} others")
        chain.append(before)
    return chain[::-1]


def check_continues(directory: Path, link: Link) -> None:
    """Raise CheckpointError where a delta cannot follow this checkpoint: say so before it does."""
    head = directory / link.name
    advice = 'begin a new chain with mode="base"'
    try:
        if link_to(head) != link:
            raise CheckpointError(f"{head} is not what this job left there")
        count = len(members(head))
    except CheckpointError as cause:
        raise CheckpointError(f"no delta can follow {head}: {cause}; {advice}") from cause
    if count == MAX_MEMBERS:
        raise CheckpointError(f"no delta can follow {head}: its chain has {count} files; {advice}")


def units(paths: Iterable[Path]) -> list[tuple[list[Path], bool]]:
    """The checkpoints of a directory in groups that stay or go together, each with whether it can
    be loaded at all: a whole chain with its branches, or a checkpoint alone.

    paths: oldest first.  A group stands where its newest does; a chain without its base cannot be
    loaded, nor what has damaged digests.  Raises OSError where it cannot be told which group a
    checkpoint is of.
    """
    root_of: dict[str, str] = {}
    groups: dict[str, list[Path]] = {}
    for path in paths:
        about = _read_about(path)
        link = about.follows if about is not None else None
        # A delta is younger than what it follows, whose root is known by now, or it is missing.
        root = path.name if link is None else root_of.get(link.name, link.name)
        if about is not None:
            root_of[path.name] = root
        groups[root] = [*groups.pop(root, []), path]
    return [(group, root in root_of) for root, group in groups.items()]
