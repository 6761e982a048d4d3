"""Whether a job has too few servers or too many: one sentence, from what a server measured. Pure.

Keys and dense elements are spread evenly over the servers, so that one speaks for all.
"""

from collections.abc import Callable

from mpifleet.ps.server_load import ServerReport

BOTTLENECK_SHARE = 0.85
"""Busy share from which a server is a bottleneck. A queue's waiting time grows as 1 / (1 - share):
below this a message waits for a few others at most, and another server would mostly idle."""
BOTTLENECK_LANES = 1.1
"""Full lanes per turn above which workers wait for it: one is being served, the rest wait. A server
that is busy without that keeps up with its workers."""
IDLE_SHARE = 0.10
"""Busy share below which half as many servers would still be idle most of the time."""
SHORT_S = 10.0
"""A job of less says nothing: its first steps touch memory and fill caches."""


def is_bottleneck(report: ServerReport) -> bool:
    """Whether workers wait for this server most of the time."""
    return report.busy_share >= BOTTLENECK_SHARE and report.lanes_per_turn >= BOTTLENECK_LANES


def advice(report: ServerReport, num_servers: int) -> str | None:
    """What to change about the number of servers, or None where nothing is to be gained."""
    if report.elapsed_s < SHORT_S:
        return None
    if is_bottleneck(report):
        return (
            f"servers are the bottleneck (busy {_percent(report.busy_share)}, "
            f"{report.lanes_per_turn:.1f} lanes full per look): use --server_num {num_servers + 1} "
            "where a core is free for it, or a larger batch, which pushes fewer rows and dense "
            "gradients per sample"
        )
    if num_servers > 1 and report.busy_share < IDLE_SHARE:
        fewer = max(1, num_servers // 2)
        return (
            f"servers are idle (busy {_percent(report.busy_share)}): --server_num {fewer} instead "
            f"of {num_servers} would leave more cores to workers"
        )
    return None


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


class BottleneckWatch:
    """Says while a job runs, once, that its servers are the bottleneck.

    say: where the sentence goes.  Called with the report of each minute: see ServerLoad.
    """

    def __init__(self, num_servers: int, say: Callable[[str], None]) -> None:
        self._num_servers = num_servers
        self._say = say
        self._said = False

    def __call__(self, report: ServerReport) -> None:
        """Look at one more minute."""
        sentence = advice(report, self._num_servers)
        if sentence is not None and not self._said and is_bottleneck(report):
            self._said = True
            self._say(sentence)
