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

from mpifleet.checkpoint import Checkpoint, open_checkpoint
from mpifleet.errors import CheckpointError, ConfigError
from mpifleet.mpi import gather_json, serial
from mpifleet.partition import pieces
from mpifleet.ps.fit import extra_entry, misfit_entry, missing_entry
from mpifleet.ps.load_report import LoadedEntry, LoadReport
from mpifleet.window import MAX_COUNT

_HALVES = (torch.bfloat16, torch.float16)


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
        if values.dtype in _HALVES:
            values = values.float()
        arrays[name] = values.numpy()
    return arrays


def read_arrays(
    path: Path, tensors: dict[str, Tensor], strict: bool = True
) -> tuple[dict[str, np.ndarray], list[LoadedEntry]]:
    """The values of the tensors in a checkpoint that was checked; the tensors stay as they are.

    Returns those that fit, by name, and what became of each tensor and of each buffer of the file.
    Raises CheckpointError naming the first that is missing, of another shape, or of a dtype whose
    values the tensor does not hold, where strict.
    """
    arrays, entries = {}, []
    with open_checkpoint(path, checked=True) as checkpoint:
        path = checkpoint.path
        for name, tensor in tensors.items():
            entries.append(_entry(checkpoint, name, tensor))
            if entries[-1].is_taken:
                arrays[name] = checkpoint.buffer_block(name)
        extra = [name for name in checkpoint.buffer_names if name not in tensors]
    entries += [extra_entry("buffer", name, path) for name in extra]
    failure = LoadReport(str(path), tuple(entries)).failure()
    if strict and failure:
        raise CheckpointError(failure)
    return arrays, entries


def _entry(checkpoint: Checkpoint, name: str, tensor: Tensor) -> LoadedEntry:
    if name not in checkpoint.buffer_names:
        return missing_entry("buffer", name, checkpoint.path)
    shape, dtype = checkpoint.buffer_shape(name)
    ours = tuple(tensor.shape)
    if shape != ours:
        return misfit_entry("buffer", name, shape, ours, checkpoint.path)
    if not holds(tensor, dtype):
        return misfit_entry("buffer", name, dtype, _name_of(tensor), checkpoint.path)
    return LoadedEntry("buffer", name, "taken")


def holds(tensor: Tensor, saved: str | np.dtype) -> bool:
    """Whether the tensor takes all values of this dtype as they are; see `to_arrays`."""
    ours = "float32" if tensor.dtype in _HALVES else _name_of(tensor)
    try:
        return bool(np.can_cast(np.dtype(saved), np.dtype(ours), "safe"))
    except TypeError:  # numpy has none of that name
        return False


def _name_of(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def set_tensors(tensors: dict[str, Tensor], arrays: dict[str, np.ndarray]) -> None:
    """Write what `read_arrays` gave into the tensors."""
    for name, values in arrays.items():
        tensors[name].detach().copy_(torch.from_numpy(values.copy()))
