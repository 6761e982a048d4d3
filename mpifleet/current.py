"""The one session of this process, from fleet.init() on."""

from mpifleet.errors import ConfigError
from mpifleet.session import Session
from mpifleet.strategy import DistributedStrategy

_session: Session | None = None


def begin(
    strategy: DistributedStrategy | None,
    server_num: int | None,
    worker_num: int | None,
    role: str | None,
    symmetric: bool,
) -> None:
    """Start it; see fleet.init. Collective; once. Raises ConfigError the second time."""
    global _session
    if _session is not None:
        raise ConfigError("fleet.init() was called before in this process")
    _session = Session(strategy, server_num, worker_num, role, symmetric)


def current() -> Session:
    """The session. Raises ConfigError before fleet.init()."""
    if _session is None:
        raise ConfigError("call fleet.init() first")
    return _session
