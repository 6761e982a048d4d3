"""MovieLens-100k as samples of a click-through model.

The three tables (100,000 ratings, 943 users, 1,682 films) are taken out of a pinned wheel on the
package index, so that they come through pip and its settings; nothing of them is in this
repository.  A sample is a rating, its label 1 when the rating is 4 or 5.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpifleet.data.movielens_features import Ratings, build_samples
from mpifleet.data.one_at_a_time import one_at_a_time
from mpifleet.data.samples import Samples
from mpifleet.errors import ConfigError, DataError

__all__ = ["MovieLens", "fetch", "load", "read_ratings"]

DEFAULT_DIRECTORY = Path(".data") / "ml-100k"
WHEEL = "recbole==1.2.1"
WHEEL_SHA256 = "9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407"
MEMBERS = "recbole/dataset_example/ml-100k/"
INTER, USER, ITEM = "ml-100k.inter", "ml-100k.user", "ml-100k.item"
DOWNLOAD_LIMIT_S = 300.0


class MovieLens(NamedTuple):
    """Two disjoint sets of samples, and the number of ids: every id is in [0, num_ids)."""

    train: Samples
    test: Samples
    num_ids: int


def load(
    directory: str | os.PathLike[str] = DEFAULT_DIRECTORY, seed: int = 0, test_share: float = 0.2
) -> MovieLens:
    """Samples of the tables in `directory`, split at random by `seed`: the same in every process.

    13 dense inputs and 26 id slots, see `movielens_features`; statistics of ratings among the
    dense inputs never contain the sample's own rating or a held-out one.
    Raises DataError for a broken table, FileNotFoundError before `fetch`.
    """
    if not 0.0 < test_share < 1.0:
        raise ConfigError(f"test_share={test_share} leaves one side empty; use a share in (0, 1)")
    ratings = read_ratings(directory)
    order = np.random.default_rng(seed).permutation(len(ratings.rating))
    num_test = round(test_share * order.size)
    test, train = order[:num_test], order[num_test:]
    return MovieLens(*build_samples(ratings, train, test))


def fetch(directory: str | os.PathLike[str] = DEFAULT_DIRECTORY) -> Path:
    """The directory with the three tables, downloaded with this Python's pip unless they are there.

    Call it before fleet.init(), or run `python -m mpifleet.data.movielens` first: pip is a process
    of its own, and none may be started from a rank once MPI runs.  All ranks may call it: one
    downloads, those that see the same directory wait.
    Raises DataError when pip cannot download, and inside MPI where a table is missing.
    """
    target = Path(directory)
    if _is_complete(target):
        return target
    if _inside_mpi():
        raise DataError(
            f"{target} does not hold MovieLens-100k, and pip cannot be started once MPI runs. "
            "Call movielens.fetch() before fleet.init(), or first run:\n"
            f"python -m mpifleet.data.movielens --out {target}"
        )
    with one_at_a_time(target, limit_s=2 * DOWNLOAD_LIMIT_S):
        if not _is_complete(target):
            _fetch_into(target)
    return target


def _is_complete(target: Path) -> bool:
    return all((target / name).is_file() for name in (INTER, USER, ITEM))


def _inside_mpi() -> bool:
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and bool(mpi.Is_initialized())


def _fetch_into(target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target) as scratch:
        wheel = _download(Path(scratch), target)
        with zipfile.ZipFile(wheel) as archive:
            for name in (INTER, USER, ITEM):
                whole = Path(scratch) / name
                whole.write_bytes(archive.read(MEMBERS + name))
                whole.replace(target / name)


def read_ratings(directory: str | os.PathLike[str]) -> Ratings:
    """The three tables of a directory, joined by dense user and film numbers from 0."""
    root = Path(directory)
    inter = _read_table(root / INTER, ("user_id", "item_id", "rating", "timestamp"))
    users = _read_table(root / USER, ("user_id", "age", "gender", "occupation", "zip_code"))
    films = _read_table(root / ITEM, ("item_id", "release_year", "class"))
    years = films["release_year"]
    return Ratings(
        user=_positions(inter, "user_id", users["user_id"], root),
        film=_positions(inter, "item_id", films["item_id"], root),
        rating=_numbers(inter["rating"], root / INTER, "rating"),
        time_s=_numbers(inter["timestamp"], root / INTER, "timestamp"),
        user_age=_numbers(users["age"], root / USER, "age"),
        user_gender=users["gender"],
        user_occupation=users["occupation"],
        user_zip=users["zip_code"],
        film_year=np.where(np.char.isdigit(years), years, "0").astype(np.int64),
        film_genres=films["class"],
    )


def _download(scratch: Path, target: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--timeout", "15", "--retries", "1"]
    command += ["--only-binary", ":all:", "--dest", str(scratch), WHEEL]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_LIMIT_S, check=False
        )
        said = done.stderr.strip().splitlines()[-1:] if done.returncode else []
        failed = done.returncode != 0
    except subprocess.TimeoutExpired:
        said, failed = [f"no answer within {DOWNLOAD_LIMIT_S:.0f} s"], True
    wheels = list(scratch.glob("*.whl"))
    if failed or len(wheels) != 1:
        raise DataError(
            f"MovieLens-100k could not be downloaded with pip ({WHEEL}): {' '.join(said)}\n"
            f"Connect this machine to a package index, or copy {INTER}, {USER} and {ITEM} "
            f"to {target} by hand."
        )
    found = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if found != WHEEL_SHA256:
        raise DataError(f"{wheels[0].name} has SHA-256 {found}; expected {WHEEL_SHA256}")
    return wheels[0]


def _read_table(path: Path, wanted: tuple[str, ...]) -> dict[str, NDArray[np.str_]]:
    """Columns by name of a tab-separated table whose header says name:type."""
    lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    header = [entry.split(":")[0] for entry in lines[0].split("\t")]
    missing = [name for name in wanted if name not in header]
    if missing:
        raise DataError(f"{path}:1: no column {', '.join(missing)}; the header has {header}")
    if len(lines) < 2:
        raise DataError(f"{path}: no line after the header")
    tabs = np.char.count(np.array(lines[1:]), "\t")
    wrong = np.flatnonzero(tabs != len(header) - 1)
    if wrong.size:
        line = int(wrong[0])
        raise DataError(
            f"{path}:{line + 2}: {int(tabs[line]) + 1} columns; the header has {len(header)}"
        )
    # Every line now has the same number of fields, so the joined text is one flat row of them.
    fields = np.array("\t".join(lines[1:]).split("\t")).reshape(-1, len(header))
    return {name: fields[:, header.index(name)] for name in wanted}


def _numbers(column: NDArray[np.str_], path: Path, name: str) -> NDArray[np.int64]:
    digits = np.char.isdigit(column)
    if not digits.all():
        line = int(np.argmin(digits))
        raise DataError(
            f"{path}:{line + 2}: column {name} holds {str(column[line])!r}; expected a number"
        )
    return column.astype(np.int64)


def _positions(
    inter: dict[str, NDArray[np.str_]], name: str, known: NDArray[np.str_], root: Path
) -> NDArray[np.int64]:
    """Line number in the other table, from 0, of each id in the ratings."""
    order = np.argsort(known)
    at = np.minimum(np.searchsorted(known, inter[name], sorter=order), known.size - 1)
    positions = order[at]
    unknown = known[positions] != inter[name]
    if unknown.any():
        line = int(np.argmax(unknown))
        table = USER if name == "user_id" else ITEM
        raise DataError(
            f"{root / INTER}:{line + 2}: {name} {str(inter[name][line])!r} is not in {table}"
        )
    return positions


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: put the tables into a directory, for jobs that start later."""
    parser = argparse.ArgumentParser(
        prog="python -m mpifleet.data.movielens",
        description="Download the three tables of MovieLens-100k with pip.",
        epilog=f"example: python -m mpifleet.data.movielens --out {DEFAULT_DIRECTORY}",
    )
    parser.add_argument(
        "--out", type=Path, default=DEFAULT_DIRECTORY, metavar="DIR", help="default: %(default)s"
    )
    chosen = parser.parse_args(argv)
    try:
        print(f"MovieLens-100k is in {fetch(chosen.out)}")
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
