"""A perceptron with two hidden layers on scikit-learn's digits: dense parameters only.

digits_job.py sync|async FILE.npz; the file holds data [n, 64] and target [n]. Worker 0 prints
"accuracy A" of the 297 digits that nobody trains on.
"""

import sys

import numpy as np
import torch
from torch import nn

from mpifleet import fleet

NUM_TEST, BATCH, EPOCHS = 297, 50, 24


def main() -> None:
    fleet.init()
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = sys.argv[1] == "async"
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)
    )
    # Momentum and the other worker's late gradients add up: async mode takes smaller steps.
    lr = 0.02 if strategy.a_sync else 0.1
    inner = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    optimizer = fleet.distributed_optimizer(inner, strategy, model=model)
    if fleet.is_server():
        fleet.run_server()
        return
    fleet.init_worker()
    digits = np.load(sys.argv[2])
    order = np.random.default_rng(5).permutation(len(digits["target"]))
    images = torch.from_numpy(digits["data"][order] / 16).float()
    labels = torch.from_numpy(digits["target"][order])
    train = np.arange(NUM_TEST, len(order))
    for epoch in range(EPOCHS):
        # Each worker its own part of every batch's samples, an equal number on all.
        turn = np.random.default_rng(epoch).permutation(train)[:1500].reshape(-1, BATCH)
        for rows in turn[fleet.worker_index() :: fleet.worker_num()]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
    fleet.flush()
    fleet.barrier_worker()
    optimizer.refresh()
    if fleet.is_first_worker():
        with torch.no_grad():
            right = model(images[:NUM_TEST]).argmax(1) == labels[:NUM_TEST]
        print(f"accuracy {right.float().mean().item():.4f}", flush=True)
    fleet.stop_worker()


main()
