"""Runs the launcher as a child: passes signals on, copies stderr, leaves nothing behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from mpifleet.cli.leftovers import kill_session, remove_leftovers
from mpifleet.cli.rank_processes import RankProcesses
from mpifleet.launchenv import PREEMPTED
from mpifleet.lifeline.stopping import STOP_SIGNALS, STOPS_TEXT

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
GRACE_S = 10.0
# From the line that names a failed rank to the end of the whole job; ranks need less than 1 s.
END_S = 4.0
# The last words of a failing job.  Log lines have a colon behind the role and do not match.
REASON = re.compile(rb"mpifleet: rank \d+ \([^()\r\n]*\) [^\r\n]*")
# What rank 0 says of a job that stops at a step boundary: it is neither killed nor hurried.
PREEMPTIBLE = re.compile(rb"mpifleet: rank \d+ \([^()\r\n]*\): " + STOPS_TEXT.encode())
PREEMPTED_LINE = re.compile(rb"mpifleet: preempted: ")
# What the launchers say of a rank that ended while no lifeline watched it: before fleet.init() was
# through, or after its end.  Groups: the node where told, and the rank.
TOLD_BY_LAUNCHER = re.compile(
    rb"process rank (?P<a>\d+) with PID \d+ on node (?P<host>\S+)"
    rb"|Process name: *\[[^\r\n]*,(?P<b>\d+)\]"
    rb"|srun: error: (?P<node>\S+): tasks? (?P<c>\d+)[-,\d]*: "
)
# Open MPI 5's launcher gives this, PRTE's "silent error", at times instead of a rank's status.
SILENT_STATUS = 213
_OWN_STATUS = re.compile(rb"left with exit status (\d+)$")
_PR_SET_PDEATHSIG = 1
_PREEMPTED_TEXT = f"mpifleet: preempted, can be resumed: exit status {PREEMPTED}".encode()


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    is_srun: bool,
    roles: Sequence[str] = (),
) -> int:
    """Run `command` to its end and return its exit status, 128 + signal if a signal ended it.

    A failing job's last line on stderr names the rank that failed.  roles: the roles by rank that
    the job will give, for a rank that dies before it can tell; empty if not known.
    """
    started_s = time.time()
    try:
        child = _start(command, environment)
    except OSError as error:
        print(f"mpifleet: error: cannot start {command[0]}: {error}", file=sys.stderr)
        return 127
    stopper = _Stopper(child, is_srun)
    ranks = RankProcesses(child.pid, 0 if is_srun else len(roles))
    with stopper.installed(), contextlib.closing(ranks):
        reason, told = _copy_stderr(child, stopper, ranks)
        status = child.wait()
    if not is_srun:
        kill_session(child.pid)
    status = _status_of_job(status, reason, stopper)
    if status == PREEMPTED and stopper.is_preempted:
        reason = _PREEMPTED_TEXT
    if status:
        remove_leftovers(started_s)
        last = reason or _from_launcher(told, Path(command[0]).name, roles)
        last = last or _from_processes(ranks.first_gone, roles)
        if not last or (stopper.signals and not reason):
            last = f"mpifleet: the job ended with exit status {status}".encode()
        _write(2, last + b"\n")
    return status


def _status_of_job(status: int, reason: bytes, stopper: _Stopper) -> int:
    """What the launcher's exit status, negative for a signal, says of the job."""
    if status < 0:
        status = 128 - status
    if status == SILENT_STATUS and reason:
        own = _OWN_STATUS.search(reason)
        status = int(own[1]) if own else 1
    if stopper.is_preempted and status in (PREEMPTED, SILENT_STATUS):
        return PREEMPTED
    return 128 + stopper.signals[0] if status and stopper.signals else status


def _start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """The launcher, in a session of its own.  Raises OSError."""
    # A terminal cannot be read from there.
    stdin = subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None
    return subprocess.Popen(
        list(command),
        env=dict(environment),
        stdin=stdin,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=_end_with_parent(os.getpid()),
    )


class _Stopper:
    """Passes signals on to the launcher; ends what does not end by itself."""

    def __init__(self, child: subprocess.Popen[bytes], is_srun: bool) -> None:
        self._child = child
        self._is_srun = is_srun
        self._kill_at_s = float("inf")
        self.signals: list[int] = []
        self.is_preemptible = False
        """Whether the script has asked to be told of signals, and decides when it ends."""
        self.is_preempted = False
        """Whether all workers stop because of one."""

    @contextlib.contextmanager
    def installed(self):  # type: ignore[no-untyped-def]
        """The handlers, for the time of the block; a signal that is ignored (nohup) stays so."""
        watched = [n for n in PASSED_ON if signal.getsignal(n) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._handle) for number in watched}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.signals.append(number)
        if len(self.signals) > 1 and number == signal.SIGINT:
            self._kill_at_s = 0.0
            return
        if self.is_preemptible and number in STOP_SIGNALS:
            # Launchers end a job at SIGTERM; SIGUSR2 they hand to the ranks.
            self._child.send_signal(signal.SIGUSR2)
            return
        self._kill_at_s = min(self._kill_at_s, time.monotonic() + GRACE_S)
        # srun only asks "one more?" at an interrupt; SIGTERM it hands to the ranks.
        self._child.send_signal(signal.SIGTERM if self._is_srun else number)

    def expect_end(self, limit_s: float = END_S) -> None:
        """The job has been said to end: do not wait for ever for the launcher.

        Open MPI 5's waits until the last process that holds a rank's output has ended, also for
        one that a dead rank had forked.  Open MPI 4's has hung, with no rank left, after it had
        reported one that was killed while it joined the others.
        """
        self._kill_at_s = min(self._kill_at_s, time.monotonic() + limit_s)

    def kill_if_due(self) -> None:
        """SIGKILL the ranks that are the launcher's children, and it, when their time is up."""
        if time.monotonic() < self._kill_at_s:
            return
        self._kill_at_s = float("inf")
        if self._is_srun:
            # Two interrupts within a second make srun cancel the whole step on every node.
            for _ in range(2):
                self._child.send_signal(signal.SIGINT)
                time.sleep(0.2)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(GRACE_S)
        else:
            # The ranks first: the launcher then ends by itself and removes its own files.
            kill_session(self._child.pid, but=self._child.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(2.0)
        self._child.kill()


def _copy_stderr(
    child: subprocess.Popen[bytes], stopper: _Stopper, ranks: RankProcesses
) -> tuple[bytes, bytes]:
    """Copy the child's stderr to ours as it comes.

    Returns the last line in which ranks say why the job ended, and the first in which the
    launcher does; each empty if there is none.
    """
    assert child.stderr is not None
    fd, rest, reason, told, until_s = child.stderr.fileno(), b"", b"", b"", float("inf")
    while time.monotonic() < until_s:
        stopper.kill_if_due()
        if child.poll() is not None and until_s == float("inf"):
            # Something that outlived the launcher may still hold the pipe: do not wait for it.
            until_s = time.monotonic() + 1.0
        ranks.look()
        ready = select.select([fd, *ranks.descriptors], [], [], 0.1)[0]
        ranks.note([other for other in ready if other != fd])
        if fd not in ready:
            continue
        chunk = os.read(fd, 65536)
        if not chunk:
            break
        _write(2, chunk)
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if not told and TOLD_BY_LAUNCHER.search(line):
                told = line
                stopper.expect_end(GRACE_S)
            stopper.is_preemptible |= PREEMPTIBLE.search(line) is not None
            stopper.is_preempted |= PREEMPTED_LINE.search(line) is not None
            found = REASON.search(line)
            if found:
                reason = found.group()
                stopper.expect_end()
        rest = rest[-65536:]
    found = REASON.search(rest)
    return found.group() if found else reason, told


def _from_launcher(told: bytes, launcher: str, roles: Sequence[str]) -> bytes:
    """Our last line made from the launcher's; empty if that says nothing of a rank."""
    found = TOLD_BY_LAUNCHER.search(told)
    if found is None:
        return b""
    rank = int(found["a"] or found["b"] or found["c"])
    role = f" ({roles[rank]})" if rank < len(roles) else ""
    node = (found["host"] or found["node"] or b"").decode(errors="replace")
    place = f" on {node}" if node else ""
    return f"mpifleet: rank {rank}{role}{place} ended early, as {launcher} reports".encode()


def _from_processes(gone: Sequence[int], roles: Sequence[str]) -> bytes:
    """Our last line from the ranks that were seen to end first; empty if none was."""
    names = ", ".join(f"rank {rank} ({roles[rank]})" for rank in gone if rank < len(roles))
    return f"mpifleet: {names} on {socket.gethostname()} died".encode() if names else b""


def _end_with_parent(parent: int) -> Callable[[], None]:
    """What the child does before exec: ask for SIGTERM should this process be killed."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(128 + signal.SIGTERM)

    return ask


def _write(fd: int, data: bytes) -> None:
    # A closed terminal must not keep the job from being ended.
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(fd, data) :]
