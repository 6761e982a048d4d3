"""A single-process job whose steps touch chosen keys, and what its checkpoints hold as bytes."""

from dataclasses import replace

import numpy as np
import torch
from torch import nn

from mpifleet.checkpoint import Keep, open_checkpoint
from mpifleet.embedding import SparseEmbedding
from mpifleet.ps.saving import SaveOptions
from tests.unit.local_job import connect, persistables

ROWS = 90
FULL, BASE, DELTA = (SaveOptions(mode=mode, keep=Keep(99)) for mode in ("full", "base", "delta"))


def behind(options):
    """The same behind training."""
    return replace(options, wait=False)


def compressed(options):
    """The same in a compressed file."""
    return replace(options, level=1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = SparseEmbedding("one", ROWS, 4, pooling="sum")
        self.two = SparseEmbedding("t%2", 7, 3, pooling="sum", dtype=torch.float64)
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 2)


class Job:
    """make: a torch optimizer class, or what makes one of parameters."""

    def __init__(self, make=torch.optim.Adam, seed=0):
        torch.manual_seed(seed)
        self.model = Net()
        self.optimizer = connect(self.model, make(self.model.parameters(), lr=0.1))
        self.face = persistables(self.optimizer, self.model)
        self.exchange = self.optimizer._exchange

    def step(self, one=(), two=()):
        """A step that changes these rows of the two tables and the dense parameters."""
        model = self.model
        self.optimizer.zero_grad()
        keys = torch.tensor([list(one)] * 2, dtype=torch.int64)
        loss = model.out(model.norm(model.one(keys) + torch.randn(2, 4))).pow(2).sum()
        loss = loss + model.two(torch.tensor([list(two)], dtype=torch.int64)).pow(3).sum()
        loss.backward()
        self.optimizer.step()

    def full(self, directory):
        """Everything as a full save has it."""
        self.face.save(directory, FULL)
        return held(directory)


def held(where):
    """All values of a checkpoint as bytes, with dtype and shape, by what they are."""
    found = {}
    with open_checkpoint(where) as checkpoint:
        for name in checkpoint.dense_names:
            entry = checkpoint.dense(name)
            found[name] = (entry.step, entry.attrs, bits({"": entry.value, **entry.state}))
        for name in checkpoint.sparse_names:
            table = checkpoint.sparse(name)
            block = checkpoint.sparse_block(name, 0, table.num_rows)
            found[name] = (dict(table.attrs), bits(block))
        found["buffers"] = bits(checkpoint.buffers())
        found["meta"] = checkpoint.meta
    return found


def bits(arrays):
    return {name: (a.dtype.str, a.shape, a.tobytes()) for name, a in arrays.items()}


def files(directory):
    """Numbers of the checkpoints, and nothing else may be there."""
    names = {path.name for path in directory.iterdir()} - {"latest"}
    numbers = sorted(int(name[6:12]) for name in names if name.endswith(".h5"))
    own = {f"model-{number:06d}.h5" for number in numbers}
    assert names == own | {name + ".sums" for name in own}
    return numbers


def path_of(directory, number):
    return directory / f"model-{number:06d}.h5"


def flip(path, at=None):
    """Damage a file: one bit, in the middle of it by default."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 4
    path.write_bytes(data)


def changed_keys(path, name="one"):
    """The keys that a delta holds of a table, as plain h5py reads them."""
    import h5py

    with h5py.File(path, "r") as file:
        group = next(g for g in file["sparse"].values() if g.attrs["name"] == name)
        keys, stretches = group["keys"][()], group["stretches"][()]
    assert stretches.sum() == keys.size
    return np.sort(keys)
