"""What a checkpoint holds of a job, and which one it goes on from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from mpifleet.errors import CheckpointError

KINDS = ("full", "base", "delta", "table")


class Link(NamedTuple):
    """A checkpoint of the same directory: its file's name, and the digest of its digests.

    So a delta that names the one before it names all its bytes, and through it the whole chain's.
    """

    name: str
    identity: str


@dataclass(frozen=True)
class About:
    """kind: one of KINDS.  table: of "table", its name.  follows: of "delta", the one before it."""

    kind: str = "full"
    table: str = ""
    follows: Link | None = None

    def facts(self) -> dict[str, Any]:
        """JSON-able; empty for "full"."""
        facts: dict[str, Any] = {} if self.kind == "full" else {"kind": self.kind}
        if self.table:
            facts["table"] = self.table
        if self.follows is not None:
            facts |= {"follows": self.follows.name, "follows_identity": self.follows.identity}
        return facts

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> About:
        """The inverse of `facts`; other facts are ignored.

        Raises ValueError for facts that do not go together.
        """
        kind, table = str(facts.get("kind", "full")), str(facts.get("table", ""))
        link = None
        if "follows" in facts:
            link = Link(str(facts["follows"]), str(facts["follows_identity"]))
            if "/" in link.name or link.name in ("", ".", ".."):
                raise ValueError(f"follows {link.name!r}, which is no file of its directory")
        if kind not in KINDS:
            raise ValueError(f"kind {kind!r}; known are {', '.join(KINDS)}")
        if (kind == "delta") != (link is not None) or (kind == "table") != bool(table):
            raise ValueError(f"kind {kind!r} with table {table!r} and follows {link}")
        return cls(kind, table, link)

    def text(self) -> str:
        """In words: "the whole job", "table 'emb' only"."""
        return f"table {self.table!r} only" if self.table else "the whole job"

    def check_goes_with(self, other: About, where: Any) -> None:
        """Raise CheckpointError where one directory cannot hold both: the newest of it counts."""
        if self.table != other.table:
            raise CheckpointError(
                f"{where} has checkpoints of {other.text()}, and this one is of {self.text()}: "
                "use another directory"
            )
