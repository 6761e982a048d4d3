"""make test: set-up, then every test on every MPI and number of ranks, and one table at the end.

Ends with a line "N passed, N failed, N skipped"; the exit status is 0 when nothing failed.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tools.outcomes import Outcome, close, files_without_a_test, read_tally, report
from tools.parallel_h5py import PARALLEL
from tools.parts import KINDS, MPIS, RANK_COUNTS, Part, all_parts
from tools.prerequisites import obstacle, unbuilt
from tools.processes import environment, exit_on_sigterm
from tools.set_up import LIMIT_S, PACKAGES
from tools.side_by_side import Task, run_side_by_side
from tools.venvs import ROOT

WHOLE_RUN_S = 2100.0
# Two lanes begin with the parts that wait for jobs, one with those that compute: with two lanes a
# fifth of two cores was idle, with three a tenth.
LANES = 3


def parser() -> argparse.ArgumentParser:
    """The command line of this program."""
    result = argparse.ArgumentParser(prog="python3 -m tools.test", description=__doc__)
    result.add_argument(
        "--only", default=",".join(KINDS), help="kinds of parts, by commas (default: %(default)s)"
    )
    result.add_argument("--mpi", choices=MPIS, help="parts of this MPI alone")
    result.add_argument("--ranks", type=int, choices=RANK_COUNTS, help="this world size alone")
    result.add_argument("--list", action="store_true", help="print the parts and stop")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what the arguments select and returns the exit status."""
    arguments = parser().parse_args(argv)
    kinds = arguments.only.split(",")
    if unknown := sorted(set(kinds) - set(KINDS)):
        parser().error(f"--only {','.join(unknown)}: use some of {','.join(KINDS)}")
    parts = [part for part in all_parts(ROOT, ROOT / ".venvs") if part.kind in kinds]
    parts = [part for part in parts if arguments.mpi in (None, part.mpi)]
    if arguments.ranks:
        parts = [part for part in parts if part.ranks in (0, arguments.ranks)]
    if arguments.list:
        print("\n".join(f"{part.kind:8} {' '.join(part.command)}" for part in parts))
        return 0
    exit_on_sigterm()
    # A shell ignores these for what it starts in the background, and tests send them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    deadline = time.monotonic() + WHOLE_RUN_S
    with tempfile.TemporaryDirectory(prefix="mpifleet-test-") as scratch:
        if not set_up({part.mpi for part in parts}, Path(scratch), deadline):
            print("0 passed, 1 failed, 0 skipped")
            return 1
        outcomes = run_parts(parts, Path(scratch), deadline)
    # Only the whole MPI suite can tell that a file runs nowhere.
    whole = "mpi" in kinds and not arguments.mpi and not arguments.ranks
    untested = files_without_a_test(ROOT, outcomes) if whole else []
    text, well = report(outcomes, untested)
    print(text, flush=True)
    return 0 if well else 1


def set_up(mpis: set[str], scratch: Path, deadline: float) -> bool:
    """Makes system packages and virtual environments ready, all at once; whether that worked."""
    # An h5py with MPI is built by one of the parts; all else that it needs is in "system".
    names = [PACKAGES, *sorted({"system" if mpi == PARALLEL else mpi for mpi in mpis})]
    commands = [[sys.executable, "-m", "tools.set_up", name] for name in names]
    env = environment()
    tasks = [
        Task(f"set-up of {name}", command, env, LIMIT_S)
        for name, command in zip(names, commands, strict=True)
    ]
    ended = [how for _, how in run_side_by_side(tasks, len(tasks), scratch, deadline)]
    return all(how.status == 0 for how in ended)


def run_parts(parts: Sequence[Part], scratch: Path, deadline: float) -> list[Outcome]:
    """Runs the parts, LANES at a time, until `deadline` (monotonic seconds) at most."""
    outcomes = [Outcome(part, not_run=obstacle(part.kind, part.mpi)) for part in parts]
    able = [outcome for outcome in outcomes if not outcome.not_run]
    tallies = [scratch / f"tally-{number}.jsonl" for number in range(len(able))]
    tasks = [task_of(each.part, tally) for each, tally in zip(able, tallies, strict=True)]
    for number, ended in run_side_by_side(tasks, LANES, scratch, deadline):
        outcome = able[number]
        outcome.seconds = ended.seconds
        if reason := unbuilt(outcome.part.mpi):
            outcome.not_run = reason
            continue
        if outcome.part.is_pytest:
            read_tally(outcome, tallies[number])
        close(outcome, ended.status)
    return outcomes


def task_of(part: Part, tally: Path) -> Task:
    """The part as a command with its environment. tally: where its tests are counted."""
    colors = "1" if sys.stdout.isatty() else "0"
    extra = {**part.env, "MPIFLEET_TEST_TALLY": str(tally), "PY_COLORS": colors}
    if part.is_pytest:
        extra["PYTHONPATH"] = str(ROOT / "tests" / "quick_start")  # see the module there
    env = environment(ROOT / ".venvs" / part.mpi, extra)
    return Task(part.title, part.command, env, part.limit_s, part.after)


if __name__ == "__main__":
    sys.exit(main())
