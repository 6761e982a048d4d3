"""Fields of a strategy: typed, checked when set, documented where they are declared."""

from __future__ import annotations

import copy
import difflib
import enum
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar, overload

from mpifleet.errors import ConfigError, NotAvailable

T = TypeVar("T")
G = TypeVar("G", bound="FieldGroup")
F = TypeVar("F", bound="Field[Any]")


class Status(enum.Enum):
    """What setting a field to something else than its default does."""

    WORKS = "works"
    NOT_AVAILABLE = "not available in this version"
    NO_EFFECT = "no effect"


@dataclass(frozen=True)
class Kind(Generic[T]):
    """A type of value: its name, the valid values in words, and the check.

    parse returns the value in the one form that is kept; it raises TypeError or ValueError.
    shown is how a message writes a value (a password stays hidden); works_for tells which valid
    values a field that works supports in this version (None: all of them).
    """

    type_name: str
    valid: str
    parse: Callable[[Any], T]
    shown: Callable[[Any], str] = repr
    works_for: Callable[[T], bool] | None = None


class Field(Generic[T]):
    """One value of a group: a data descriptor that checks what is set.

    kind: its type; default: its value until set; status: what setting another value does;
    meaning: one sentence; other_default: the default of another release of Fleet, in words;
    because: the reason given when a value is refused or ignored.
    """

    def __init__(
        self,
        kind: Kind[T],
        default: T,
        status: Status,
        meaning: str,
        other_default: str = "",
        because: str = "",
    ) -> None:
        self.kind = kind
        self.default = default
        self.status = status
        self.meaning = meaning
        self.other_default = other_default
        self.because = because
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        also = f" Another default in Fleet: {self.other_default}." if self.other_default else ""
        self.__doc__ = (
            f"{self.meaning} ({self.kind.type_name}, default {self.default!r}, "
            f"{self.status.value}.{also})"
        )

    @overload
    def __get__(self: F, group: None, owner: type) -> F: ...
    @overload
    def __get__(self, group: FieldGroup, owner: type) -> T: ...
    def __get__(self, group: FieldGroup | None, owner: type) -> Any:
        return self if group is None else group._values[self.name]

    def __set__(self, group: FieldGroup, value: T) -> None:
        group._keep({self.name: self.checked(group, value)})

    def fresh(self) -> T:
        """The default, as a value that one group may own."""
        return self.default

    def checked(self, group: FieldGroup, value: Any) -> T:
        """The value in the form that is kept; raises ConfigError or NotAvailable."""
        shown = f"{group._place(self.name)} = {self.kind.shown(value)}"
        try:
            parsed = self.kind.parse(value)
        except TypeError:
            found = type(value).__name__
            raise ConfigError(f"{shown} is of type {found}; valid: {self.kind.valid}") from None
        except (ValueError, OverflowError):
            raise ConfigError(f"{shown} is not valid; valid: {self.kind.valid}") from None
        if parsed != self.default:
            self._support(shown, parsed)
        return parsed

    def _support(self, shown: str, parsed: T) -> None:
        """Refuse what this version lacks; warn of what does nothing."""
        reason = f": {self.because}" if self.because else ""
        if self.status is Status.NOT_AVAILABLE:
            raise NotAvailable(
                f"{shown} is not available in this version; "
                f"valid: {self.default!r}, the default{reason}"
            )
        if self.kind.works_for is not None and not self.kind.works_for(parsed):
            raise NotAvailable(f"{shown} is not available in this version{reason}")
        if self.status is Status.NO_EFFECT:
            warnings.warn(f"{shown} has no effect{reason}", stacklevel=5)


class Nested(Generic[G]):
    """A group inside a group: read as an object, set from an object or from a mapping.

    A mapping is laid over the defaults, so what an earlier assignment set is gone.
    """

    def __init__(self, group_class: type[G], meaning: str) -> None:
        self.group_class = group_class
        self.meaning = meaning
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        self.__doc__ = self.meaning

    @overload
    def __get__(self, group: None, owner: type) -> Nested[G]: ...
    @overload
    def __get__(self, group: FieldGroup, owner: type) -> G: ...
    def __get__(self, group: FieldGroup | None, owner: type) -> Any:
        return self if group is None else group._values[self.name]

    def __set__(self, group: FieldGroup, value: G | Mapping[str, Any]) -> None:
        group._keep({self.name: self.checked(group, value)})

    def fresh(self) -> G:
        """The default, as a value that one group may own."""
        return self.group_class()

    def checked(self, group: FieldGroup, value: Any) -> G:
        """A group of its own with the given values; raises ConfigError or NotAvailable."""
        if isinstance(value, self.group_class):
            return copy.deepcopy(value)
        if not isinstance(value, Mapping):
            noun = "a dict" if issubclass(self.group_class, Configs) else self.group_class.__name__
            raise ConfigError(
                f"{group._place(self.name)} = {value!r} is of type {type(value).__name__}; "
                f"valid: {noun} with some of {', '.join(self.group_class.fields)}"
            )
        filled = self.group_class()
        filled.replace(value)
        return filled


class FieldGroup:
    """Base of everything that is made of fields: declares them, keeps their values, compares."""

    fields: ClassVar[dict[str, Field[Any] | Nested[Any]]] = {}
    title: ClassVar[str] = "strategy"

    _values: dict[str, Any]

    def __init_subclass__(cls) -> None:
        declared = {k: v for k, v in vars(cls).items() if isinstance(v, (Field, Nested))}
        cls.fields = {**cls.fields, **declared}

    def __init__(self) -> None:
        self.__dict__["_values"] = {name: field.fresh() for name, field in self.fields.items()}

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.fields:
            raise self._unknown(name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        raise self._undeletable(name)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._values == other._values

    __hash__ = None  # type: ignore[assignment]  # values change, so a hash would too

    def __copy__(self: G) -> G:
        return copy.deepcopy(self)  # a shallow copy would share the values

    def __repr__(self) -> str:
        changed = ", ".join(f"{name}={value!r}" for name, value in self.differences().items())
        return f"{type(self).__name__}({changed})"

    def replace(self, values: Mapping[str, Any]) -> None:
        """Set every field: to the given value, or else to its default.

        Raises ConfigError (unknown name, wrong value) or NotAvailable; then nothing has changed.
        """
        checked = {name: field.fresh() for name, field in self.fields.items()}
        for name, value in values.items():
            if name not in self.fields:
                raise self._unknown(name)
            checked[name] = self.fields[name].checked(self, value)
        self._keep(checked)

    def to_dict(self) -> dict[str, Any]:
        """All values in the order of declaration, as dicts, lists and plain numbers and text."""
        return {name: _plain(value) for name, value in self._values.items()}

    def differences(self) -> dict[str, Any]:
        """The values that differ from their defaults, as in to_dict."""
        changed: dict[str, Any] = {}
        for name, value in self._values.items():
            if isinstance(value, FieldGroup):
                if inner := value.differences():
                    changed[name] = inner
            elif value != self.fields[name].fresh():
                changed[name] = _plain(value)
        return changed

    def _keep(self, values: Mapping[str, Any]) -> None:
        """Take checked values, all or none."""
        self._check_together({**self._values, **values})
        self._values.update(values)

    def _check_together(self, values: Mapping[str, Any]) -> None:
        """Raise ConfigError where values that are each valid do not fit together."""

    def _place(self, name: str) -> str:
        return f"{self.title}.{name}"

    def _undeletable(self, name: str) -> ConfigError:
        if name not in self.fields:
            return self._unknown(name)
        field = self.fields[name]
        default = "{}" if isinstance(field, Nested) else repr(field.default)
        return ConfigError(
            f"{self._place(name)} cannot be deleted, a field always has a value; "
            f"valid: set it to its default, {default}"
        )

    def _unknown(self, name: object) -> ConfigError:
        near = difflib.get_close_matches(str(name), self.fields, n=3)
        return ConfigError(
            f"{self.title} has no field {name!r}; "
            + (f"did you mean {' or '.join(near)}?" if near else f"valid: {', '.join(self.fields)}")
        )


class Configs(FieldGroup, Mapping[str, Any]):
    """A group that is read and set like a dict with fixed keys."""

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self.fields:
            raise self._unknown(key)
        setattr(self, key, value)

    def __delitem__(self, key: str) -> None:
        raise self._undeletable(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, FieldGroup):
            return super().__eq__(other)
        return isinstance(other, Mapping) and self.to_dict() == dict(other)

    __hash__ = None  # type: ignore[assignment]  # as in FieldGroup

    def __repr__(self) -> str:
        return repr(self.to_dict())

    def _place(self, name: str) -> str:
        return f"{self.title}[{name!r}]"

    def _unknown(self, name: object) -> ConfigError:
        return ConfigError(
            f"{self.title} has no key {name!r}; valid keys: {', '.join(self.fields)}"
        )


def _plain(value: Any) -> Any:
    if isinstance(value, FieldGroup):
        return value.to_dict()
    return list(value) if isinstance(value, tuple) else value
