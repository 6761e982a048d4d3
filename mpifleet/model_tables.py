"""Which tables a model and its torch optimizer need: dense ones by param group, sparse ones."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mpifleet.embedding import SparseEmbedding
from mpifleet.errors import ConfigError
from mpifleet.ps.initializers import table_seed
from mpifleet.ps.rule_spec import rule_of_group
from mpifleet.ps.spec import DenseSpec, ParamSpec, SparseSpec, TableSpecs


@dataclass(frozen=True)
class ModelTables:
    """The tables of a model.

    dense_groups, params: the param group and the parameters of each dense table.  sparse_groups:
    of each embedding, None for a frozen one.
    """

    specs: TableSpecs
    dense_groups: list[int]
    params: list[list[nn.Parameter]]
    embeddings: list[SparseEmbedding]
    sparse_groups: list[int | None]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, model: nn.Module | None) -> "ModelTables":
        """One dense table per param group and dtype, one sparse table per embedding.

        Raises ConfigError for a dtype or a rule that servers do not have, and for equal names.
        """
        names = {id(p): name for name, p in model.named_parameters()} if model else {}
        embeddings, sparse_groups = _embeddings(optimizer, model)
        dense, dense_groups, params = [], [], []
        for number, group in enumerate(optimizer.param_groups):
            kept = [p for p in group["params"] if embedding_of(p) is None]
            for dtype in sorted({p.dtype for p in kept}, key=str):
                params.append([p for p in kept if p.dtype == dtype])
                dense_groups.append(number)
                dense.append(_dense_spec(optimizer, number, params[-1], names))
        sparse = [
            _sparse_spec(optimizer, embedding, group)
            for embedding, group in zip(embeddings, sparse_groups, strict=True)
        ]
        specs = TableSpecs(tuple(dense), tuple(sparse))
        return cls(specs, dense_groups, params, embeddings, sparse_groups)


def embedding_of(param: Tensor) -> SparseEmbedding | None:
    """The embedding whose table a parameter stands for."""
    return getattr(param, "sparse_embedding", None)


def _dense_spec(
    optimizer: torch.optim.Optimizer,
    number: int,
    params: list[nn.Parameter],
    names: Mapping[int, str],
) -> DenseSpec:
    label = str(params[0].dtype).removeprefix("torch.")
    if params[0].dtype not in (torch.float32, torch.float64):
        raise ConfigError(
            f"parameter {names.get(id(params[0]), '?')!r} has dtype {label}; keep "
            "parameters in float32 or float64 and compute under torch.autocast"
        )
    places, start = [], 0
    for index, param in enumerate(params):
        name = names.get(id(param), f"group{number}.{label}.{index}")
        places.append(ParamSpec(name, tuple(param.shape), start, start + param.numel()))
        start += param.numel()
    rule = rule_of_group(optimizer, optimizer.param_groups[number])
    return DenseSpec(f"dense{number}.{label}", label, rule, tuple(places))


def _sparse_spec(
    optimizer: torch.optim.Optimizer, embedding: SparseEmbedding, group: int | None
) -> SparseSpec:
    return SparseSpec(
        name=embedding.name,
        num_rows=embedding.table_rows,
        dim=embedding.dim,
        dtype=str(embedding.weight.dtype).removeprefix("torch."),
        # A frozen table still has a rule, which never runs.
        rule=rule_of_group(optimizer, optimizer.param_groups[group or 0]),
        initializer=embedding.initializer,
        scale=embedding.scale,
        seed=table_seed(embedding.seed, embedding.name),
    )


def _embeddings(
    optimizer: torch.optim.Optimizer, model: nn.Module | None
) -> tuple[list[SparseEmbedding], list[int | None]]:
    """All tables in order of the model, else of the groups, each with the number of its group."""
    modules = model.modules() if model is not None else ()
    embeddings = [module for module in modules if isinstance(module, SparseEmbedding)]
    group_of: dict[int, int] = {}
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            embedding = embedding_of(param)
            if embedding is not None:
                group_of[id(embedding)] = number
                if all(embedding is not known for known in embeddings):
                    embeddings.append(embedding)
    names = [embedding.name for embedding in embeddings]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{names.count(name)} tables are called {name!r}; names must differ")
    return embeddings, [group_of.get(id(embedding)) for embedding in embeddings]
