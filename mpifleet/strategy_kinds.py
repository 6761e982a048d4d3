"""The types of value that a strategy's fields have, each with its check."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from mpifleet.strategy_fields import Field, Kind, Status

T = TypeVar("T")


def flag(default: bool, status: Status, meaning: str, **about: str) -> Field[bool]:
    """A field that is True or False; about: other_default, because."""
    return Field(Kind("bool", "True or False", _bool), default, status, meaning, **about)


def integer(
    default: int,
    status: Status,
    meaning: str,
    *,
    low: int | None = None,
    high: int | None = None,
    works_for: Callable[[int], bool] | None = None,
    **about: str,
) -> Field[int]:
    """A field that is a whole number in low..high, both included; about: as for flag."""
    bounds = _bounds("a whole number", low, high)

    def parse(value: Any) -> int:
        return _within(_int(value), low, high)

    kind = Kind("int", bounds, parse, works_for=works_for)
    return Field(kind, default, status, meaning, **about)


def number(
    default: float,
    status: Status,
    meaning: str,
    *,
    above: float | None = None,
    **about: str,
) -> Field[float]:
    """A field that is a finite number, greater than above; about: as for flag."""
    valid = "a finite number" if above is None else f"a finite number > {above:g}"

    def parse(value: Any) -> float:
        parsed = _float(value)
        if above is not None and parsed <= above:
            raise ValueError
        return parsed

    return Field(Kind("float", valid, parse), default, status, meaning, **about)


def text(default: str, status: Status, meaning: str, **about: str) -> Field[str]:
    """A field that is any text; about: as for flag."""
    return Field(Kind("str", "text", _str), default, status, meaning, **about)


def password(status: Status, meaning: str, **about: str) -> Field[str]:
    """A field that is a text which no message shows, empty by default; about: as for flag."""
    return Field(Kind("str", "text", _str, lambda _: "(hidden)"), "", status, meaning, **about)


def choice(
    default: str, status: Status, meaning: str, *, of: Sequence[str], **about: str
) -> Field[str]:
    """A field that is one of the given words; about: as for flag."""
    valid = " or ".join(repr(word) for word in of)

    def parse(value: Any) -> str:
        if _str(value) not in of:
            raise ValueError
        return str(value)

    return Field(Kind("str", valid, parse), default, status, meaning, **about)


def texts(status: Status, meaning: str, **about: str) -> Field[tuple[str, ...]]:
    """A field that is a list of texts, empty by default; read as a tuple; about: as for flag."""
    return Field(_list_of("str", "texts", _str), (), status, meaning, **about)


def integers(status: Status, meaning: str, **about: str) -> Field[tuple[int, ...]]:
    """A field that is a list of whole numbers, empty by default; read as a tuple."""
    return Field(_list_of("int", "whole numbers", _int), (), status, meaning, **about)


def floats(
    default: tuple[float, ...], status: Status, meaning: str, **about: str
) -> Field[tuple[float, ...]]:
    """A field that is a list of finite numbers; read as a tuple; about: as for flag."""
    return Field(_list_of("float", "finite numbers", _float), default, status, meaning, **about)


def _list_of(type_name: str, valid: str, parse_one: Callable[[Any], T]) -> Kind[tuple[T, ...]]:
    def parse(value: Any) -> tuple[T, ...]:
        if not isinstance(value, (list, tuple)):
            raise TypeError
        try:
            return tuple(parse_one(item) for item in value)
        except TypeError:  # the list is one, only an item is not: the list is out of range
            raise ValueError from None

    return Kind(f"list of {type_name}", f"a list of {valid}", parse)


def _bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _int(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)  # also numpy's integers, never a float


def _float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError
    parsed = float(value)
    if not math.isfinite(parsed):
        raise ValueError
    return parsed


def _str(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _within(value: int, low: int | None, high: int | None) -> int:
    if (low is not None and value < low) or (high is not None and value > high):
        raise ValueError
    return value


def _bounds(noun: str, low: int | None, high: int | None) -> str:
    if low is None and high is None:
        return noun
    if low is None:
        return f"{noun} <= {high}"
    return f"{noun} >= {low}" if high is None else f"{noun} in {low}..{high}"
