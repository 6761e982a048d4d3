"""What tables a job has, and where each lies in a server's memory. Pure; the same on every rank."""

import json
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np

from mpifleet.partition import align, block, shard_rows
from mpifleet.ps.rule_spec import HYPER_SIZE, RuleSpec


@dataclass(frozen=True)
class ParamSpec:
    """One dense parameter: its name, torch shape and place in its table's flat array."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class DenseSpec:
    """All dense parameters of one param group and dtype, flat and in order."""

    name: str
    dtype: str
    rule: RuleSpec
    params: tuple[ParamSpec, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.params[-1].stop if self.params else 0


@dataclass(frozen=True)
class SparseSpec:
    """Rows [num_rows, dim]; key k is row k // num_servers of server k % num_servers."""

    name: str
    num_rows: int
    dim: int
    dtype: str
    rule: RuleSpec
    initializer: str
    scale: float
    seed: int


@dataclass(frozen=True)
class TableSpecs:
    """Every table of a job. Ranks compare `facts()` before anything is allocated."""

    dense: tuple[DenseSpec, ...]
    sparse: tuple[SparseSpec, ...]

    def facts(self) -> dict[str, str]:
        """One line of text per table, by name, for comparing ranks."""
        specs: tuple[DenseSpec | SparseSpec, ...] = (*self.dense, *self.sparse)
        return {f"table {s.name!r}": json.dumps(asdict(s), sort_keys=True) for s in specs}


@dataclass(frozen=True)
class DenseSlice:
    """A server's part of one dense table: elements [start, stop) at byte `offset` of its memory."""

    start: int
    stop: int
    offset: int

    def share_of(self, param: ParamSpec) -> tuple[slice, slice]:
        """This part's elements of a parameter: within the part, and within the parameter."""
        low = max(param.start, self.start)
        high = max(low, min(param.stop, self.stop))
        within = slice(low - self.start, high - self.start)
        return within, slice(low - param.start, high - param.start)


class ShardLayout:
    """Where every table's part lies in the memory of one of `num_servers` servers.

    num_bytes = sum of the parts, each rounded up to a cache line.
    """

    def __init__(self, specs: TableSpecs, server: int, num_servers: int) -> None:
        self.specs = specs
        self.server = server
        self.num_servers = num_servers
        self.dense: list[DenseSlice] = []
        self.sparse_offsets: list[int] = []
        self.sparse_rows: list[int] = []
        offset = 0
        for spec in specs.dense:
            start, stop = block(spec.size, num_servers, server)
            self.dense.append(DenseSlice(start, stop, offset))
            offset += align((stop - start) * np.dtype(spec.dtype).itemsize)
        for table in specs.sparse:
            rows = shard_rows(table.num_rows, num_servers, server)
            self.sparse_offsets.append(offset)
            self.sparse_rows.append(rows)
            offset += align(rows * table.dim * np.dtype(table.dtype).itemsize)
        self.num_bytes = offset

    @cached_property
    def dense_message_bytes(self) -> int:
        """Size of one step's dense message to this server: see ps.message."""
        total = 0
        for spec, part in zip(self.specs.dense, self.dense, strict=True):
            total += align(HYPER_SIZE * 8) + align(len(spec.params))
            total += align((part.stop - part.start) * np.dtype(spec.dtype).itemsize)
        return total

    def dense_view(self, memory: np.ndarray, table: int) -> np.ndarray:
        """This server's elements of a dense table within its memory (uint8)."""
        spec, part = self.specs.dense[table], self.dense[table]
        dtype = np.dtype(spec.dtype)
        num_bytes = (part.stop - part.start) * dtype.itemsize
        return memory[part.offset : part.offset + num_bytes].view(dtype)

    def sparse_view(self, memory: np.ndarray, table: int) -> np.ndarray:
        """This server's rows [rows, dim] of a sparse table within its memory (uint8)."""
        spec, offset = self.specs.sparse[table], self.sparse_offsets[table]
        dtype = np.dtype(spec.dtype)
        num_bytes = self.sparse_rows[table] * spec.dim * dtype.itemsize
        return memory[offset : offset + num_bytes].view(dtype).reshape(-1, spec.dim)


def layouts(specs: TableSpecs, num_servers: int) -> list[ShardLayout]:
    """The layout of every server."""
    return [ShardLayout(specs, server, num_servers) for server in range(num_servers)]
