"""Finding and ending every process that belongs to one test cluster."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path


def end_group(process: subprocess.Popen[bytes] | subprocess.Popen[str], limit_s: float) -> None:
    """Asks the process group of `process` to end, then kills it; waits for `process`.

    `process` must have been started with ``start_new_session=True``.
    """
    for number, wait_s in ((signal.SIGTERM, limit_s), (signal.SIGKILL, limit_s)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
            return


def processes_of(scratch: Path) -> dict[int, str]:
    """Process ids, with their command lines, of what runs for the cluster in folder `scratch`.

    A process belongs to it when its environment or command line names the folder, or when it
    holds a file below it open: job steps rewrite the first two.
    """
    marker = os.fsencode(scratch)
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        # A process may end between two reads.
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes()
            if not command:
                continue  # a kernel thread, or a zombie that its parent has not reaped
            if (
                marker in command
                or marker in (entry / "environ").read_bytes()
                or _holds_open(entry, marker)
            ):
                found[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace")
    return found


def _holds_open(entry: Path, marker: bytes) -> bool:
    for link in [entry / "cwd", *(entry / "fd").iterdir()]:
        with contextlib.suppress(OSError):
            if os.fsencode(link.readlink()).startswith(marker):
                return True
    return False
