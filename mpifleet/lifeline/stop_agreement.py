"""Where all workers stop after a signal: kept by the hub, which hears each worker in some order.

A worker's place is its region, the number of meetings of all workers behind it, and the steps since
the last one.  After a signal every worker tells its place; then nobody goes past the furthest one's
next boundary without having voted.  A vote waits: all have voted in one region, and all stop
there; or one waits for the others in the meeting after it, to which they must come: the votes of
this region are refused, and the next region decides.  So nobody stops where others wait for it.
"""

from __future__ import annotations

from typing import Any

AGREED_TEXT = "preempted: {}; all workers stop at this step"
LAST_REGION = 2**62
"""Where a worker is that makes no more steps."""


class StopAgreement:
    """Hears messages of ranks, and gives what all are to be told.

    Messages: "stop_asked" (text: of the signal; workers: how many), "stop_place" (region,
    steps, waits: in the meeting after it), "stop_vote" and "stop_arrived" (region).
    Answers: "stop_asked", "stop_from" (region, steps: where voting begins), "stop_refused" (up to
    which region) and "stop_agreed".
    """

    def __init__(self) -> None:
        self._num_workers, self._text = 0, ""
        self._places: dict[int, tuple[int, int]] = {}
        self._votes: dict[int, int] = {}
        self._refused = -1
        self._is_agreed = False

    def hear(self, rank: int, message: dict[str, Any]) -> list[dict[str, Any]]:
        """What is to be told to every rank. Raises KeyError or TypeError for what is no message."""
        if self._is_agreed:
            return []
        kind = message["kind"]
        if kind == "stop_asked":
            if self._num_workers:
                return []
            self._num_workers, self._text = int(message["workers"]), str(message["text"])
            return [{"kind": "stop_asked"}]
        region = int(message["region"])
        if kind == "stop_place":
            self._places[rank] = (region, int(message["steps"]))
            begin = self._where_votes_begin() if len(self._places) == self._num_workers else []
            return begin + (self._refuse(region) if message["waits"] else [])
        if kind == "stop_arrived":
            return self._refuse(region)
        self._votes[rank] = region
        if region <= self._refused:
            return self._refuse(region)
        voted = list(self._votes.values())
        self._is_agreed = len(voted) == self._num_workers and set(voted) == {region}
        return [{"kind": "stop_agreed", "text": self._text}] if self._is_agreed else []

    def _where_votes_begin(self) -> list[dict[str, Any]]:
        region = max(region for region, _ in self._places.values())
        steps = 1 + max(steps for where, steps in self._places.values() if where == region)
        return [{"kind": "stop_from", "region": region, "steps": steps}]

    def _refuse(self, region: int) -> list[dict[str, Any]]:
        self._refused = max(self._refused, region)
        return [{"kind": "stop_refused", "region": self._refused}]
