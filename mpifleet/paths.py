"""Names of files and directories as users give them."""

import os
from pathlib import Path

from mpifleet.errors import ConfigError

Named = str | os.PathLike[str]


def path_of(what: str, name: Named) -> Path:
    """The path. what: the argument's name.

    Raises ConfigError for what is none, and for an empty one: that is the current directory to
    Python, and most often a variable that was never set.
    """
    try:
        path = os.fspath(name)
    except TypeError as cause:
        raise ConfigError(f"{what}={name!r:.100}; use a path: text or a pathlib.Path") from cause
    if not isinstance(path, str) or not path or "\0" in path:
        raise ConfigError(f"{what}={name!r:.100}; use a path that is text and not empty")
    return Path(path)
