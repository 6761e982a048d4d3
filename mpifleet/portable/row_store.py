"""Rows of a table by key, found with one sorted search and read with one index."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mpifleet.errors import ConfigError, TableError
from mpifleet.portable.sources import FirstValues

UNKNOWN = ("error", "initial", "zeros")
"""What a key without a stored row gives: an error, the row's first values, or zeros."""


class RowStore:
    """Read-only rows of table `name`; safe to use from several threads.

    rows: [n, dim], may be mapped from a file.  keys: int64 [n], sorted and distinct; None where row
    i is that of key i.  unknown: one of UNKNOWN.  first: the table's first values, for "initial".
    Raises ConfigError where `unknown` cannot be done.
    """

    def __init__(
        self,
        name: str,
        rows: Tensor,
        keys: np.ndarray | None,
        unknown: str = "error",
        first: FirstValues | None = None,
    ) -> None:
        if unknown not in UNKNOWN:
            raise ConfigError(f"unknown={unknown!r}; use one of {', '.join(UNKNOWN)}")
        if unknown == "initial" and first is None:
            raise ConfigError(f"unknown='initial': table {name!r} does not say how its rows began")
        self.name = name
        self._rows, self._keys = rows, keys
        self._unknown, self._first = unknown, first

    def take(self, keys: np.ndarray) -> np.ndarray:
        """Rows of keys, [n, dim]; int64 [n] in any order, each inside the table.

        Raises TableError naming the first unknown key, where unknown is "error".
        """
        if self._keys is None:
            return self._rows.index_select(0, torch.from_numpy(keys)).numpy()
        places = np.searchsorted(self._keys, keys)
        if self._keys.size:
            np.minimum(places, self._keys.size - 1, out=places)
            found = self._keys[places] == keys
        else:
            found = np.zeros(keys.shape, bool)
        if found.all():
            return self._rows.index_select(0, torch.from_numpy(places)).numpy()
        if self._unknown == "error":
            missing = int(keys[~found][0])
            raise TableError(
                f"table {self.name!r}: key {missing} is not among the {self._keys.size:,} keys "
                "that were exported; export it too, or load with unknown='initial' or 'zeros'"
            )
        return self._filled(keys, places, found)

    def _filled(self, keys: np.ndarray, places: np.ndarray, found: np.ndarray) -> np.ndarray:
        dim = self._rows.shape[1]
        dtype = self._rows.numpy().dtype
        out = np.zeros((keys.size, dim), dtype)
        out[found] = self._rows.index_select(0, torch.from_numpy(places[found])).numpy()
        if self._unknown == "initial":
            assert self._first is not None
            out[~found] = self._first.rows(keys[~found], dim, dtype.name)
        return out
