"""How long a server works between two looks at MPI.

    python -m benchmarks.ps_gaps [--quick]

While a server works on a large message others wait for its help: MPI moves far transfers on only
when it is called. All work is cut into slices, and here the longest time between two looks is
measured in each of a few rounds of large dense and row pushes, sync merges and served pulls. One
process is server and worker, with one thread. The goal is set against the median of the rounds in
processor time, which a busy machine stretches little; first round and wall time are reported. Exit
status 1 when a goal is missed.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.program import run_program
from benchmarks.report import Figure, Goal, print_figures

if TYPE_CHECKING:
    from benchmarks.one_process import OneProcess
    from mpifleet.partition import UniqueKeys

NUM_RANKS = 1
GOAL_S = 5e-3
GOAL = Goal(1.0, at_most=True)
ROUNDS, QUICK_ROUNDS = 7, 3
ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
DENSE, ROWS, SYNC_ROWS, PULL_ROWS, PULL_DENSE = (
    "dense push",
    "rows push",
    "rows push of 2 workers, sync",
    "served pull of rows",
    "served pull of dense parameters",
)


@dataclass(frozen=True)
class Scene:
    """What a server is asked for: `work` on tables of so many elements and rows, adam."""

    work: str
    dense_size: int = 0
    num_rows: int = 0
    dim: int = 0
    num_keys: int = 0

    @property
    def name(self) -> str:
        """What a figure is called."""
        if self.dense_size:
            return f"{self.work}, {self.dense_size:,} float32"
        return f"{self.work}, {self.num_keys:,} x {self.dim}"

    @property
    def num_workers(self) -> int:
        """Workers that push."""
        return 2 if self.work == SYNC_ROWS else 1


SCENES = [
    Scene(DENSE, dense_size=50_000_000),
    Scene(PULL_DENSE, dense_size=50_000_000),
    *(
        Scene(work, num_rows=num_rows, dim=dim, num_keys=num_keys)
        for num_rows, dim, num_keys in ((1_000_000, 64, 100_000), (5_000_000, 10, 100_000))
        for work in (ROWS, SYNC_ROWS, PULL_ROWS)
    ),
]
QUICK_SCENES = [
    Scene(DENSE, dense_size=5_000_000),
    *(Scene(w, num_rows=200_000, dim=64, num_keys=50_000) for w in (ROWS, SYNC_ROWS, PULL_ROWS)),
]


def build(scene: Scene) -> OneProcess:
    """The server of a scene."""
    from benchmarks.one_process import OneProcess
    from mpifleet.mpi import load_mpi
    from mpifleet.ps.rule_spec import RuleSpec, hyper_of_group
    from mpifleet.ps.spec import DenseSpec, ParamSpec, SparseSpec, TableSpecs

    rule = RuleSpec("adam")
    flat = ParamSpec("flat", (scene.dense_size,), 0, scene.dense_size)
    dense = (DenseSpec("dense", "float32", rule, (flat,)),) if scene.dense_size else ()
    rows = SparseSpec("rows", scene.num_rows, scene.dim, "float32", rule, "uniform", 0.01, 0)
    specs = TableSpecs(dense, (rows,) if scene.num_rows else ())
    is_sync = scene.work == SYNC_ROWS
    hyper = hyper_of_group(rule, ADAM)
    return OneProcess(load_mpi(), specs, hyper, scene.num_workers, is_sync)


def dense_round(job: OneProcess, scene: Scene) -> Callable[[int], None]:
    """What one round of a dense scene does, called with the number of the round."""
    from mpifleet.ps.mailbox import Lane

    (client,), flat = job.clients, np.full(scene.dense_size, 1e-3, np.float32)

    def push(step: int) -> None:
        client.push_dense(step, job.hypers[0], [np.ones(1, np.uint8)], [flat])
        client.wait_applied([Lane.DENSE])

    return push if scene.work == DENSE else lambda _: client.pull_dense([flat])


def rows_round(job: OneProcess, scene: Scene) -> Callable[[int], None]:
    """What one round of a scene of rows does, called with the number of the round."""
    from mpifleet.ps.mailbox import Lane

    random = np.random.default_rng(0)
    grads = np.full((scene.num_keys, scene.dim), 1e-3, np.float32)

    def push(step: int) -> None:
        for client in job.clients:
            client.push_rows(step, job.hypers[1], [some_keys(random, scene)], [grads])
        client.wait_version(Lane.ROWS, step)
        client.wait_applied([Lane.ROWS])

    def pull(_: int) -> None:
        job.clients[0].pull_rows(0, some_keys(random, scene))

    return pull if scene.work == PULL_ROWS else push


def some_keys(random: np.random.Generator, scene: Scene) -> UniqueKeys:
    """Distinct random keys."""
    from mpifleet.partition import unique_keys

    keys = random.choice(scene.num_rows, scene.num_keys, replace=False)
    return unique_keys(keys, scene.num_rows, 1, "rows")


def longest_gaps(scene: Scene, rounds: int) -> list[list[float]]:
    """[processor, wall] seconds of the longest gap in every round."""
    from benchmarks.one_process import GapClock

    job = build(scene)
    one_round = (dense_round if scene.dense_size else rows_round)(job, scene)
    gaps = []
    for number in range(rounds):
        job.gaps = GapClock()
        one_round(number + 1)
        gaps.append(job.gaps.longest_s)
    del one_round
    job.free()
    return gaps


def gap_figures(scene: Scene, gaps: Sequence[Sequence[float]]) -> list[Figure]:
    """The longest gap of a round, in processor time against the goal; then what has no goal: that
    of the first round, which touches fresh memory, and the longest of all rounds in wall time.
    """
    cpu_s, wall_s = zip(*gaps, strict=True)
    typical_s = statistics.median(cpu_s)
    ratio = typical_s / GOAL_S
    name = f"longest gap: {scene.name}"
    met = GOAL.met_by(ratio)
    return [
        Figure(name, _ms(typical_s), "ms", "5 ms", round(ratio, 3), str(GOAL), met),
        Figure(f"{name}: first round", _ms(cpu_s[0]), "ms"),
        Figure(f"{name}: wall time of all rounds", _ms(max(wall_s)), "ms"),
    ]


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 2)


def measure(quick: bool) -> None:
    """All scenes, one after another, in this one rank."""
    import torch

    torch.set_num_threads(1)
    for scene in QUICK_SCENES if quick else SCENES:
        gaps = longest_gaps(scene, QUICK_ROUNDS if quick else ROUNDS)
        print_figures(gap_figures(scene, gaps))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure here when a launcher started us, else start the job that does."""
    return run_program("ps_gaps", __doc__, "smaller", measure, NUM_RANKS, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
