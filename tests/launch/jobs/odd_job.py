"""Jobs that go wrong before or beside training: `odd_job.py CASE`."""

import os
import sys
from pathlib import Path

import torch

from mpifleet import fleet


def build(strategy):
    model = torch.nn.Sequential(fleet.SparseEmbedding("emb", 64, 4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return model, fleet.distributed_optimizer(optimizer, strategy, model=model)


def rank():
    return int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMIX_RANK", "0")))


def main(case, folder):
    if case == "role" and rank() == 1:
        os.environ["MPIFLEET_ROLE"] = "banana"
    if case == "address":
        os.environ["MPIFLEET_LIFELINE_HOST"] = "192.0.2.1"
    fleet.init(server_num=2 if case == "files" else None)
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = False
    if case == "slow":
        strategy.stall_report_s, strategy.stall_end_s = 1.0, 2.0
    model, _ = build(strategy)
    if fleet.is_server():
        if case == "files" and fleet.server_index() == 0:
            fleet.init_server(Path(folder) / "nowhere")
        fleet.run_server()
        if case == "early":
            fleet.util.barrier("all")
        return
    fleet.init_worker()
    if case == "unsendable" and fleet.worker_index() == 0:
        fleet.util.all_gather(object())
    if case == "slow" and fleet.worker_index() == 0:
        import time

        time.sleep(5)
    if case == "early" and fleet.worker_index() == 1:
        sys.exit(0)
    if case in ("unsendable", "slow"):
        print("gathered", fleet.util.all_gather(fleet.worker_index()), flush=True)
    model(torch.arange(8)[:, None]).sum().backward()
    fleet.stop_worker()
    if case == "early":
        fleet.util.barrier("all")


if __name__ == "__main__":
    main(*sys.argv[1:])
