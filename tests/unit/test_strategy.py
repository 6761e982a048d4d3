"""Setting, comparing and copying a strategy."""

from __future__ import annotations

import ast
import copy
import json
import subprocess
import sys
import warnings

import numpy as np
import pytest

from mpifleet.compose import job_settings
from mpifleet.errors import ConfigError, NotAvailable
from mpifleet.strategy import BuildStrategy, DistributedStrategy, ExecutionStrategy

# -- values --------------------------------------------------------------------------------------


def test_numbers_of_numpy_are_kept_as_plain_numbers():
    strategy = DistributedStrategy()
    strategy.mailbox_mib = np.int64(64)
    strategy.stall_end_s = np.float32(100.5)
    assert type(strategy.mailbox_mib) is int
    assert type(strategy.stall_end_s) is float
    strategy.stall_report_s = 7
    assert type(strategy.stall_report_s) is float
    json.dumps(strategy.to_dict())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mailbox_mib", 0),
        ("mailbox_mib", 241),
        ("mailbox_mib", True),
        ("stall_report_s", 0),
        ("stall_report_s", -1.0),
        ("stall_report_s", True),
        ("stall_end_s", float("inf")),
        ("stall_end_s", float("nan")),
        ("stall_end_s", 10**400),
        ("nonfinite", "ignore"),
        ("table_home", "Node"),
        ("nccl_comm_num", 0),
        ("a_sync", None),
        ("a_sync", "False"),
    ],
)
def test_values_out_of_range(name, value):
    strategy = DistributedStrategy()
    with pytest.raises(ConfigError, match=f"strategy.{name} = .*valid: ") as caught:
        setattr(strategy, name, value)
    assert not isinstance(caught.value, NotAvailable)
    assert strategy == DistributedStrategy()


@pytest.mark.parametrize("value", ["raise", "skip"])
def test_nonfinite_values(value):
    strategy = DistributedStrategy()
    strategy.nonfinite = value
    assert strategy.nonfinite == value


@pytest.mark.parametrize("value", ["auto", "node", "world"])
def test_table_home_values(value):
    strategy = DistributedStrategy()
    strategy.table_home = value
    assert strategy.table_home == value


@pytest.mark.parametrize("value", [1, 240])
def test_mailbox_bounds_are_valid(value):
    strategy = DistributedStrategy()
    strategy.mailbox_mib = value
    assert strategy.mailbox_mib == value


def test_a_stall_is_reported_before_it_ends_the_job():
    strategy = DistributedStrategy()
    with pytest.raises(ConfigError, match=r"stall_report_s = 600 with .*stall_end_s = 600"):
        strategy.stall_report_s = 600
    with pytest.raises(ConfigError, match=r"stall_report_s = 60 with .*stall_end_s = 60"):
        strategy.stall_end_s = 60
    assert strategy == DistributedStrategy()
    strategy.stall_end_s = 2000
    strategy.stall_report_s = 1000
    assert (strategy.stall_report_s, strategy.stall_end_s) == (1000.0, 2000.0)


# -- the exchange --------------------------------------------------------------------------------


@pytest.mark.parametrize("k_steps", [-1, 0])
@pytest.mark.parametrize(
    ("a_sync", "dense_sync", "mode"),
    [
        (True, False, "async"),
        (True, True, "hybrid"),
        (False, False, "sync"),
        (False, True, "sync"),
    ],
)
def test_mode(a_sync, dense_sync, k_steps, mode):
    strategy = DistributedStrategy()
    strategy.a_sync = a_sync
    strategy.dense_sync = dense_sync
    strategy.a_sync_configs = {"k_steps": k_steps}
    assert strategy.mode == mode


def test_a_bound_on_staleness_is_for_async():
    strategy = DistributedStrategy()
    strategy.a_sync_configs = {"staleness": 0}
    expected = r"a_sync_configs\['staleness'\] = 0 with strategy.a_sync = False.*valid: -1, or"
    with pytest.raises(ConfigError, match=expected):
        strategy.a_sync = False
    assert strategy.a_sync
    strategy.a_sync_configs = {}
    strategy.a_sync = False
    with pytest.raises(ConfigError, match=expected):
        strategy.a_sync_configs = {"staleness": 0}
    with pytest.raises(ConfigError, match=r"'staleness'\] = -2 is not valid"):
        strategy.a_sync_configs = {"staleness": -2}


def test_what_a_group_does_not_know_is_refused_at_the_start():
    strategy = DistributedStrategy()
    strategy.a_sync = False
    strategy.a_sync_configs.staleness = 3
    with pytest.raises(ConfigError, match="in sync mode no worker is ever ahead"):
        job_settings(strategy)


def test_mode_of_the_defaults_is_async_and_cannot_be_set():
    strategy = DistributedStrategy()
    assert strategy.mode == "async"
    with pytest.raises(ConfigError, match=r"strategy.mode follows from strategy.a_sync"):
        strategy.mode = "sync"


@pytest.mark.parametrize("k_steps", [1, 100])
@pytest.mark.parametrize("a_sync", [True, False])
def test_geo_is_not_available(a_sync, k_steps):
    strategy = DistributedStrategy()
    strategy.a_sync = a_sync
    expected = rf"k_steps.* = {k_steps} is not available .*GEO.*-1 or 0"
    with pytest.raises(NotAvailable, match=expected):
        strategy.a_sync_configs = {"k_steps": k_steps}
    with pytest.raises(ConfigError, match="= -2 is not valid; valid: a whole number >= -1"):
        strategy.a_sync_configs = {"k_steps": -2}
    assert strategy.a_sync_configs["k_steps"] == -1


def test_setting_a_sync_keeps_its_configs():
    strategy = DistributedStrategy()
    strategy.a_sync_configs = {"k_steps": 0}
    strategy.a_sync = True
    assert strategy.a_sync_configs["k_steps"] == 0


# -- unknown names -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("a_synk", "did you mean a_sync"),
        ("ammp", "did you mean amp"),
        ("fuse_all_optimizer_ops", r"did you mean build_strategy\.fuse_all_optimizer_ops\?"),
        ("thread_num", r"did you mean execution_strategy\.num_threads\?"),
        ("zzzzzzzz", "docs/strategy.md"),
    ],
)
def test_an_unknown_field_names_close_ones(name, hint):
    strategy = DistributedStrategy()
    with pytest.raises(ConfigError, match=f"no field '{name}'; .*{hint}"):
        setattr(strategy, name, True)
    assert not hasattr(strategy, name)


def test_an_unknown_field_of_an_inner_group_lists_valid_ones():
    with pytest.raises(ConfigError, match="execution_strategy has no field 'zz'; valid: num_thr"):
        ExecutionStrategy().zz = 1
    with pytest.raises(ConfigError, match="did you mean num_threads"):
        ExecutionStrategy().num_thread = 1


# -- build and execution -------------------------------------------------------------------------


def test_objects_of_paddle_are_taken_by_value():
    strategy = DistributedStrategy()
    execution = ExecutionStrategy()
    with pytest.warns(UserWarning, match="torch.set_num_threads"):
        execution.num_threads = 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once, when it was set
        strategy.execution_strategy = execution
    with pytest.warns(UserWarning, match="no effect"):
        execution.num_threads = 4
    assert strategy.execution_strategy.num_threads == 3
    assert repr(strategy.execution_strategy) == "ExecutionStrategy(num_threads=3)"
    strategy.build_strategy = BuildStrategy()
    with pytest.raises(ConfigError, match="valid: BuildStrategy with some of enable_seq"):
        strategy.build_strategy = execution


def test_the_warning_points_at_the_users_line():
    with pytest.warns(UserWarning, match="no effect") as caught:
        DistributedStrategy().execution_strategy.num_threads = 3
    assert [warning.filename for warning in caught] == [__file__]


def test_fusion_names_the_way_in_pytorch():
    with pytest.raises(NotAvailable, match=r"torch\.compile"):
        DistributedStrategy().build_strategy.fuse_bn_act_ops = True


def test_a_password_is_never_shown():
    strategy = DistributedStrategy()
    with pytest.raises(NotAvailable) as caught:
        strategy.fs_client_param = {"passwd": "opensesame"}
    assert "opensesame" not in str(caught.value)
    assert "passwd" in str(caught.value)


# -- comparing, copying, showing -----------------------------------------------------------------


def changed_strategy() -> DistributedStrategy:
    strategy = DistributedStrategy()
    strategy.a_sync = False
    strategy.a_sync_configs = {"k_steps": 0}
    strategy.stall_report_s = 2.5
    strategy.stall_end_s = 30.0
    strategy.nonfinite = "skip"
    return strategy


def test_equality_follows_the_values():
    assert DistributedStrategy() == DistributedStrategy()
    assert changed_strategy() == changed_strategy()
    assert changed_strategy() != DistributedStrategy()
    assert DistributedStrategy() != DistributedStrategy().to_dict()
    with pytest.raises(TypeError, match="unhashable"):
        hash(DistributedStrategy())


def test_fields_cannot_be_deleted():
    strategy = changed_strategy()
    with pytest.raises(ConfigError, match=r"^strategy\.a_sync cannot .* to its default, True$"):
        del strategy.a_sync
    with pytest.raises(ConfigError, match=r"^strategy\.a_sync_configs .* to its default, \{\}$"):
        del strategy.a_sync_configs
    with pytest.raises(ConfigError, match=r"a_sync_configs\['k_steps'\] .* to its default, -1$"):
        del strategy.a_sync_configs["k_steps"]
    with pytest.raises(ConfigError, match="no field 'a_synk'; did you mean a_sync"):
        del strategy.a_synk
    with pytest.raises(ConfigError, match="has no key 'k'; valid keys: k_steps"):
        del strategy.a_sync_configs["k"]
    assert strategy == changed_strategy()


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy])
def test_copies_are_equal_and_apart(copied):
    strategy = changed_strategy()
    twin = copied(strategy)
    assert twin == strategy
    assert twin.mode == "sync"
    twin.a_sync_configs["k_steps"] = -1
    twin.nonfinite = "raise"
    assert strategy == changed_strategy()
    assert twin != strategy
    with pytest.raises(ConfigError):
        twin.a_synk = True


def test_to_dict_is_json_in_the_order_of_declaration():
    plain = changed_strategy().to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert list(plain) == list(DistributedStrategy().to_dict()) == list(DistributedStrategy.fields)
    plain["a_sync_configs"]["k_steps"] = 7
    assert changed_strategy().a_sync_configs["k_steps"] == 0


def test_repr_shows_what_differs_then_the_mode():
    assert repr(DistributedStrategy()).splitlines() == [
        "DistributedStrategy, 0 field(s) differ from the defaults",
        "mode: async",
    ]
    assert repr(changed_strategy()).splitlines() == [
        "DistributedStrategy, 5 field(s) differ from the defaults",
        "  a_sync                  False  (default True)",
        "  a_sync_configs.k_steps  0  (default -1)",
        "  nonfinite               'skip'  (default 'raise')",
        "  stall_report_s          2.5  (default 60.0)",
        "  stall_end_s             30.0  (default 600.0)",
        "mode: sync",
    ]


# -- imports -------------------------------------------------------------------------------------


def test_the_module_stays_light():
    heavy = ("torch", "numpy", "yaml", "mpi4py", "h5py", "horovod")
    code = f"import sys, mpifleet.strategy; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    loaded = set(ast.literal_eval(done.stdout)) - {
        "numpy"
    }  # the package's vocabulary may use numpy
    assert loaded == set()
