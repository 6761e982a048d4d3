"""Running a child command with live output and a time limit that leaves no process behind."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TIMED_OUT = 124
STOP_LIMIT_S = 10.0


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    status: its exit status, TIMED_OUT past the limit.  output: what it printed, where asked for.
    """

    status: int
    seconds: float
    output: str = ""


def environment(venv: Path | None = None, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Our environment with the programs of `venv` first and settings for more ranks than cores."""
    result = dict(os.environ)
    # Every rank would compile all that it imports, torch too.
    result.pop("PYTHONDONTWRITEBYTECODE", None)
    if venv is not None:
        result["PATH"] = f"{venv / 'bin'}{os.pathsep}{result.get('PATH', os.defpath)}"
        result["VIRTUAL_ENV"] = str(venv)
        result.pop("PYTHONHOME", None)
    result |= {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PYTHONUNBUFFERED": "1",
    }
    return result | dict(extra or {})


def exit_on_sigterm() -> None:
    """Makes SIGTERM an ordinary exit of this program, so that `run` ends the child it waits for."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def run(
    command: Sequence[str | os.PathLike[str]],
    *,
    env: Mapping[str, str],
    limit_s: float,
    cwd: Path,
    keep: bool = False,
    quiet: bool = False,
) -> Ended:
    """Runs `command`, printed first, and ends its whole process group after `limit_s` seconds.

    keep: return the output as well as showing it.  quiet: return it and show nothing.
    """
    words = [os.fspath(word) for word in command]
    if not quiet:
        print(f"\n$ {shlex.join(words)}", flush=True)
    piped = keep or quiet
    begin = time.monotonic()
    process = _start(words, env, cwd, piped)
    copied: list[bytes] = []
    reader = threading.Thread(target=_copy, args=(process, copied, quiet), daemon=True)
    if piped:
        reader.start()
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        print(f"ended after {limit_s:.0f} s: {shlex.join(words)}", file=sys.stderr, flush=True)
        status = TIMED_OUT
    finally:
        end_group(process)
    if piped:
        reader.join(STOP_LIMIT_S)
    output = b"".join(copied).decode(errors="replace")
    return Ended(status, time.monotonic() - begin, output)


def _start(
    words: list[str], env: Mapping[str, str], cwd: Path, piped: bool
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        words,
        cwd=cwd,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if piped else None,
        stderr=subprocess.STDOUT if piped else None,
        start_new_session=True,
    )


def _copy(process: subprocess.Popen[bytes], copied: list[bytes], quiet: bool) -> None:
    assert process.stdout is not None
    while piece := os.read(process.stdout.fileno(), 65536):
        copied.append(piece)
        if not quiet:
            sys.stdout.buffer.write(piece)
            sys.stdout.flush()


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends what is left of a process group: first SIGTERM, then SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_LIMIT_S)
        deadline = time.monotonic() + STOP_LIMIT_S
        while _alive(process.pid) and time.monotonic() < deadline:
            time.sleep(0.02)
    process.wait()


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
