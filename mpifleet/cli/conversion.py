"""Does what `mpifleet export` and `mpifleet import` are asked for, and says what was done."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mpifleet.checkpoint import Keep
from mpifleet.cli.bytes_read import BytesRead
from mpifleet.cli.inspection import opened
from mpifleet.cli.printed import printable, size_text
from mpifleet.errors import ConfigError, DataError
from mpifleet.portable.importing import (
    check_matched,
    state_changes,
    vector_changes,
    write_changed,
)
from mpifleet.portable.inference_writing import TRAINED, write_inference
from mpifleet.portable.sources import ModelSource, checkpoint_source
from mpifleet.portable.state_dict import (
    SAFETENSORS,
    TORCH,
    check_suffix,
    read_state,
    state_streams,
    write_state,
)
from mpifleet.portable.vectors import export_vectors, read_vectors

_ALL_STAY = Keep(last=sys.maxsize)
_SUFFIXES = {"safetensors": SAFETENSORS, "state_dict": TORCH}


def export(arguments: argparse.Namespace) -> int:
    """Exit status 0. Raises ConfigError, CheckpointError, DataError."""
    to, target = arguments.to, Path(arguments.target)
    is_vectors = to.startswith("word2vec")
    _refuse(arguments, "word2vec" if is_vectors else to, is_vectors)
    if arguments.keys and to != "inference":
        raise ConfigError(f"--keys {arguments.keys[0]} needs --to inference")
    if to in _SUFFIXES and target.suffix not in _SUFFIXES[to]:
        raise ConfigError(f"{target}: with --to {to} use a name in {' or '.join(_SUFFIXES[to])}")
    keys = _keys(arguments.keys)
    with opened(Path(arguments.checkpoint)) as checkpoint:
        source = checkpoint_source(checkpoint)
        if is_vectors:
            table = source.table(arguments.table)
            vocab = None if arguments.vocab is None else Path(arguments.vocab)
            with _shown("writing", table.num_bytes, target) as told:
                export_vectors(target, table, to.endswith("binary"), vocab, told)
        else:
            _write_model(source, to, target, keys)
    return 0


def _write_model(source: ModelSource, to: str, target: Path, keys: Any) -> None:
    with _shown("writing", source.num_bytes, target) as told:
        if to == "inference":
            write_inference(target, source, keys, told)
        else:
            write_state(target, state_streams(source), told)


def import_file(arguments: argparse.Namespace) -> int:
    """Exit status 0. Raises ConfigError, CheckpointError, DataError."""
    path, target = Path(arguments.file), Path(arguments.target)
    is_vectors = arguments.source.startswith("word2vec")
    _refuse(arguments, arguments.source, is_vectors)
    if not is_vectors:
        check_suffix(path, "or say what it is with --from")
    if arguments.partial and is_vectors:
        raise ConfigError(f"--partial is for state_dict: of {arguments.source} any part is taken")
    with opened(Path(arguments.like)) as base:
        source = checkpoint_source(base)
        if is_vectors:
            table = source.table(arguments.table)
            with BytesRead("reading", table.num_bytes) as progress:
                binary = arguments.source.endswith("binary")
                facts = (table.num_rows, table.dim, table.dtype)
                vocab = None if arguments.vocab is None else Path(arguments.vocab)
                found = read_vectors(path, binary, *facts, vocab, progress.add)
            print(printable(f"table {table.name}: {found.report.text()}"))
            changes = vector_changes(table.name, found)
        else:
            changes, unmatched = state_changes(base, read_state(path))
            if not arguments.partial:
                check_matched(unmatched, path, "--partial")
            for name in unmatched.missing_keys:
                print(printable(f"not in {path}, taken from {arguments.like}: {name}"))
            for name in unmatched.unexpected_keys:
                print(printable(f"left out, {arguments.like} has no such name: {name}"))
        with _shown("writing", source.num_bytes, target) as told:
            write_changed(base, target, changes, told, _ALL_STAY)
    return 0


@contextmanager
def _shown(title: str, num_bytes: int, target: Path) -> Iterator[Any]:
    """A moving line, and at the end how much there is in which time."""
    begin_s, done = time.monotonic(), [0]
    with BytesRead(title, num_bytes) as progress:

        def told(count: int) -> None:
            done[0] += count
            progress.add(count)

        yield told
    took_s = time.monotonic() - begin_s
    rate = size_text(round(done[0] / max(took_s, 1e-9)))
    print(printable(f"{target}: {size_text(done[0])} in {took_s:.1f} s ({rate}/s)"))


def _refuse(arguments: argparse.Namespace, format_name: str, is_vectors: bool) -> None:
    for option in ("table", "vocab") if not is_vectors else ():
        value = getattr(arguments, option)
        if value is not None:
            raise ConfigError(f"--{option} {value} goes with word2vec formats, not {format_name}")


def _keys(words: list[str]) -> str | Mapping[str, np.ndarray]:
    """What --keys says. Raises ConfigError, DataError for a file of keys."""
    if words in ([], ["all"]):
        return "all"
    if words == [TRAINED]:
        return TRAINED
    keys = {}
    for word in words:
        table, is_named, name = word.rpartition("=")
        if not is_named:
            raise ConfigError(f'--keys {word}: use "all" or "trained" alone, or T=FILE')
        keys[table] = _read_keys(Path(name))
    return keys


def _read_keys(path: Path) -> np.ndarray:
    try:
        return np.loadtxt(path, np.int64, ndmin=1)
    except (OSError, ValueError) as cause:
        raise DataError(f"{path}: use one key, a whole number, a line: {cause}") from cause
