"""What a load is asked for, what it took of a checkpoint, and why it left the rest."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["taken", "state anew", "missing", "extra", "misfit"]
OUTCOMES: tuple[Outcome, ...] = ("taken", "state anew", "missing", "extra", "misfit")


@dataclass(frozen=True)
class LoadOptions:
    """strict: refuse a file that does not fit in all. table: replace this table only."""

    strict: bool = True
    table: str | None = None


EVERYTHING = LoadOptions()


@dataclass(frozen=True)
class LoadedEntry:
    """One parameter, table or buffer of the model or of the file.

    kind: "parameter", "table" or "buffer".  outcome: "taken"; "state anew", its values taken and
    its optimizer state begun anew; "missing" in the file, so it stays as it was; "extra" in the
    file, so nobody takes it; "misfit", another shape, dtype or, where that is refused, state, so it
    stays as it was.  reason: why it was not taken whole, "" where it was.
    """

    kind: str
    name: str
    outcome: Outcome
    reason: str = ""
    was_told: bool = False
    """Whether who made the file knows: imported values come without optimizer state."""

    @property
    def is_taken(self) -> bool:
        """Whether its values are the file's now."""
        return self.outcome in ("taken", "state anew")


@dataclass(frozen=True)
class LoadReport:
    """All entries of the model and of the file at `path`, parameters first, buffers last.

    kind: of the checkpoint: "full", "base", "delta" or "table".
    """

    path: str
    entries: tuple[LoadedEntry, ...]
    kind: str = "full"

    def names(self, *outcomes: Outcome, kind: str | None = None) -> list[str]:
        """Names of the entries that ended so, in their order; of one kind or of all."""
        return [e.name for e in self.entries if e.outcome in outcomes and kind in (None, e.kind)]

    @property
    def taken(self) -> list[str]:
        """Names of all whose values are the file's now, their optimizer state or not."""
        return self.names("taken", "state anew")

    @property
    def is_whole(self) -> bool:
        """Whether the file and the model had the same entries, and all were taken with state."""
        return all(entry.outcome == "taken" for entry in self.entries)

    def failure(self) -> str:
        """The first way in which the file does not fit: what a strict load is refused with.

        "" where it fits.  A buffer too many in the file is no failure.
        """
        ours = [e for e in self.entries if not (e.kind == "buffer" and e.outcome == "extra")]
        for outcomes in (("missing", "extra"), ("misfit",)):
            for entry in ours:
                if entry.outcome in outcomes:
                    return entry.reason
        return ""

    def text(self) -> str:
        """How many were taken, then a line for each that was not taken whole."""
        count = sum(entry.is_taken for entry in self.entries)
        head = f"{self.path}: {count} of {len(self.entries)} entries taken"
        rest = [e for e in self.entries if e.outcome != "taken"]
        return "\n".join([head, *(f"  {e.outcome}: {e.reason}" for e in rest)])

    def joined(self, entries: Iterable[LoadedEntry]) -> "LoadReport":
        """With more entries behind its own."""
        return LoadReport(self.path, (*self.entries, *entries), self.kind)
