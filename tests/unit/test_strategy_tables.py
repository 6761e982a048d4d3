"""The fields of the strategy against Fleet's published tables, one by one, and their page."""

from __future__ import annotations

import ast
import warnings
from pathlib import Path

import pytest

from mpifleet.errors import ConfigError, NotAvailable
from mpifleet.strategy import DistributedStrategy, ExecutionStrategy
from mpifleet.strategy_fields import Field, FieldGroup, Nested, Status
from mpifleet.strategy_table import FieldRow, field_rows, markdown_table
from tests.oracles.fleet_defaults import GROUPS as FLEETS_GROUPS
from tests.oracles.fleet_defaults import SWITCHED_OFF, TOP_LEVEL

PAGE = Path(__file__).parents[2] / "docs" / "strategy.md"

OWN = {
    "nonfinite": "raise",
    "table_home": "auto",
    "stall_report_s": 60.0,
    "stall_end_s": 600.0,
    "pull_ahead": 0,
    "dense_sync": False,
    "mailbox_mib": 192,
    "preemptible": False,
}
A_SYNC_CONFIGS = {**FLEETS_GROUPS["a_sync_configs"], "staleness": -1}
GROUPS = {**FLEETS_GROUPS, "a_sync_configs": A_SYNC_CONFIGS}
WRONG_TYPE = {
    "bool": 1,
    "int": 1.5,
    "float": "1.0",
    "str": 7,
    "list of str": "abc",
    "list of int": 3,
    "list of float": 0.5,
}
OTHER_CHOICE = {
    "schedule_mode": "F-then-B",
    "sharding_segment_strategy": "segment_anchors",
    "scale_strategy": "sum",
}
OTHER_VALUE = {
    "int": lambda default: default + 1,
    "bool": lambda default: not default,
    "float": lambda default: default + 1.0,
    "str": lambda default: default + "x",
    "list of str": lambda _: ["x"],
    "list of int": lambda _: [3],
    "list of float": lambda _: [0.75],
}


def every_field() -> list[tuple[str, type[FieldGroup], Field]]:
    """(name of the inner group or "", class that declares the field, field) of all fields."""
    found = []
    for name, field in DistributedStrategy.fields.items():
        if isinstance(field, Nested):
            found += [
                (name, field.group_class, inner) for inner in field.group_class.fields.values()
            ]
        else:
            found.append(("", DistributedStrategy, field))
    return found


def group_of(strategy: DistributedStrategy, group: str) -> FieldGroup:
    return getattr(strategy, group) if group else strategy


EVERY_FIELD = pytest.mark.parametrize(
    ("group", "owner", "field"),
    every_field(),
    ids=[f"{group}.{field.name}".lstrip(".") for group, _, field in every_field()],
)


# -- defaults ------------------------------------------------------------------------------------


def test_defaults_are_those_of_the_tables():
    expected = {**TOP_LEVEL, **dict.fromkeys(SWITCHED_OFF, False), **OWN, **GROUPS}
    found = DistributedStrategy().to_dict()
    assert set(found) == set(expected)
    assert {name: found[name] for name in expected} == expected


def test_default_types_match_their_kinds():
    python_type = {"bool": bool, "int": int, "float": float, "str": str}
    for _, _, field in every_field():
        assert type(field.default) is python_type.get(field.kind.type_name, tuple), field.name
        assert field.kind.parse(field.default) == field.default


def test_other_defaults_stand_in_the_field_docstrings():
    assert "Another default in Fleet: 50" in DistributedStrategy.fuse_grad_size_in_TFLOPS.__doc__
    assert "Another default in Fleet: 512" in DistributedStrategy.conv_workspace_size_limit.__doc__
    assert "Another default in Fleet: 1" in ExecutionStrategy.num_iteration_per_run.__doc__


def test_only_parameter_server_fields_work():
    working = {
        f"{group}.{field.name}".lstrip(".")
        for group, _, field in every_field()
        if field.status is Status.WORKS
    }
    assert working == {"a_sync", "a_sync_configs.k_steps", "a_sync_configs.staleness", *OWN}


# -- every field is checked ----------------------------------------------------------------------


@EVERY_FIELD
def test_the_default_can_always_be_set(group, owner, field):
    strategy = DistributedStrategy()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        setattr(group_of(strategy, group), field.name, field.default)
    assert strategy == DistributedStrategy()


@EVERY_FIELD
def test_a_wrong_type_names_field_and_valid_values(group, owner, field):
    strategy = DistributedStrategy()
    with pytest.raises(ConfigError) as caught:
        setattr(group_of(strategy, group), field.name, WRONG_TYPE[field.kind.type_name])
    assert not isinstance(caught.value, NotAvailable)
    message = str(caught.value)
    assert field.name in message
    assert field.kind.valid in message
    assert field.name == "passwd" or repr(WRONG_TYPE[field.kind.type_name]) in message
    assert strategy == DistributedStrategy()


@EVERY_FIELD
def test_what_is_missing_is_refused_and_what_does_nothing_says_so(group, owner, field):
    if field.status is Status.WORKS:
        return  # fields that work have tests of their own
    strategy = DistributedStrategy()
    other = OTHER_CHOICE.get(field.name) or OTHER_VALUE[field.kind.type_name](field.default)
    if field.status is Status.NO_EFFECT:
        with pytest.warns(UserWarning, match=f"{field.name}.* has no effect: "):
            setattr(group_of(strategy, group), field.name, other)
        assert getattr(group_of(strategy, group), field.name) == other
        return
    with pytest.raises(NotAvailable, match="is not available in this version") as caught:
        setattr(group_of(strategy, group), field.name, other)
    assert field.name in str(caught.value)
    assert repr(field.default) in str(caught.value)
    assert strategy == DistributedStrategy()


@pytest.mark.parametrize("name", [n for n in GROUPS if n.endswith(("configs", "param"))])
@pytest.mark.parametrize("key", ["k_stepz", 3])
def test_an_unknown_key_lists_the_valid_ones(name, key):
    strategy = DistributedStrategy()
    with pytest.raises(ConfigError) as caught:
        setattr(strategy, name, {key: 1})
    message = str(caught.value)
    assert f"strategy.{name} has no key {key!r}; valid keys: " in message
    assert message.endswith(", ".join(GROUPS[name]))


# -- the page ------------------------------------------------------------------------------------


def test_rows_name_every_field_of_the_tables():
    rows = {row.name: row for row in field_rows()}
    expected = {**TOP_LEVEL, **dict.fromkeys(SWITCHED_OFF, False), **OWN}
    for group, values in GROUPS.items():
        assert group in rows
        expected |= {f"{group}.{key}": value for key, value in values.items()}
    assert set(rows) == set(expected) | set(GROUPS)
    for name, value in expected.items():
        shown = rows[name].default.strip("`")
        assert ast.literal_eval(shown) == value, name


def test_the_page_lists_every_field():
    page = PAGE.read_text(encoding="utf-8")
    listed = "".join(line for line in page.splitlines(keepends=True) if line.startswith("|"))
    assert listed == markdown_table(field_rows()), (
        "docs/strategy.md: replace its table by the output of python -m mpifleet.strategy_table"
    )


def test_markdown_escapes_bars():
    row = FieldRow("a", "str", "`'|'`", "works", "a | b")
    assert markdown_table([row]).splitlines()[2] == r"| `a` | str | `'\|'` | works | a \| b |"
