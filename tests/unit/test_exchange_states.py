"""No exchange can forget to save what it remembers from one step to the next."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "mpifleet"
NOT_SAVED = {
    "LocalExchange": {"_step": "numbers the steps in messages; each process counts anew"},
    "RemoteExchange": {
        "_step": "counts the updates of servers that began when this job did",
        "_is_paused": "between two meetings of the workers only",
        "_saves_behind": "of a save that is over when the job is",
        "is_finished": "at the end of the job",
    },
}
"""Attributes that change after __init__, each with the reason why it is not saved.

Everything else that changes belongs into `states()` of its exchange, by its attribute's name.
"""
FACE = {"step", "pull_dense", "begin_rows"}


def classes():
    """All classes of the package, by name."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py")))
    nodes = (node for tree in trees for node in ast.walk(tree))
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


def methods(node):
    return {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}


def bases(node):
    return {base.id for base in node.bases if isinstance(base, ast.Name)}


def exchanges():
    """Classes with the methods of an Exchange, and those made from them; not the protocol."""
    known, found = classes(), set()
    while True:
        more = {
            name
            for name, node in known.items()
            if (methods(node).keys() >= FACE or bases(node) & found) and name not in found
            if "Protocol" not in bases(node)
        }
        if not more:
            return {name: known[name] for name in sorted(found)}
        found |= more


def test_the_exchanges_are_found():
    assert {"LocalExchange", "RemoteExchange", "ThreadExchange"} <= exchanges().keys()


@pytest.mark.parametrize("name", exchanges())
def test_every_exchange_declares_its_states_itself(name):
    """Not by inheritance: what is added to a class is what is forgotten."""
    assert "states" in methods(exchanges()[name]), f"{name} must say what it remembers: states()"


def changed(node):
    """Attributes of self that are assigned outside __init__, those of sub-objects left out."""
    for name, method in methods(node).items():
        if name == "__init__":
            continue
        for each in ast.walk(method):
            targets = getattr(each, "targets", None) or [getattr(each, "target", None)]
            for target in targets:
                while isinstance(target, ast.Subscript):
                    target = target.value
                if isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == "self":
                    yield target.attr


@pytest.mark.parametrize("name", exchanges())
def test_what_changes_is_saved_or_has_a_reason(name):
    node = exchanges()[name]
    said = ast.unparse(methods(node)["states"])
    for attribute in changed(node):
        is_saved = f"self.{attribute}" in said
        assert is_saved or attribute in NOT_SAVED.get(name, {}), (
            f"{name}.{attribute} changes in training: give it to states(), or to NOT_SAVED above "
            "with the reason why a resumed job does not need it"
        )


def test_no_reason_has_outlived_its_attribute():
    for name, reasons in NOT_SAVED.items():
        assert reasons.keys() <= set(changed(exchanges()[name])), name


def test_a_forgetful_exchange_is_found():
    text = "class E:\n def __init__(self): self.a = 0\n def step(self): self.a += 1; self.b[0] = 2"
    assert sorted(changed(ast.parse(text).body[0])) == ["a", "b"]
