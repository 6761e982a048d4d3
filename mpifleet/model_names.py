"""How the tensors of a model are called: what torch's state_dict holds, and which are tables."""

from typing import Any

from torch import Tensor, nn

from mpifleet.embedding import SparseEmbedding


def tensors_of_model(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(parameters and saved buffers by name, further names of those with their first one).

    What state_dict() has, without what stands for tables.  A tied parameter has several names.
    """
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and not hasattr(tensor, "sparse_embedding"):
            known = first.setdefault(id(tensor), name)
            if known == name:
                tensors[name] = tensor
            else:
                aliases[name] = known
    return tensors, aliases


def names_of_model(model: nn.Module | None) -> dict[str, Any]:
    """JSON-able facts that a checkpoint keeps beside the values, for exports into other formats.

    tables: by table, `modules`, the names of the modules that are it, and `padding`, the keys that
    look-ups answer with zeros.  aliases: see `tensors_of_model`.  dtypes: of 16-bit floats, which
    a checkpoint holds as float32.
    """
    if model is None:
        return {}
    tables: dict[str, dict[str, Any]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, SparseEmbedding):
            facts = {"modules": [], "padding": _padding(module)}
            tables.setdefault(module.name, facts)["modules"].append(path)
    tensors, aliases = tensors_of_model(model)
    names = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
    short = {name: text for name, text in names.items() if text in ("bfloat16", "float16")}
    return {"tables": tables, "aliases": aliases, "dtypes": short}


def _padding(table: SparseEmbedding) -> list[int]:
    if table.padding_idx is None:
        return []
    slots = 1 if table.shared else table.num_slots
    return [slot * table.num_rows + table.padding_idx for slot in range(slots)]
