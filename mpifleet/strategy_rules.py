"""Which values of a strategy, each valid, do not fit together."""

from collections.abc import Mapping
from typing import Any

from mpifleet.errors import ConfigError


def check_together(values: Mapping[str, Any]) -> None:
    """Raise ConfigError naming both fields. values: of all fields; inner groups are mappings.

    Called when a field is set, and at the start: a key set inside a group does not know the others.
    """
    staleness = values["a_sync_configs"]["staleness"]
    if staleness >= 0 and not values["a_sync"]:
        raise ConfigError(
            f"strategy.a_sync_configs['staleness'] = {staleness} with strategy.a_sync = False: in "
            "sync mode no worker is ever ahead; valid: -1, or a_sync = True"
        )
    if values["pull_ahead"] and not values["a_sync"]:
        raise ConfigError(
            f"strategy.pull_ahead = {values['pull_ahead']} with strategy.a_sync = False: rows "
            "pulled ahead would miss an update; valid: 0, or a_sync = True"
        )
    report_s, end_s = values["stall_report_s"], values["stall_end_s"]
    if report_s >= end_s:
        raise ConfigError(
            f"strategy.stall_report_s = {report_s:g} with strategy.stall_end_s = {end_s:g}; "
            "valid: report before end (set stall_end_s first to raise both, last to lower both)"
        )
