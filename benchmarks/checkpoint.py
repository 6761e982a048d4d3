"""Checkpoints against raw writes and reads of as many bytes, and against torch.save.

    python -m benchmarks.checkpoint [--quick]

starts a job of two servers and one worker on this node.  The state is one table of 256 MiB (adam:
rows and two states), then one of 2 GiB where memory and disk allow it; a third job has 10 million
rows of 8.  What is compared takes turns: the job's save, one rank's raw write of the same bytes in
pieces with fdatasync, torch.save and torch.distributed.checkpoint of the same arrays.  Warm reads
find the file in the page cache, cold ones do not.  The stall of a save behind training is what the
worker waits for.  Memory is what the servers' rose by during a save, both together, beyond the
snapshot where there is one.  The smallest state is also saved compressed, which is a figure of the
processor and not of the disk.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as distributed

from benchmarks.checkpoint_memory import MIB, extra_bytes
from benchmarks.launch import is_launched, run_job
from benchmarks.report import Figure, Goal, figure_of_rates, print_figures, ratio_of
from mpifleet import fleet
from mpifleet.checkpoint import newest

DIM, ROWS_DIM = 64, 8
STATES = 3  # rows, exp_avg, exp_avg_sq
SIZES_MIB = (256, 2048)
MANY_ROWS = 10_000_000
ROUNDS = 3
PIECE_BYTES = 16 << 20
NUM_SERVERS = 2
MOST_EXTRA_MIB = 64
MOST_COMPRESSED_BYTES = SIZES_MIB[0] << 20


def rows_of(mib: int) -> int:
    """Rows of a table whose values and state have so many MiB."""
    return (mib << 20) // (4 * DIM * STATES)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure here when a launcher started us, else start one job per size."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.checkpoint", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="one round of 16 MiB")
    parser.add_argument("--rows", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--dim", type=int, default=DIM, help=argparse.SUPPRESS)
    parser.add_argument("--judge", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(argv)
    if is_launched():
        return job(chosen.rows, chosen.dim, 1 if chosen.quick else ROUNDS, chosen.judge)
    sizes = [(rows_of(16), DIM)] if chosen.quick else wanted_sizes()
    worst = 0
    for rows, dim in sizes:
        options = ["--rows", str(rows), "--dim", str(dim)]
        options += ["--quick"] if chosen.quick else ["--judge"]
        status, _ = run_job("benchmarks.checkpoint", NUM_SERVERS + 1, options)
        worst = max(worst, status)
    return worst


def wanted_sizes() -> list[tuple[int, int]]:
    """(rows, dim) of each job; one that memory or disk cannot hold thrice is told and left out."""
    sizes = [(rows_of(mib), DIM) for mib in SIZES_MIB] + [(MANY_ROWS, ROWS_DIM)]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    disk = shutil.disk_usage(tempfile.gettempdir()).free
    shm = shutil.disk_usage("/dev/shm").free
    found = []
    for rows, dim in sizes:
        num_bytes = 4 * rows * dim * STATES
        if num_bytes * 3 > min(memory, disk) or num_bytes > shm:
            print(f"checkpoint: {num_bytes >> 20} MiB do not fit here", file=sys.stderr)
        else:
            found.append((rows, dim))
    return found


def job(rows: int, dim: int, rounds: int, judge: bool) -> int:
    """One rank's part."""
    fleet.init(server_num=NUM_SERVERS)
    model = torch.nn.Module()
    model.table = fleet.SparseEmbedding("table", rows, dim)
    adam = torch.optim.Adam(model.parameters(), 1e-3)
    fleet.distributed_optimizer(adam, model=model)
    if fleet.is_server():
        fleet.run_server()
        return 0
    fleet.init_worker()
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as folder:
        figures = measured(Path(folder), rows, dim, rounds, judge)
    fleet.stop_worker()
    print_figures(figures)
    return int(any(figure.met is False for figure in figures))


def measured(folder: Path, rows: int, dim: int, rounds: int, judge: bool) -> list[Figure]:
    """The worker's part: seconds of each way in every round, and what they say."""
    arrays = [np.random.default_rng(i).random((rows, dim), np.float32) for i in range(STATES)]
    seconds: dict[str, list[float]] = {}
    for turn in range(rounds + 1):  # the first touches memory and disk, and is not counted
        spent = one_round(folder, arrays)
        for name, value in spent.items():
            if turn or rounds == 1:
                seconds.setdefault(name, []).append(value)
    num_bytes = newest(folder / "ours").stat().st_size
    snapshot = sum(array.nbytes for array in arrays)
    memory = memory_figures(folder / "ours", f"{num_bytes >> 20} MiB", snapshot, judge)
    return figures_of(seconds, num_bytes, rows, judge) + memory


def memory_figures(ours: Path, size: str, snapshot: int, judge: bool) -> list[Figure]:
    """What saves take of the servers' memory, both together; snapshot: bytes of the state."""

    def behind() -> None:
        fleet.save_persistables(ours, wait=False)
        fleet.save_persistables(ours)  # waits for the one behind training

    extra = {"a save": extra_bytes(lambda: fleet.save_persistables(ours))}
    extra["a save behind training"] = max(extra_bytes(behind) - snapshot, 0)
    goal = Goal(1.0, at_most=True)
    figures = []
    for name, value in extra.items():
        ratio = value / (MOST_EXTRA_MIB * MIB)
        judged = (str(goal), goal.met_by(ratio)) if judge else (None, None)
        figure = Figure(f"extra memory of {name}, {size}", round(value / MIB, 1), "MiB")
        against = f"{MOST_EXTRA_MIB} MiB"
        figures.append(
            replace(figure, against=against, ratio=round(ratio, 3), goal=judged[0], met=judged[1])
        )
    return figures


def one_round(folder: Path, arrays: Sequence[np.ndarray]) -> dict[str, float]:
    """Seconds of each way to write and read the same bytes."""
    ours, raw, plain = folder / "ours", folder / "raw", folder / "plain.pt"
    tensors = {str(i): torch.from_numpy(array) for i, array in enumerate(arrays)}
    spent = {
        "save": timed(lambda: fleet.save_persistables(ours)),
        "raw write": timed(lambda: write_raw(raw, arrays)),
        "torch.save": timed(lambda: save_synced(plain, arrays)),
        "torch.distributed.checkpoint": timed(
            lambda: distributed.save(tensors, checkpoint_id=folder / "dcp", no_dist=True)
        ),
        "memcpy": timed(lambda: [array.copy() for array in arrays]),
    }
    spent["stall behind training"] = timed(lambda: fleet.save_persistables(ours, wait=False))
    fleet.save_persistables(ours)  # waits for the one behind training
    if sum(array.nbytes for array in arrays) <= MOST_COMPRESSED_BYTES:
        small = folder / "small"
        spent["compressed"] = timed(lambda: fleet.save_persistables(small, compression="gzip"))
    for heat in ("warm", "cold"):
        for name, path, call in (
            ("load", newest(ours), lambda: fleet.load_persistables(ours)),
            ("raw read", raw, lambda: read_raw(raw)),
        ):
            if heat == "cold":
                forget(path)
            spent[f"{heat} {name}"] = timed(call)
    return spent


def forget(path: Path) -> None:
    """Have the page cache drop a file."""
    with open(path, "rb") as file:
        os.fdatasync(file.fileno())  # pages that are not on disk stay
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(call: object) -> float:
    """Wall seconds of one call."""
    start_s = time.perf_counter()
    call()  # type: ignore[operator]
    return time.perf_counter() - start_s


def write_raw(path: Path, arrays: Sequence[np.ndarray]) -> None:
    """The bytes as they are, in pieces, on disk at the end."""
    with open(path, "wb", buffering=0) as file:
        for array in arrays:
            data = memoryview(array.reshape(-1).view(np.uint8).data)
            for start in range(0, len(data), PIECE_BYTES):
                file.write(data[start : start + PIECE_BYTES])
        os.fdatasync(file.fileno())


def save_synced(path: Path, arrays: Sequence[np.ndarray]) -> None:
    """torch.save, on disk at the end."""
    with open(path, "wb") as file:
        torch.save([torch.from_numpy(array) for array in arrays], file)
        file.flush()
        os.fdatasync(file.fileno())


def read_raw(path: Path) -> None:
    """All bytes of a file, in pieces, into one buffer."""
    buffer = bytearray(PIECE_BYTES)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def figures_of(
    seconds: dict[str, list[float]], num_bytes: int, rows: int, judge: bool
) -> list[Figure]:
    """Bandwidths and their ratios."""
    size = f"{num_bytes >> 20} MiB"
    rates = {name: [num_bytes / each / 1e6 for each in some] for name, some in seconds.items()}
    ours = ("save", "warm load", "cold load")
    rates |= {f"{name}, {size}": rates[name] for name in ours}

    def rate(name: str, against: str, bound: float) -> Figure:
        goal = Goal(bound, at_most=False) if judge else None
        return figure_of_rates(rates, f"{name}, {size}", against, goal, "MB/s")

    stall = ratio_of(seconds["stall behind training"], seconds["memcpy"])
    most = Goal(1.2, at_most=True)
    figures = [
        rate("save", "raw write", 0.7),
        rate("save", "torch.save", 1.5),
        rate("save", "torch.distributed.checkpoint", 1.5),
        rate("warm load", "warm raw read", 0.5),
        rate("cold load", "cold raw read", 0.8),
        Figure(
            f"stall behind training, {size}",
            round(1e3 * statistics.median(seconds["stall behind training"]), 1),
            "ms",
            "memcpy",
            round(stall, 3),
            str(most) if judge else None,
            most.met_by(stall) if judge else None,
        ),
        Figure(f"rows saved, {size}", round(rows / statistics.median(seconds["save"])), "rows/s"),
    ]
    if "compressed" in rates:
        rate_mb_s = round(statistics.median(rates["compressed"]))
        figures.append(Figure(f"save compressed, {size}", rate_mb_s, "MB/s"))
    return figures


if __name__ == "__main__":
    sys.exit(main())
