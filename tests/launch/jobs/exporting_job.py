"""Trains a small model and exports it, or predicts from what was exported.

exporting_job.py train DIR: every worker trains and calls fleet.save_inference_model(DIR).
exporting_job.py infer DIR: one process, without a job.  Both print "predictions HEX".
"""

import sys

import torch
from torch import nn

from mpifleet import fleet, inference


class Model(nn.Module):
    """Two ids a sample, one output."""

    def __init__(self) -> None:
        super().__init__()
        self.table = fleet.SparseEmbedding("t", 100, 4)
        self.out = nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[B, 1] of ids [B, 2]."""
        return self.out(self.table(ids))


def show(model: Model) -> None:
    with torch.no_grad():
        values = model(torch.arange(100).reshape(-1, 2))
    print("predictions", values.numpy().tobytes().hex(), flush=True)


what, directory = sys.argv[1:]
if what == "infer":
    show(inference.load(directory, Model()))
    sys.exit(0)
fleet.init()
strategy = fleet.DistributedStrategy()
strategy.a_sync = False
model = Model()
optimizer = torch.optim.Adam(model.parameters(), 0.05)
optimizer = fleet.distributed_optimizer(optimizer, strategy, model=model)
if fleet.is_server():
    fleet.run_server()
    sys.exit(0)
fleet.init_worker()
generator = torch.Generator().manual_seed(fleet.worker_index())
for _ in range(10):
    ids = torch.randint(50, (8, 2), generator=generator)
    (model(ids) - ids.float().mean(1, keepdim=True)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
fleet.save_inference_model(directory, keys="trained")
fleet.flush()
if fleet.is_first_worker():
    show(model)
fleet.stop_worker()
