"""How much of a node's processor time went to others while a job ran. Linux only."""

from __future__ import annotations

import os
import time
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_USER, _NICE, _SYSTEM, _STEAL = 0, 1, 2, 7
# Of /proc/PID/stat, counted from the field after the name: parent, then four processor times.
_PARENT, _TIMES = 1, slice(11, 15)


class Busy:
    """Processor time of everybody but a process and what it starts, from now on."""

    def __init__(self, process: int) -> None:
        self._process = process
        self._start_s, self._all_s, self._ours_s = time.monotonic(), _busy_s(), _tree_s(process)

    def others_share(self) -> float:
        """Share of the cores, 0 to 1, that others used so far, stolen time included.

        Look while the process lives: its children's time is lost with it.
        """
        passed_s = max(time.monotonic() - self._start_s, 1 / _TICKS_PER_S)
        others_s = (_busy_s() - self._all_s) - (_tree_s(self._process) - self._ours_s)
        return max(others_s, 0.0) / (passed_s * (os.cpu_count() or 1))


def wait_until_quiet(share: float, limit_s: float) -> bool:
    """Whether within the limit others used at most `share` of the cores for one second."""
    give_up_s = time.monotonic() + limit_s
    while True:
        busy = Busy(os.getpid())
        time.sleep(1.0)
        if busy.others_share() <= share:
            return True
        if time.monotonic() > give_up_s:
            return False


def _busy_s() -> float:
    line = Path("/proc/stat").read_text().split("\n", 1)[0]
    ticks = [int(number) for number in line.split()[1:]]
    return (ticks[_USER] + ticks[_NICE] + ticks[_SYSTEM] + ticks[_STEAL]) / _TICKS_PER_S


def _tree_s(root: int) -> float:
    """Seconds of a process, its descendants and those of them that have ended."""
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:  # ended meanwhile
            continue
        process = int(entry.parent.name)
        ticks[process] = sum(int(number) for number in fields[_TIMES])
        children.setdefault(int(fields[_PARENT]), []).append(process)
    total, left = 0, [root]
    while left:
        process = left.pop()
        total += ticks.get(process, 0)
        left += children.get(process, [])
    return total / _TICKS_PER_S
