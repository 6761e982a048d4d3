"""Saving and loading a strategy."""

from __future__ import annotations

import re

import pytest

from mpifleet.errors import ConfigError, NotAvailable
from mpifleet.strategy import DistributedStrategy


def changed_strategy() -> DistributedStrategy:
    strategy = DistributedStrategy()
    strategy.a_sync = False
    strategy.a_sync_configs = {"k_steps": 0}
    strategy.stall_report_s = 2.5
    strategy.stall_end_s = 30.0
    strategy.nonfinite = "skip"
    return strategy


def test_save_writes_only_what_differs(tmp_path):
    changed_strategy().save(tmp_path / "s.yaml")
    lines = (tmp_path / "s.yaml").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        "a_sync: false",
        "a_sync_configs:",
        "  k_steps: 0",
        "nonfinite: skip",
        "stall_report_s: 2.5",
        "stall_end_s: 30.0",
    ]
    assert lines[0].startswith("# mpifleet strategy")
    assert lines[1] == "# mode: sync"
    assert [entry.name for entry in tmp_path.iterdir()] == ["s.yaml"]


@pytest.mark.parametrize("make", [DistributedStrategy, changed_strategy])
def test_load_gives_back_what_was_saved(tmp_path, make):
    path = str(tmp_path / "s.yaml")
    make().save(path)
    loaded = changed_strategy()
    loaded.mailbox_mib = 5  # what the file does not name goes back to its default
    assert loaded.load(path) is loaded
    assert loaded == make()


def test_load_does_not_depend_on_the_order_of_lines(tmp_path):
    (tmp_path / "s.yaml").write_text("stall_report_s: 1000\nstall_end_s: 2000\n")
    assert DistributedStrategy().load(tmp_path / "s.yaml").stall_report_s == 1000.0


def test_an_empty_file_means_the_defaults(tmp_path):
    (tmp_path / "s.yaml").write_text("# nothing\n")
    assert changed_strategy().load(tmp_path / "s.yaml") == DistributedStrategy()


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("a_synk: true\n", ConfigError, "no field 'a_synk'; did you mean a_sync"),
        ("a_sync_configs: {k: 1}\n", ConfigError, "a_sync_configs has no key 'k'; valid keys"),
        ("a_sync_configs: 3\n", ConfigError, "valid: a dict"),
        ("a_sync: 'no'\n", ConfigError, "a_sync = 'no' is of type str; valid: True or False"),
        ("mailbox_mib: 999\n", ConfigError, "valid: a whole number in 1..240"),
        ("stall_end_s: 5\n", ConfigError, "stall_report_s = 60 with"),
        ("dgc: true\n", NotAvailable, "not available in this version"),
        ("a_sync_configs: {k_steps: 5}\n", NotAvailable, "GEO"),
        ("1: true\n", ConfigError, "no field 1"),
        ("mode: sync\n", ConfigError, "follows from strategy.a_sync"),
        ("- a_sync\n", ConfigError, "holds a list; valid: lines of"),
        ("a_sync: [\n", ConfigError, "not a readable YAML file"),
        ("a: !!python/object/apply:os.getcwd []\n", ConfigError, "not a readable YAML file"),
        ("a_sync: \xff\n", ConfigError, "not a readable YAML file"),
    ],
)
def test_a_wrong_file_is_named_and_changes_nothing(tmp_path, text, error, message):
    path = tmp_path / "broken.yaml"
    path.write_bytes(text.encode("latin-1"))
    strategy = changed_strategy()
    with pytest.raises(ConfigError) as caught:
        strategy.load(path)
    assert type(caught.value) is error
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert strategy == changed_strategy()


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.yaml: .*No such file"):
        DistributedStrategy().load(tmp_path / "absent.yaml")


def test_prototxt_points_at_yaml():
    with pytest.raises(ConfigError, match=r"s\.prototxt: .*strategy\.save\(path\)"):
        DistributedStrategy().save_to_prototxt("s.prototxt")
    with pytest.raises(ConfigError, match=r"s\.prototxt: .*strategy\.load\(path\)"):
        DistributedStrategy().load_from_prototxt("s.prototxt")


def test_a_path_that_cannot_be_written_is_named(tmp_path):
    for path, why in ((tmp_path, "Is a directory"), (tmp_path / "no" / "s.yaml", "No such file")):
        with pytest.raises(ConfigError, match=rf"^{re.escape(str(path))}: .*{why}.*valid: a file"):
            changed_strategy().save(path)
    assert not list(tmp_path.iterdir())
    assert not list(tmp_path.parent.glob("*.partial"))
