"""The options of a table, each checked by name before anything is made of it."""

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from mpifleet.errors import ConfigError
from mpifleet.ps.initializers import KINDS

POOLINGS = ("sum", "mean", "concat")
DTYPES = (torch.float32, torch.float64)


def check_table_options(options: Mapping[str, Any]) -> None:
    """Raise ConfigError naming table, option, value and what is valid.

    options: all arguments of SparseEmbedding by name.
    """
    name = options["name"]
    if not isinstance(name, str) or not name or "/" in name:
        raise ConfigError(f"table name {name!r}: use a non-empty text without '/'")
    for option, (is_valid, valid) in _CHECKS.items():
        if not is_valid(options[option]):
            raise ConfigError(f"table {name!r}: {option}={options[option]!r}; use {valid}")
    _check_scale(name, options["scale"], options["initializer"])
    padding, num_rows = options["padding_idx"], options["num_rows"]
    if padding is not None and not (_is_whole(padding) and 0 <= padding < num_rows):
        raise ConfigError(
            f"table {name!r}: padding_idx={padding!r}; use None or a whole number in "
            f"[0, {num_rows})"
        )


def _check_scale(name: str, scale: Any, initializer: str) -> None:
    if scale is None:
        return
    is_number = isinstance(scale, numbers.Real) and not isinstance(scale, bool)
    low = -math.inf if initializer == "constant" else 0.0
    if not is_number or not math.isfinite(scale) or scale < low:
        valid = "a finite number" + (" of at least 0" if low == 0.0 else "")
        raise ConfigError(
            f"table {name!r}: scale={scale!r} of initializer {initializer!r}; use None or {valid}"
        )


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_whole(value) and bool(value >= 1)


def _one_of(valid: tuple[Any, ...]) -> Callable[[Any], bool]:
    # Compared by type first: an array, for one, does not compare to one truth.
    return lambda value: any(isinstance(value, type(one)) and value == one for one in valid)


_COUNT = (_is_count, "a whole number of at least 1")
_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "num_rows": _COUNT,
    "dim": _COUNT,
    "num_slots": _COUNT,
    "pooling": (_one_of(POOLINGS), f"one of {', '.join(POOLINGS)}"),
    "shared": (lambda value: isinstance(value, bool), "True or False"),
    "initializer": (_one_of(KINDS), f"one of {', '.join(KINDS)}"),
    "seed": (_is_whole, "a whole number"),
    "dtype": (_one_of(DTYPES), "torch.float32 or torch.float64"),
}
