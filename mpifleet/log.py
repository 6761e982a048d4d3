"""Log lines on stderr that say which rank speaks.

The level comes from MPIFLEET_LOG (debug, info, warning, error; info when unset).
"""

import logging
import os
import sys

from mpifleet.errors import ConfigError

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_NAME = "mpifleet"


class _LiveStderr(logging.StreamHandler):
    """Writes to whatever sys.stderr is now, so that redirected streams are honoured."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def get_logger() -> logging.Logger:
    """The package's logger, set up on first use.

    Raises ConfigError when MPIFLEET_LOG is not a level.
    """
    logger = logging.getLogger(_NAME)
    if not logger.handlers:
        logger.addHandler(_LiveStderr())
        logger.propagate = False
        logger.setLevel(_level(os.environ.get("MPIFLEET_LOG", "info")))
        set_prefix("")
    return logger


def set_prefix(who: str) -> None:
    """Put `who`, for instance "rank 2 (server 0)", before every further line."""
    text = f"mpifleet: {who}: " if who else "mpifleet: "
    for handler in logging.getLogger(_NAME).handlers:
        handler.setFormatter(logging.Formatter(text + "%(message)s"))


def _level(name: str) -> int:
    level = _LEVELS.get(name.lower())
    if level is None:
        raise ConfigError(f"MPIFLEET_LOG={name!r} is not a level; use one of {sorted(_LEVELS)}")
    return level
