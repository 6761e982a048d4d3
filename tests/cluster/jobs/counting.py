"""A training job whose result is known without running it, or is compared bit by bit.

python counting.py OUT --home node|world --mode sync|async --rule sgd|adam [--mpi-first]

With sgd every gradient is a count: each look-up of a row adds 1 to its gradient, each step adds 1
to that of `bias`, and all starts at zero. With adam the gradients are ordinary floats.
"""

import argparse

import numpy as np

NUM_ROWS = 500
STEPS = 12
BATCH = (8, 5)
LR = 1 / 64


def ids_of(worker: int, step: int) -> np.ndarray:
    """The ids that a worker looks up in a step, int64 BATCH; duplicates are likely."""
    return np.random.default_rng([worker, step]).integers(0, NUM_ROWS, BATCH)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--home", choices=["node", "world"], required=True)
    parser.add_argument("--mode", choices=["sync", "async"], required=True)
    parser.add_argument("--rule", choices=["sgd", "adam"], required=True)
    parser.add_argument("--mpi-first", action="store_true")
    args = parser.parse_args()
    if args.mpi_first:
        import mpi4py.MPI  # noqa: F401
    import torch

    from mpifleet import fleet

    fleet.init()
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = args.mode == "async"
    strategy.table_home = args.home
    exact = args.rule == "sgd"
    table = fleet.SparseEmbedding("rows", NUM_ROWS, 4, pooling="sum", scale=0.0 if exact else 0.1)
    model = torch.nn.ParameterDict({"bias": torch.nn.Parameter(torch.zeros(3))})
    model = torch.nn.ModuleDict({"table": table, "dense": model})
    rule = torch.optim.SGD if exact else torch.optim.Adam
    optimizer = fleet.distributed_optimizer(rule(model.parameters(), lr=LR), strategy, model=model)
    if fleet.is_server():
        fleet.run_server()
        return
    fleet.init_worker()
    for step in range(STEPS):
        pooled = table(torch.from_numpy(ids_of(fleet.worker_index(), step)))
        bias = model["dense"]["bias"]
        if exact:
            loss = pooled.sum() + bias.sum()
        else:
            loss = ((pooled.sum(1) - bias.sum() - 1) ** 2).mean() + (bias**3).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    fleet.flush()
    fleet.barrier_worker()
    fleet.save_persistables(args.out)
    fleet.stop_worker()


if __name__ == "__main__":
    main()
