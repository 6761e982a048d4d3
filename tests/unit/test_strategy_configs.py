"""The configs dicts of a strategy: laid over their defaults, checked, apart."""

from __future__ import annotations

import ast

import pytest

from mpifleet.errors import ConfigError, NotAvailable
from mpifleet.strategy import DistributedStrategy
from mpifleet.strategy_fields import Configs, FieldGroup, Nested, Status
from mpifleet.strategy_kinds import floats, integer
from tests.oracles.fleet_defaults import GROUPS


def loose_group():
    """A group with one inner dict of working keys."""

    class LooseConfigs(Configs):
        title = "strategy.loose"
        steps = integer(1, Status.WORKS, "Steps.")
        shares = floats((0.5,), Status.WORKS, "Shares.")

    class Holder(FieldGroup):
        loose = Nested(LooseConfigs, "Loose.")

    return Holder()


def test_a_dict_is_laid_over_the_defaults():
    holder = loose_group()
    holder.loose = {"steps": 4}
    assert holder.loose == {"steps": 4, "shares": [0.5]}
    holder.loose = {"shares": [0.1, 0.2]}
    assert holder.loose == {"steps": 1, "shares": [0.1, 0.2]}


def test_a_list_is_replaced_never_extended_and_not_shared():
    holder = loose_group()
    shares = [0.1, 0.2]
    holder.loose = {"shares": shares}
    shares.append(0.3)
    holder.loose = {"shares": holder.loose["shares"]}
    assert holder.loose["shares"] == (0.1, 0.2)
    assert loose_group().loose["shares"] == (0.5,)


def test_a_refused_dict_changes_nothing():
    holder = loose_group()
    holder.loose = {"steps": 4}
    with pytest.raises(ConfigError, match=r"strategy.loose\['shares'\] = \['x'\] is not valid"):
        holder.loose = {"steps": 5, "shares": ["x"]}
    assert holder.loose["steps"] == 4


def test_a_key_is_checked_when_set_in_place():
    strategy = DistributedStrategy()
    strategy.a_sync_configs["k_steps"] = 0
    assert strategy.a_sync_configs["k_steps"] == 0
    with pytest.raises(NotAvailable):
        strategy.a_sync_configs["k_steps"] = 4
    with pytest.raises(ConfigError, match="has no key 'ksteps'; valid keys: k_steps"):
        strategy.a_sync_configs["ksteps"] = 0


def test_configs_read_like_a_dict():
    configs = DistributedStrategy().a_sync_configs
    expected = {**GROUPS["a_sync_configs"], "staleness": -1}
    assert dict(configs) == expected
    assert list(configs) == list(expected)
    assert len(configs) == 13
    assert configs == expected
    assert configs != {"k_steps": -1}
    assert "k_steps" in configs
    assert configs.get("nothing", 3) == 3
    assert ast.literal_eval(repr(configs)) == expected
    with pytest.raises(KeyError):
        configs["nothing"]


def test_configs_of_two_strategies_are_apart():
    first, second = DistributedStrategy(), DistributedStrategy()
    second.a_sync_configs = first.a_sync_configs
    first.a_sync_configs["k_steps"] = 0
    assert second.a_sync_configs["k_steps"] == -1
    assert DistributedStrategy().a_sync_configs["k_steps"] == -1


@pytest.mark.parametrize("value", [3, None, [("k_steps", 0)], "k_steps"])
def test_configs_are_a_dict(value):
    with pytest.raises(ConfigError, match=r"a_sync_configs = .*valid: a dict with some of k_steps"):
        DistributedStrategy().a_sync_configs = value
