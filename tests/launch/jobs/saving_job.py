"""Saves again and again, by turns behind training: `saving_job.py DIR [kill RANK CALL]`.

Every step adds one to every element, so that a checkpoint of one moment has the same number
everywhere: the number of steps.  RANK kills itself before the CALL-th of the calls to the system
that a save is made of.
"""

import os
import signal
import sys
from pathlib import Path

import torch

from mpifleet import fleet

ROWS, DIM, EVERY = 20_001, 8, 3
CALLS = ("open", "pwrite", "fdatasync", "fsync", "replace", "fchmod", "unlink", "preadv")


def rank():
    return int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))


def kill_before(number):
    """From now on the number-th of CALLS is not made any more."""
    made = 0

    def counted(call):
        def counting(*arguments, **options):
            nonlocal made
            made += 1
            if made > number:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return counting

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))


class Ones(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = fleet.SparseEmbedding("t", ROWS, DIM, initializer="zeros")
        self.dense = torch.nn.Parameter(torch.zeros(5_000))

    def forward(self, ids):
        return -self.table(ids).sum() - self.dense.sum()


def main(folder, *kill):
    fleet.init()
    model = Ones()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = fleet.distributed_optimizer(optimizer, model=model)
    if kill and int(kill[1]) == rank():
        kill_before(int(kill[2]))
    if fleet.is_server():
        fleet.run_server()
        return
    fleet.init_worker()
    ids = torch.arange(ROWS)[:, None]
    for step in range(1, 100 * EVERY):
        model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY == 0:
            fleet.save_persistables(Path(folder), wait=step // EVERY % 2 == 0, keep_last=2)
            if step == 2 * EVERY:  # the first that was waited for
                print("ready", rank(), os.getpid(), flush=True)
    fleet.stop_worker()


if __name__ == "__main__":
    main(*sys.argv[1:])
