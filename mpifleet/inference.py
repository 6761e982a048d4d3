"""Fills a model with what `fleet.save_inference_model` wrote, to predict without MPI.

from mpifleet import inference
model = inference.load("served", MyModel()).eval()
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from mpifleet.embedding import SparseEmbedding
from mpifleet.errors import CheckpointError, TableError
from mpifleet.exchange import Exchange
from mpifleet.model_names import tensors_of_model
from mpifleet.partition import UniqueKeys, pieces
from mpifleet.paths import Named, path_of
from mpifleet.portable.inference_reading import (
    StoredTable,
    open_inference,
    while_it_stands,
)
from mpifleet.portable.row_store import RowStore
from mpifleet.portable.safetensors_file import SafetensorsFile
from mpifleet.ps.seat import Seat
from mpifleet.step_clock import StepClock

__all__ = ["load", "load_dense_params"]

_BLOCK_ROWS = 1 << 16


def load(
    dirname: Named,
    model: nn.Module,
    *,
    unknown: str = "error",
    verify: bool = True,
    mapped: bool = True,
) -> Any:
    """Fill `model` and return it. Needs no MPI, no fleet.init() and no optimizer.

    Each table is taken by the model's SparseEmbedding of that name, which then reads rows as they
    are looked up, or by a torch nn.Embedding or nn.EmbeddingBag where the trained model had its
    SparseEmbedding, whose weight [num_rows, dim] is filled.

    unknown: what a key gives that was not exported, "error", "initial" (what the row was before
    training) or "zeros".  verify: compare all files with their digests first, which reads each
    once.  mapped: rows stay in the files, shared by all processes of a host; else they are read
    now.  Raises CheckpointError naming what is missing, superfluous, damaged, or of another shape
    or dtype; the model is then as it was.
    """
    where = path_of("dirname", dirname)

    def fill() -> None:
        directory = open_inference(where, verify)
        stores = {name: t.store(unknown, mapped) for name, t in directory.tables.items()}
        places = _places(model, directory.tables.values(), where, unknown)
        others = {path for table in places for path in _weights(table)}
        _set_dense(model, directory.dense, others, directory.aliases)
        for place in places:
            place.fill(stores[place.table.name])

    while_it_stands(where, fill)
    return model


def load_dense_params(path: Named, model: nn.Module) -> Any:
    """Fill parameters and buffers of `model` from a safetensors file, and return the model.

    For what fleet.save_dense_params wrote. Rows of tables stay as they are. Raises CheckpointError
    naming what is missing, superfluous, or of another shape or dtype; DataError for a damaged file.
    """
    _set_dense(model, SafetensorsFile(path_of("path", path)), set(), {})
    return model


class _Place:
    """Where in the model a table goes: modules, by their names."""

    def __init__(self, table: StoredTable, modules: dict[str, nn.Module]) -> None:
        self.table, self.modules = table, modules

    @torch.no_grad()
    def fill(self, store: RowStore) -> None:
        """Connect the model's SparseEmbedding, or write the rows into torch's own."""
        for module in {id(module): module for module in self.modules.values()}.values():
            if isinstance(module, SparseEmbedding):
                module.connect(cast(Exchange, _StoredRows(store)), 0)
                continue
            weight = cast(Tensor, module.weight)
            for first, last in pieces(self.table.num_rows, _BLOCK_ROWS):
                rows = store.take(np.arange(first, last))
                weight[first:last] = torch.from_numpy(rows)
            if self.table.padding:
                weight[list(self.table.padding)] = 0


def _weights(place: _Place) -> Iterable[str]:
    return (f"{name}.weight" for name in place.modules)


def _places(
    model: nn.Module, tables: Iterable[StoredTable], where: Path, unknown: str
) -> list[_Place]:
    """Raises CheckpointError where tables and modules do not fit one another."""
    modules = dict(model.named_modules(remove_duplicate=False))
    found = []
    for table in tables:
        own: dict[str, nn.Module] = {
            path: module
            for path, module in modules.items()
            if isinstance(module, SparseEmbedding) and module.name == table.name
        }
        if not own:
            plain = (nn.Embedding, nn.EmbeddingBag)
            own = {p: modules[p] for p in table.modules if isinstance(modules.get(p), plain)}
        if not own:
            at = " or ".join(map(repr, table.modules)) or "any name"
            raise CheckpointError(
                f"table {table.name!r} ({where}): the model has neither a SparseEmbedding of this "
                f"name nor an nn.Embedding or nn.EmbeddingBag at {at}"
            )
        for path, module in own.items():
            _check_fits(table, path, module)
            if not isinstance(module, SparseEmbedding) and table.lacks_rows and unknown == "error":
                raise CheckpointError(
                    f"table {table.name!r} ({where}) has {table.stored:,} of {table.num_rows:,} "
                    f"rows, and {path!r} takes all: export all, or load with unknown='initial' or "
                    "'zeros'"
                )
        found.append(_Place(table, own))
    taken = {path for place in found for path in place.modules}
    for path, module in modules.items():
        if isinstance(module, SparseEmbedding) and path not in taken:
            raise CheckpointError(f"table {module.name!r} of the model is not in {where}")
    return found


def _check_fits(table: StoredTable, path: str, module: nn.Module) -> None:
    weight = cast(Tensor, module.weight)
    rows = module.table_rows if isinstance(module, SparseEmbedding) else weight.shape[0]
    here = (rows, weight.shape[1], str(weight.dtype).removeprefix("torch."))
    there = (table.num_rows, table.dim, table.dtype)
    if here != there:
        raise CheckpointError(f"table {table.name!r} is {there} in the file, {here} at {path!r}")


@torch.no_grad()
def _set_dense(
    model: nn.Module, file: SafetensorsFile, others: set[str], aliases: Mapping[str, str]
) -> None:
    """others: names of parameters that come from tables.  aliases: names of the file's tensors."""
    tensors = {name: t for name, t in tensors_of_model(model)[0].items() if name not in others}
    # Of a parameter that was tied where it was trained, and is not here, the file has one name.
    names = {name: name if name in file.places else aliases.get(name, name) for name in tensors}
    for name, theirs in names.items():
        if theirs not in file.places:
            raise CheckpointError(
                f"parameter or buffer {name!r} of the model is not in {file.path}"
            )
        here = (tuple(tensors[name].shape), tensors[name].dtype)
        there = (file.places[theirs].shape, file.places[theirs].dtype)
        if here != there:
            raise CheckpointError(f"{name!r} is {there} in {file.path}, {here} in the model")
    for name in file.places:
        if name not in names.values():
            raise CheckpointError(
                f"parameter or buffer {name!r} of {file.path} is not in the model"
            )
    for name, tensor in tensors.items():
        tensor.copy_(file.tensor(names[name]))


class _Still(StepClock):
    """A clock that nobody reads; so that threads may share it."""

    def enter(self, phase: str) -> str:
        """See StepClock."""
        return phase


class _StoredRows:
    """The part of an Exchange that look-ups need, over stored rows."""

    num_servers = 1
    is_for_copies = True

    def __init__(self, store: RowStore) -> None:
        self._store = store
        self.seat = Seat.new(self.num_servers)
        self.clock: StepClock = _Still()

    def __deepcopy__(self, _memo: object) -> "_StoredRows":
        return _StoredRows(self._store)  # rows are read only: copies of a model share them

    def __reduce__(self) -> Any:
        return _StoredRows, (self._store,)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # Python asks what protocols there are
        raise TableError(
            f"table {self._store.name!r} was loaded for inference: there is no {name}() for it"
        )

    def pull_rows(self, _table: int, unique: UniqueKeys) -> np.ndarray:
        """See Exchange."""
        return self._store.take(unique.keys)

    def begin_rows(self, table: int, unique: UniqueKeys) -> "_Rows":
        """See Exchange. Nothing is on its way here."""
        return _Rows(self.pull_rows(table, unique))


class _Rows:
    """See PulledRows."""

    def __init__(self, rows: np.ndarray) -> None:
        self._rows = rows

    def read_near(self) -> None:
        """Nothing is left to read."""

    def take(self) -> np.ndarray:
        """The rows."""
        return self._rows
