"""Python values as JSON-able facts and arrays, and back: what a state_dict() is made of.

None, booleans, integers, text, lists and dicts of text stand in the facts as they are.  All else is
a dict of one key that begins with "$", which says what it is:

    {"$float": "nan"}                 nan, inf or -inf, which JSON lacks
    {"$tuple": [...]}, {"$set": [...]}, {"$frozenset": [...]}
    {"$dict": [[key, value], ...]}    keys other than text, or text that begins with "$"
    {"$counter": [[key, value], ...]} collections.Counter
    {"$array": name}                  numpy, the array of this name
    {"$scalar": name}                 numpy, a single value
    {"$tensor": name, "dtype": ...}   torch, on the CPU; 16-bit floats are stored as float32

Anything else is refused by name: reading it back would have to run code.
"""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from mpifleet.errors import CheckpointError
from mpifleet.states import State

MAX_INT_BITS = 8192
"""Python makes no text of integers that are much longer, and reads none."""
_HALVES = (torch.bfloat16, torch.float16)
_VALID = (
    "None, booleans, numbers, text, lists, tuples, sets, dicts, torch tensors and numpy arrays of "
    "numbers"
)


def to_state(owner: str, value: Any) -> State:
    """facts: {"value": ...} in the form above.

    owner: how errors call it.  Raises CheckpointError naming the first value that does not fit.
    """
    writer = _Writer(owner)
    try:
        return State({"value": writer.encode(value, "")}, writer.arrays)
    except RecursionError as cause:
        raise CheckpointError(
            f"{owner}it is nested too deeply, or holds itself, which a checkpoint cannot hold"
        ) from cause


def from_state(owner: str, state: State) -> Any:
    """The inverse of `to_state`. Raises CheckpointError where the state is not of that form."""
    try:
        return _decode(state.facts["value"], state.arrays)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as cause:
        raise CheckpointError(f"{owner} is damaged: {type(cause).__name__}: {cause}") from cause


class _Writer:
    def __init__(self, owner: str) -> None:
        self._owner = owner
        self.arrays: dict[str, np.ndarray] = {}

    def encode(self, value: Any, where: str) -> Any:
        """One value; where: the way to it, as Python would write it."""
        if value is None or isinstance(value, bool):
            return value
        if type(value) is int and value.bit_length() <= MAX_INT_BITS:
            return value
        if isinstance(value, str):
            return str.__str__(value)  # str() of a member of an enumeration is not its text
        if type(value) is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
            return self._numbers(value, where)
        if isinstance(value, Mapping):
            return self._mapping(value, where)
        if isinstance(value, (list, tuple, set, frozenset)):
            items = [self.encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
            if isinstance(value, list):
                return items
            # Members of sets, and keys, are found again only as what can be hashed.
            kinds = ((tuple, "$tuple"), (frozenset, "$frozenset"), (set, "$set"))
            return {next(tag for kind, tag in kinds if isinstance(value, kind)): items}
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if type(value) is int:
            kind = f"number of {value.bit_length():,} bits"
        raise CheckpointError(
            f"{self._owner}{where} is a {kind}, which a checkpoint does not hold; use {_VALID}"
        )

    def _mapping(self, value: Mapping[Any, Any], where: str) -> Any:
        if isinstance(value, Counter):
            return {"$counter": self._pairs(value, where)}
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: self.encode(item, f"{where}[{key!r}]") for key, item in value.items()}
        return {"$dict": self._pairs(value, where)}

    def _pairs(self, value: Mapping[Any, Any], where: str) -> list[Any]:
        return [
            [self.encode(key, f"{where} key {key!r}"), self.encode(item, f"{where}[{key!r}]")]
            for key, item in value.items()
        ]

    def _numbers(self, value: Any, where: str) -> Any:
        fact: dict[str, Any] = {}
        name = where or "value"
        if isinstance(value, torch.Tensor):
            fact = {"$tensor": name, "dtype": str(value.dtype).removeprefix("torch.")}
            is_strided = value.layout is torch.strided and not value.is_meta
            if value.is_complex() or value.is_quantized or not is_strided:
                kind = f"{value.dtype} tensor, {value.layout}, on {value.device}"
                raise self._not_numbers(where, kind)
            plain = value.detach().cpu()
            try:
                array = (plain.float() if plain.dtype in _HALVES else plain).numpy()
            except TypeError as cause:  # numpy has no such element, as 8-bit floats
                raise self._not_numbers(where, f"{value.dtype} tensor") from cause
        else:
            fact = {"$scalar" if isinstance(value, np.generic) else "$array": name}
            if isinstance(value, np.ma.MaskedArray):
                raise self._not_numbers(where, "numpy masked array")
            array = np.asarray(value)
        if array.dtype.kind not in "biuf":
            raise self._not_numbers(where, f"numpy {array.dtype}")
        self.arrays[name] = array.copy()
        return fact

    def _not_numbers(self, where: str, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._owner}{where} is a {what}, which a checkpoint does not hold; use {_VALID}"
        )


def _decode(fact: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if isinstance(fact, list):
        return [_decode(item, arrays) for item in fact]
    if not isinstance(fact, dict):
        return fact
    tag = next(iter(fact), "")
    if not tag.startswith("$"):
        return {key: _decode(item, arrays) for key, item in fact.items()}
    return _decode_tagged(tag, fact, arrays)


def _decode_tagged(tag: str, fact: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> Any:
    content = fact[tag]
    if tag == "$float":
        return float(content)
    if tag == "$tuple":
        return tuple(_decode(item, arrays) for item in content)
    if tag == "$set":
        return {_decode(item, arrays) for item in content}
    if tag == "$frozenset":
        return frozenset(_decode(item, arrays) for item in content)
    if tag in ("$dict", "$counter"):
        pairs = {_decode(key, arrays): _decode(item, arrays) for key, item in content}
        return Counter(pairs) if tag == "$counter" else pairs
    array = arrays[content].copy()
    if tag == "$array":
        return array
    if tag == "$scalar":
        return array[()]
    if tag == "$tensor":
        return torch.from_numpy(array).to(getattr(torch, fact["dtype"]))
    raise ValueError(f"unknown kind {tag!r}")
