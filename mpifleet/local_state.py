"""What a model has beside trained parameters and tables: buffers and frozen parameters.

The servers do not hold it; every worker has its own, and worker 0's is saved.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from mpifleet.checkpoint import open_checkpoint
from mpifleet.errors import CheckpointError


def local_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Buffers and parameters in no group of `optimizer`, by name."""
    trained = {id(param) for group in optimizer.param_groups for param in group["params"]}
    tensors = dict(model.named_buffers())
    for name, param in model.named_parameters():
        if id(param) not in trained and not hasattr(param, "sparse_embedding"):
            tensors[name] = param
    return tensors


def to_arrays(tensors: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """The tensors' values, by name."""
    return {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}


def read_arrays(directory: Path, tensors: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """The checkpoint's values of the tensors; the tensors stay as they are.

    Raises CheckpointError naming the first that is missing or of another shape.
    """
    if not tensors:
        return {}
    with open_checkpoint(directory) as checkpoint:
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
