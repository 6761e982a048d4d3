"""A strategy's YAML file: written whole or not at all, and read as one mapping."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpifleet.errors import ConfigError


def write_mapping(path: str | os.PathLike[str], values: Mapping[str, Any], header: str) -> None:
    """Write `values` as YAML below `header`, lines of comment, in one piece.

    Raises ConfigError naming the path where no such file can be written.
    """
    import yaml

    # Other ranks may write the same file: each its own part, then one rename.
    partial = Path(f"{os.fspath(path)}.{os.getpid()}.partial")
    body = yaml.safe_dump(dict(values), sort_keys=False)
    try:
        partial.write_text(f"{header}\n{body}", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be written: {error.strerror}; "
            "valid: a file in a directory that exists and can be written"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def read_mapping(path: Path) -> Mapping[str, Any]:
    """The mapping that a YAML file holds, empty where the file is.

    Raises ConfigError naming the path when it is no such file.
    """
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: not a readable YAML file: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path}: holds a {type(content).__name__}; valid: lines of `field: value`"
        )
    return content
