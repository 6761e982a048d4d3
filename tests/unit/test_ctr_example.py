"""The click-through example: shares cover the data, and a checkpoint gives the same test AUC."""

import itertools
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from mpifleet.data import criteo_synthetic
from mpifleet.data.movielens import MovieLens

EXAMPLE = Path(__file__).parents[2] / "examples" / "ctr_dnn"
LIMIT_S = 240


@pytest.fixture(scope="module")
def clicks():
    sys.path.insert(0, str(EXAMPLE))
    try:
        import clicks as module

        yield module
    finally:
        sys.path.remove(str(EXAMPLE))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    root = tmp_path_factory.mktemp("clicks")
    criteo_synthetic.write_dataset(root, rows=2500, files=3, seed=1, test_rows=4500)
    return root


@pytest.fixture(params=["movielens", "criteo"])
def data_set(request, clicks, directory):
    if request.param == "criteo":
        return clicks.open_clicks("criteo", directory, 0)
    train = criteo_synthetic.synthetic_samples(2500, 1)
    test = criteo_synthetic.synthetic_samples(4500, 1, criteo_synthetic.TEST_PART)
    return clicks.InMemory(MovieLens(train, test, 65_536), seed=0)


def sorted_rows(batches):
    """All samples as sorted rows, to compare them as sets with repetitions."""
    rows = np.concatenate([np.column_stack([b.labels, b.ids]) for b in batches])
    return rows[np.lexsort(rows.T)]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_shares_cover_every_sample_once(clicks, data_set, count):
    shares = [clicks.Share(index, count) for index in range(count)]
    whole = clicks.Share(0, 1)
    for read, samples in (
        (lambda share: data_set.train(0, 100, share), 2500),
        (data_set.test, 4500),
    ):
        together = itertools.chain.from_iterable(read(share) for share in shares)
        rows = sorted_rows(together)
        assert len(rows) == samples
        np.testing.assert_array_equal(rows, sorted_rows(read(whole)))


@pytest.mark.parametrize("count", [1, 2, 3, 40])
def test_batches_are_dealt_evenly(clicks, count):
    dealt = [list(clicks.deal(range(36), clicks.Share(index, count))) for index in range(count)]
    assert sorted(itertools.chain.from_iterable(dealt)) == list(range(36))
    lengths = [len(batches) for batches in dealt]
    assert max(lengths) - min(lengths) <= 1


def test_synthetic_files_are_made_once(clicks, tmp_path, monkeypatch):
    made = []

    real = criteo_synthetic.write_dataset
    monkeypatch.setattr(
        clicks.criteo_synthetic,
        "write_dataset",
        lambda directory, **_: made.append(real(directory, 20, 2, 0, 5)),
    )
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: clicks.prepare("synthetic", tmp_path), range(3)))
    assert len(made) == 1
    assert clicks.open_clicks("synthetic", tmp_path, 0).num_train() > 0


@pytest.mark.parametrize(
    ("option", "value"),
    [("--limit", "0"), ("--limit", "-5"), ("--lr", "0"), ("--lr", "nan"), ("--epochs", "x")],
)
def test_impossible_options_are_refused(option, value):
    done = subprocess.run(
        [sys.executable, str(EXAMPLE / "train.py"), option, value],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 2
    assert f"argument {option}: {value!r}: use a" in done.stderr


def test_number_of_samples_is_told(data_set):
    assert data_set.num_train() == pytest.approx(2500, rel=0.02)


def test_a_directory_without_files_is_named(clicks, tmp_path):
    with pytest.raises(ValueError, match="train: no files"):
        clicks.open_clicks("criteo", tmp_path, 0)


def run_example(program, *arguments):
    done = subprocess.run(
        [sys.executable, str(EXAMPLE / program), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_infer_repeats_the_test_auc(directory, tmp_path):
    data = ("--data", "synthetic", "--data-dir", directory)
    trained = run_example(
        "train.py", *data, "--limit", 1000, "--batch-size", 100, "--save", tmp_path / "saved"
    )
    assert re.fullmatch(r"test AUC 0\.\d{4} \(4500 samples\)\n", trained.stdout)
    assert "epoch 0: 1,000 samples" in trained.stderr
    assert run_example("infer.py", *data, "--load", tmp_path / "saved").stdout == trained.stdout
