"""MovieLens tables to samples, on made-up tables in the same format."""

import hashlib
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from mpifleet.data import movielens
from mpifleet.data.movielens_features import build_samples
from mpifleet.data.one_at_a_time import LOCK_NAME, one_at_a_time
from mpifleet.errors import ConfigError, DataError

USERS = 12
FILMS = 9
INTER_HEADER = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"


def write_tables(directory, seed=0):
    """Every user rates every film; returns the ratings [USERS * FILMS] in file order."""
    rng = np.random.default_rng(seed)
    pairs = rng.permutation(USERS * FILMS)
    ratings = rng.integers(1, 6, pairs.size)
    lines = [
        f"{pair // FILMS + 1}\t{pair % FILMS + 101}\t{rating}\t{880_000_000 + 5000 * pair}\n"
        for pair, rating in zip(pairs, ratings, strict=True)
    ]
    (directory / "ml-100k.inter").write_text(INTER_HEADER + "".join(lines))
    users = [
        f"{u + 1}\t{15 + 5 * u}\t{'MF'[u % 2]}\t{['writer', 'other'][u % 2]}\t{u}4{u % 3}1\n"
        for u in range(USERS)
    ]
    header = "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token\n"
    (directory / "ml-100k.user").write_text(header + "".join(users))
    genres = ["Comedy", "Comedy Drama", "A B C D E F G"]
    films = [
        f"{f + 101}\tThe film, part {f}\t{'V' if f == 3 else 1930 + 9 * f}\t{genres[f % 3]}\n"
        for f in range(FILMS)
    ]
    header = "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"
    (directory / "ml-100k.item").write_text(header + "".join(films))
    return ratings


@pytest.fixture
def tables(tmp_path):
    write_tables(tmp_path)
    return tmp_path


def test_shapes_labels_and_split(tables):
    data = movielens.load(tables, seed=3)
    assert data.test.num_samples == 22
    assert data.train.num_samples == 86
    for samples in (data.train, data.test):
        assert samples.dense.shape[1:] == (13,)
        assert samples.ids.shape[1:] == (26,)
        assert [a.dtype for a in samples] == [np.int64, np.float32, np.int64]
        assert np.isfinite(samples.dense).all()
        assert samples.ids.min() >= 0
        assert samples.ids.max() < data.num_ids
    ratings = movielens.read_ratings(tables)
    both = np.concatenate([data.train.labels, data.test.labels])
    assert both.sum() == (ratings.rating >= 4).sum()
    pairs = np.concatenate([data.train.ids[:, :2], data.test.ids[:, :2]])
    assert len(np.unique(pairs, axis=0)) == USERS * FILMS
    again, other = movielens.load(tables, seed=3), movielens.load(tables, seed=4)
    np.testing.assert_array_equal(again.train.dense, data.train.dense)
    assert not np.array_equal(other.test.ids, data.test.ids)


def test_slots_have_blocks_of_their_own(tables):
    ids = np.concatenate([part.ids for part in movielens.load(tables)[:2]])
    assert np.all(ids.max(axis=0)[:-1] < ids.min(axis=0)[1:])
    assert [np.unique(ids[:, slot]).size for slot in (0, 1, 3)] == [USERS, FILMS, 2]
    # Genres "Comedy", "Comedy Drama" and six of the seven: 1st slot Comedy or A, 2nd -, Drama or B.
    assert [np.unique(ids[:, slot]).size for slot in (8, 9, 10, 13)] == [2, 3, 2, 2]


def test_no_label_reaches_its_own_inputs(tables):
    ratings = movielens.read_ratings(tables)
    order = np.random.default_rng(0).permutation(USERS * FILMS)
    train, test = order[20:], order[:20]
    before_train, before_test, _ = build_samples(ratings, train, test)
    # Held-out ratings change nothing but held-out labels.
    changed = ratings.rating.copy()
    changed[test] = 6 - changed[test]
    after_train, after_test, _ = build_samples(ratings._replace(rating=changed), train, test)
    np.testing.assert_array_equal(after_train.dense, before_train.dense)
    np.testing.assert_array_equal(after_test.dense, before_test.dense)
    # A training rating changes the inputs of others, but not its own.
    for sample in (0, 7, 50):
        changed = ratings.rating.copy()
        changed[train[sample]] = 6 - changed[train[sample]] if changed[train[sample]] != 3 else 5
        after_train, after_test, _ = build_samples(ratings._replace(rating=changed), train, test)
        np.testing.assert_array_equal(after_train.dense[sample], before_train.dense[sample])
        assert not np.array_equal(after_train.dense, before_train.dense)
        assert not np.array_equal(after_test.dense, before_test.dense)


def test_statistics_of_a_held_out_sample(tables):
    ratings = movielens.read_ratings(tables)
    train, test = np.arange(20, USERS * FILMS), np.arange(20)
    _, samples, _ = build_samples(ratings, train, test)
    mean = ratings.rating[train].mean()
    for sample in range(20):
        of_user = ratings.rating[train][ratings.user[train] == ratings.user[sample]] - mean
        of_film = ratings.rating[train][ratings.film[train] == ratings.film[sample]] - mean
        expected = [of_user.sum() / (of_user.size + 5), of_film.sum() / (of_film.size + 5)]
        np.testing.assert_allclose(samples.dense[sample, 1:3], expected, rtol=1e-5)
        assert samples.dense[sample, 5] == pytest.approx(np.log1p(of_user.size) / 5 - 0.8)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1\t101\t3\n", r"inter:110: 3 columns; the header has 4"),
        ("1\t101\tfive\t88\n", r"inter:110: column rating holds 'five'; expected a number"),
        ("77\t101\t5\t88\n", r"inter:110: user_id '77' is not in ml-100k.user"),
        ("1\t999\t5\t88\n", r"inter:110: item_id '999' is not in ml-100k.item"),
    ],
)
def test_broken_line_is_named(tables, line, message):
    with open(tables / "ml-100k.inter", "a") as stream:
        stream.write(line)
    with pytest.raises(DataError, match=message):
        movielens.read_ratings(tables)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no column user_id, item_id, rating, timestamp"),
        ("user_id:token\titem_id:token\n", "inter:1: no column rating, timestamp"),
        (INTER_HEADER, "no line after the header"),
    ],
)
def test_broken_header_is_named(tables, text, message):
    (tables / "ml-100k.inter").write_text(text)
    with pytest.raises(DataError, match=message):
        movielens.read_ratings(tables)


def test_share_must_leave_both_sides(tables):
    with pytest.raises(ConfigError, match=r"test_share=1\.0"):
        movielens.load(tables, test_share=1.0)


def stand_in_for_pip(monkeypatch, tables, returncode=0, stderr="", pinned=True):
    calls = []

    def run(command, **_):
        calls.append(command)
        wheel = f"{command[command.index('--dest') + 1]}/recbole-1.2.1-py3-none-any.whl"
        if returncode == 0:
            with zipfile.ZipFile(wheel, "w") as archive:
                for name in ("inter", "user", "item"):
                    text = (tables / f"ml-100k.{name}").read_text()
                    archive.writestr(f"{movielens.MEMBERS}ml-100k.{name}", text)
                archive.writestr("recbole/__init__.py", "")
            if pinned:
                monkeypatch.setattr(movielens, "WHEEL_SHA256", sha256(wheel))
        return subprocess.CompletedProcess(command, returncode, "", stderr)

    monkeypatch.setattr(movielens.subprocess, "run", run)
    return calls


def sha256(path):
    with open(path, "rb") as stream:
        return hashlib.sha256(stream.read()).hexdigest()


def test_fetch_takes_only_the_tables_and_only_once(tables, tmp_path_factory, monkeypatch):
    calls = stand_in_for_pip(monkeypatch, tables)
    target = tmp_path_factory.mktemp("cache") / "ml"
    assert movielens.fetch(target) == target
    assert sorted(p.name for p in target.glob("[!.]*")) == [
        "ml-100k.inter",
        "ml-100k.item",
        "ml-100k.user",
    ]
    assert movielens.load(target).num_ids == movielens.load(tables).num_ids
    movielens.fetch(target)
    assert len(calls) == 1
    assert calls[0][:4] == [sys.executable, "-m", "pip", "download"]


def test_fetch_says_what_to_do_without_a_network(tmp_path, monkeypatch):
    stand_in_for_pip(monkeypatch, tmp_path, 1, "trying\nERROR: No matching distribution\n")
    with pytest.raises(DataError, match="No matching distribution") as raised:
        movielens.fetch(tmp_path / "ml")
    assert "copy ml-100k.inter" in str(raised.value)
    assert list((tmp_path / "ml").iterdir()) == [tmp_path / "ml" / LOCK_NAME]


def test_another_file_under_that_name_is_refused(tables, tmp_path, monkeypatch):
    stand_in_for_pip(monkeypatch, tables, pinned=False)
    with pytest.raises(DataError, match=r"has SHA-256 .* expected"):
        movielens.fetch(tmp_path / "ml")


def test_of_several_that_fetch_at_once_one_downloads(tables, tmp_path, monkeypatch):
    calls = stand_in_for_pip(monkeypatch, tables)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(movielens.fetch, [tmp_path / "ml"] * 4))
    assert len(calls) == 1


def test_fetch_starts_nothing_once_mpi_runs(tables, tmp_path, monkeypatch):
    calls = stand_in_for_pip(monkeypatch, tables)
    running = SimpleNamespace(Is_initialized=lambda: True)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", running)
    with pytest.raises(DataError, match=r"python -m mpifleet\.data\.movielens --out"):
        movielens.fetch(tmp_path / "ml")
    assert not calls
    assert movielens.fetch(tables) == tables


def test_who_waits_too_long_for_the_files_says_so(tmp_path):
    with (
        one_at_a_time(tmp_path, 1.0),
        pytest.raises(DataError, match=r"for 0 s"),
        one_at_a_time(tmp_path, 0.2),
    ):
        pytest.fail("two hold the lock")
    with one_at_a_time(tmp_path, 0.2):
        pass


def test_command_line(tables, tmp_path, monkeypatch, capsys):
    assert movielens.main(["--out", str(tables)]) == 0
    assert str(tables) in capsys.readouterr().out
    stand_in_for_pip(monkeypatch, tmp_path, 1, "ERROR: No matching distribution\n")
    assert movielens.main(["--out", str(tmp_path / "ml")]) == 1
    assert "No matching distribution" in capsys.readouterr().err
