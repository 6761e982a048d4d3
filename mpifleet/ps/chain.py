"""The base and the deltas that a job is writing: what the next one follows, and what it holds."""

from pathlib import Path

from mpifleet.checkpoint import About, Link
from mpifleet.errors import CheckpointError
from mpifleet.ps.changed_rows import ChangedRows, Since
from mpifleet.ps.shard import Shard


class Chain:
    """Follows the saves and loads of one server's shard; the same ones on all servers."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._is_pending = False
        self._before: ChangedRows | None = None

    def about(self, mode: str, directory: Path) -> About:
        """What a "full", "base" or "delta" save is. Raises CheckpointError for a delta of nothing.

        On servers that do not know the link a delta follows none.
        """
        if mode != "delta":
            return About(mode)
        if self._shard.changed is None:
            raise CheckpointError(
                "this job has neither saved a base nor loaded one whole, so that nobody has noted "
                'what changed: call fleet.save_persistables(..., mode="base") first'
            )
        since = self._shard.changed.since
        if since.directory != directory:
            raise CheckpointError(
                f"a delta goes into the directory of its base, {since.directory}, not into "
                f'{directory}: use that, or begin anew there with mode="base"'
            )
        return About("delta", follows=since.link)

    def spared(self, about: About, directory: Path) -> str:
        """The file that the next delta will follow, where the save of another kind must not remove
        it; "" for none. On the first server.
        """
        changed = self._shard.changed
        if about.kind != "full" or changed is None or changed.since.directory != directory:
            return ""
        return changed.since.link.name if changed.since.link is not None else ""

    def begin(self, about: About, directory: Path) -> None:
        """The tables are as they are being saved: rows written from here on are of the next one."""
        if about.kind in ("base", "delta"):
            self._is_pending, self._before = True, self._shard.changed
            self._shard.track(Since(directory))

    def end(self, failure: str, link: Link | None) -> None:
        """The save is done. Where it failed, what it would have held is in the next one.

        link: of the file, on the first server.
        """
        if not self._is_pending:
            return
        changed, before = self._shard.changed, self._before
        self._is_pending, self._before = False, None
        assert changed is not None
        if not failure:
            changed.since = Since(changed.since.directory, link)
            return
        if before is not None:
            before.add(changed)
        self._shard.changed = before

    def loaded(self, path: Path, link: Link | None) -> None:
        """The tables are those of a base or delta, all of them: the next delta goes on from it.

        link: to the file, on the first server.
        """
        self._shard.track(Since(path.parent, link))
