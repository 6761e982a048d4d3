"""What a model has beside trained parameters and tables: buffers and frozen parameters.

The servers do not hold it: worker 0's is given to all at the start, and saved; what buffers become
in training is each worker's own.
"""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mpifleet.checkpoint import open_checkpoint
from mpifleet.errors import CheckpointError, ConfigError
from mpifleet.mpi import gather_json, serial
from mpifleet.partition import pieces
from mpifleet.window import MAX_COUNT


def local_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, everything: bool = False
) -> dict[str, Tensor]:
    """Buffers and parameters in no group of `optimizer`, by name.

    everything: also buffers that torch's state_dict leaves out (persistent=False).
    """
    trained = {id(param) for group in optimizer.param_groups for param in group["params"]}
    saved = model.state_dict().keys()
    tensors = {name: t for name, t in model.named_buffers() if everything or name in saved}
    for name, param in model.named_parameters():
        if id(param) not in trained and not hasattr(param, "sparse_embedding"):
            tensors[name] = param
    return tensors


def share(comm: Any, tensors: dict[str, Tensor]) -> None:
    """Give every worker worker 0's values. Collective over workers.

    Raises ConfigError on every worker, naming the first tensor that differs in name or shape.
    """
    facts = [[name, str(t.dtype), list(t.shape)] for name, t in tensors.items()]
    for worker, theirs in enumerate(gather_json(comm, facts)):
        for ours, other in itertools.zip_longest(facts, theirs):
            if ours != other:
                raise ConfigError(
                    f"workers disagree on frozen parameters or buffers: worker {comm.rank} has "
                    f"{ours}, worker {worker} has {other}"
                )
    for tensor in tensors.values():
        flat = tensor.detach().cpu().contiguous().reshape(-1).clone()
        memory = flat.view(torch.uint8).numpy()
        with serial:
            for start, stop in pieces(memory.size, MAX_COUNT):
                comm.Bcast(memory[start:stop], 0)
        tensor.detach().copy_(flat.view(tensor.shape))


def to_arrays(tensors: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """The tensors' values, by name; 16-bit floats as float32, which holds them exactly.

    Raises CheckpointError naming a tensor of a dtype that a checkpoint cannot hold.
    """
    arrays = {}
    for name, tensor in tensors.items():
        values = tensor.detach().cpu()
        if values.is_complex() or values.is_quantized:
            raise CheckpointError(
                f"{name!r} is {values.dtype}, which a checkpoint cannot hold; register it as a "
                "buffer with persistent=False"
            )
        if values.dtype in (torch.bfloat16, torch.float16):
            values = values.float()
        arrays[name] = values.numpy()
    return arrays


def read_arrays(path: Path, tensors: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """The values of the tensors in a checkpoint that was checked; the tensors stay as they are.

    Raises CheckpointError naming the first that is missing or of another shape.
    """
    if not tensors:
        return {}
    with open_checkpoint(path, checked=True) as checkpoint:
        saved, path = checkpoint.buffers(), checkpoint.path
    for name, tensor in tensors.items():
        if name not in saved:
            raise CheckpointError(f"buffer {name!r} is not in the checkpoint ({path})")
        theirs, ours = saved[name].shape, tuple(tensor.shape)
        if theirs != ours:
            raise CheckpointError(f"buffer {name!r} is {theirs} in the file, {ours} here ({path})")
    return saved


def set_tensors(tensors: dict[str, Tensor], arrays: dict[str, np.ndarray]) -> None:
    """Write what `read_arrays` gave into the tensors."""
    for name, tensor in tensors.items():
        tensor.detach().copy_(torch.from_numpy(arrays[name].copy()))
