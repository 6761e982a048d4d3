"""A small click model trained by servers and workers; each rank misbehaves as it is told.

ctr_job.py [--mode async] [--steps N] [NAME:ACTION[@STEP] ...], NAME such as worker1 or server0:

    raise@S     an exception in step S            nan@S     the loss of step S is not a number
    exit0@S     sys.exit(0) in step S             exit3@S   sys.exit(3) in step S
    break@S     leaves the loop, never stops      forget    trains to its end, never stops
    batches@N   has only N batches                leave     sys.exit(0) instead of starting
    rows        has a larger table                mode      has the other mode
    quiet       worker: serves no step from S on, waits

MPIFLEET_TEST_PHASES names a folder: each rank appends "PHASE SECONDS PID ROLE" to its file
rank<R> there whenever it enters a phase; SECONDS are of time.monotonic(), one clock for a machine.
Worker 0 prints "digest HEX", which covers every parameter and row, and "done".
"""

import argparse
import atexit
import hashlib
import os
import sys
import time

LAUNCHED = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")
RANK = next((os.environ[name] for name in LAUNCHED if name in os.environ), "0")
FOLDER = os.environ.get("MPIFLEET_TEST_PHASES")
PHASES = os.open(f"{FOLDER}/rank{RANK}", os.O_WRONLY | os.O_CREAT | os.O_APPEND) if FOLDER else -1
NUM_ROWS, DIM, SLOTS, BATCH = 500, 4, 3, 16
who = "-"


def enter(phase: str) -> None:
    """Say that this rank is in `phase` from now on."""
    if PHASES >= 0:
        os.write(PHASES, f"{phase} {time.monotonic():.6f} {os.getpid()} {who}\n".encode())


enter("import")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

from mpifleet import fleet  # noqa: E402


class Clicks(nn.Module):
    """Embeddings of SLOTS ids and one dense layer."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.table = fleet.SparseEmbedding("clicks", num_rows, DIM, pooling="concat")
        self.out = nn.Linear(SLOTS * DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """One logit a sample, [B]."""
        return self.out(self.table(ids)).squeeze(1)


def batch_of(worker: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ids int64 [BATCH, SLOTS] and labels float32 [BATCH]."""
    draw = np.random.default_rng([worker, step])
    ids = draw.integers(0, NUM_ROWS, (BATCH, SLOTS))
    return torch.from_numpy(ids), torch.from_numpy((ids.sum(1) % 2).astype(np.float32))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=["sync", "async"], default="sync")
    parser.add_argument("--home", default="auto")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--pause-s", type=float, default=0.0)
    parser.add_argument("--save", help="write a checkpoint there, every tenth step and at the end")
    parser.add_argument("--load", help="start from a checkpoint")
    parser.add_argument("--meet", action="store_true", help="workers meet before they stop")
    parser.add_argument("--apart", help="work in the folder there that has the node's name")
    parser.add_argument("--stall", type=float, nargs=2, metavar=("REPORT_S", "END_S"))
    parser.add_argument("actions", nargs="*")
    return parser.parse_args()


def strategy_of(args: argparse.Namespace, actions: dict[str, int]) -> fleet.DistributedStrategy:
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = (args.mode == "async") != ("mode" in actions)
    strategy.table_home = args.home
    if args.stall:
        strategy.stall_report_s, strategy.stall_end_s = args.stall
    return strategy


def misbehave(actions: dict[str, int], step: int) -> None:
    if actions.get("raise") == step:
        raise ValueError(f"no such thing in step {step}")
    if actions.get("exit0") == step:
        sys.exit(0)
    if actions.get("exit3") == step:
        sys.exit(3)


def train(args, model, optimizer, actions) -> bool:
    """Whether the loop came to its end."""
    worker = fleet.worker_index()
    for step in range(actions.get("batches", args.steps)):
        if actions.get("break") == step:
            return False
        misbehave(actions, step)
        ids, labels = batch_of(worker, step)
        enter("pull")
        loss = nn.functional.binary_cross_entropy_with_logits(model(ids), labels)
        if actions.get("nan") == step:
            loss = loss * float("nan")
        enter("compute")
        loss.backward()
        enter("push")
        optimizer.step()
        optimizer.zero_grad()
        if args.save and worker == 0 and step % 10 == 9:
            enter("save")
            fleet.save_persistables(args.save)
        enter("pause")
        if args.pause_s:
            time.sleep(args.pause_s)
    return True


def digest(model: Clicks) -> str:
    """A hash of every parameter and row."""
    seen = hashlib.sha256()
    for param in model.out.parameters():
        seen.update(param.detach().numpy().tobytes())
    with torch.no_grad():
        keys = torch.arange(NUM_ROWS).repeat_interleave(SLOTS).view(NUM_ROWS, SLOTS)
        seen.update(model.table(keys).numpy().tobytes())
    return seen.hexdigest()


def main() -> None:
    global who
    args = parse()
    if args.apart:
        os.chdir(f"{args.apart}/{os.environ['SLURMD_NODENAME']}")
    # Exit handlers run last in, first out: this one when MPI has ended and nobody watches any more.
    atexit.register(enter, "gone")
    enter("init")
    fleet.init()
    is_server = fleet.is_server()
    who = f"server{fleet.server_index()}" if is_server else f"worker{fleet.worker_index()}"
    words = [word.split(":")[1].split("@") for word in args.actions if word.startswith(f"{who}:")]
    actions = {word[0]: int(word[1]) if len(word) > 1 else 0 for word in words}
    print(f"ready {RANK} {os.getpid()}\n", end="", flush=True)
    torch.manual_seed(1)
    model = Clicks(NUM_ROWS + ("rows" in actions))
    inner = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = fleet.distributed_optimizer(inner, strategy_of(args, actions), model=model)
    if "leave" in actions:
        sys.exit(0)
    enter("start")
    if is_server:
        fleet.init_server(args.load)
        fleet.run_server()
        enter("stop")
        return
    fleet.init_worker()
    if not train(args, model, optimizer, actions) or "forget" in actions:
        return
    fleet.flush()
    if args.meet:
        fleet.barrier_worker()
    if args.save:
        enter("save")
        fleet.save_persistables(args.save)
    if fleet.is_first_worker():
        optimizer.refresh()
        print(f"digest {digest(model)}\ndone\n", end="", flush=True)
    enter("stop")
    fleet.stop_worker()


main()
