"""The click-through example: shares cover the data, and a checkpoint gives the same test AUC."""

import itertools
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mpifleet.checkpoint import SparseShape, write_checkpoint
from mpifleet.data import criteo_synthetic
from mpifleet.data.movielens import MovieLens
from mpifleet.errors import ConfigError

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
def programs(clicks):
    """train and infer as modules."""
    import infer
    import train

    return SimpleNamespace(train=train, infer=infer)


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
def test_impossible_options_are_refused(programs, capsys, option, value):
    with pytest.raises(SystemExit) as end:
        programs.train.main([option, value])
    assert end.value.code == 2
    assert f"argument {option}: {value!r}: use a" in capsys.readouterr().err


def test_number_of_samples_is_told(data_set):
    assert data_set.num_train() == pytest.approx(2500, rel=0 if data_set.is_exact else 0.02)


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
        "train.py",
        *data,
        *("--limit", 905, "--batch-size", 100),
        *("--save", tmp_path / "saved", "--export", tmp_path / "served"),
    )
    assert re.fullmatch(r"test AUC 0\.\d{4} \(4500 samples\)\n", trained.stdout)
    assert "epoch 0: 1,000 samples" in trained.stderr, "905 in whole batches"
    assert run_example("infer.py", *data, "--load", tmp_path / "saved").stdout == trained.stdout
    assert run_example("infer.py", *data, "--model", tmp_path / "served").stdout == trained.stdout


def test_the_same_command_goes_on_where_training_was_stopped(directory, tmp_path):
    data = ("--data", "synthetic", "--data-dir", directory, "--limit", 900, "--batch-size", 100)
    saved = ("--checkpoint", tmp_path / "saved")
    whole = run_example("train.py", *data, "--epochs", 2).stdout.splitlines()
    first = run_example("train.py", *data, *saved, "--epochs", 1).stdout.splitlines()
    second = run_example("train.py", *data, *saved, "--epochs", 2).stdout.splitlines()
    assert [*first, *second] == whole


class Counting:
    """Batches of ten samples for a training loop that only counts them."""

    is_exact = False

    def __init__(self):
        self.taken = 0

    def num_train(self):
        return 1_000

    def train(self, _epoch, _batch_size, _share):
        for _ in range(50):
            self.taken += 1
            yield SimpleNamespace(num_samples=10)


@pytest.fixture
def count_batches(programs, monkeypatch, capsys):
    """What a worker trains under --limit: its number of batches, and what it says."""
    steps = itertools.count()
    loss = SimpleNamespace(backward=lambda: None, detach=lambda: torch.tensor(float(next(steps))))
    model = SimpleNamespace(loss=lambda: loss, embedding=None)
    optimizer = SimpleNamespace(clock=None, step=lambda: None, zero_grad=lambda: None)
    monkeypatch.setattr(programs.train, "tensors", lambda _batch: ())
    monkeypatch.setattr(programs.train.fleet, "is_first_worker", lambda: True)
    monkeypatch.setattr(programs.train.fleet, "pull_ahead", lambda batches, _look_ups: batches)

    def count(limit, share, is_exact=False):
        limited = ["--limit", str(limit)] if limit else []
        args = programs.train.parse([*limited, "--batch-size", "10"])
        batches = Counting()
        batches.is_exact = is_exact
        programs.train.train_epoch(args, 0, batches, share, model, optimizer)
        return batches.taken, capsys.readouterr().err

    return count


@pytest.mark.parametrize(("limit", "total"), [(1, 10), (10, 10), (11, 20), (70, 70), (95, 100)])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_limit_holds_for_all_workers_together(clicks, count_batches, limit, total, count):
    told = [count_batches(limit, clicks.Share(index, count)) for index in range(count)]
    assert sum(taken for taken, _ in told) * 10 == total
    assert told[0][1].startswith(f"epoch 0: {total} samples, "), "worker 0 says so"


def test_no_more_is_told_than_there_is(clicks, count_batches):
    # 50 batches of 10 and 3 workers: 1,500 by this worker's count.
    assert "epoch 0: 1,500 samples, " in count_batches(None, clicks.Share(0, 3))[1]
    assert "epoch 0: 1,000 samples, " in count_batches(None, clicks.Share(0, 3), is_exact=True)[1]


def test_the_loss_shown_is_the_mean_since_the_last_look(clicks, count_batches):
    # The losses of 40 steps are 0, 1, ..., 39; the last look is after step 20, the one before at 0.
    assert ", loss 10.5000, " in count_batches(400, clicks.Share(0, 1))[1]


def test_a_directory_that_cannot_be_written_is_refused_before_training(programs, tmp_path):
    programs.train.check_writable(tmp_path / "new" / "saved", "--save")
    assert [path.name for path in tmp_path.rglob("*")] == ["new", "saved"]
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--save .*file/saved: cannot write"):
        programs.train.check_writable(tmp_path / "file" / "saved", "--save")


def test_a_checkpoint_of_other_data_is_named(programs, tmp_path):
    table = SparseShape("slots", 65_536, 10, "float32", (), {})
    rows = {"rows": np.zeros((65_536, 10), np.float32)}
    write_checkpoint(tmp_path, dense=[], sparse=[(table, rows)], buffers={}, meta={})
    fits = programs.infer.parse(["--load", str(tmp_path)])
    programs.infer.check_fits(fits)
    other = programs.infer.parse(["--load", str(tmp_path), "--data", "synthetic"])
    with pytest.raises(ConfigError, match="65,536 rows instead of 1,000,001; use --data movielens"):
        programs.infer.check_fits(other)
