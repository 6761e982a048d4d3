"""Generated click data: the text says what the arrays say, and the teacher is the truth."""

import subprocess
import sys
import zlib

import numpy as np
import pytest

from mpifleet.data import criteo_synthetic as synthetic
from mpifleet.data.criteo import read_criteo
from mpifleet.errors import ConfigError
from mpifleet.metrics import AUC


def read_whole(paths):
    (samples,) = read_criteo(paths, 10**6)
    return samples


def assert_same(left, right):
    for a, b in zip(left, right, strict=True):
        np.testing.assert_array_equal(a, b)


def test_files_parse_to_the_samples(tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic, "CHUNK_ROWS", 150)
    seen = []
    synthetic.write_dataset(tmp_path, 501, 2, seed=5, test_rows=100, progress=seen.append)
    assert seen == [150, 251, 401, 501, 601]
    names = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    assert names == ["test/part-0.txt", "train/part-0.txt", "train/part-1.txt"]
    assert_same(read_whole([tmp_path / names[1]]), synthetic.synthetic_samples(251, 5, 0))
    assert_same(read_whole([tmp_path / names[2]]), synthetic.synthetic_samples(250, 5, 1))
    held_out = synthetic.synthetic_samples(100, 5, synthetic.TEST_PART)
    assert_same(read_whole([tmp_path / names[0]]), held_out)


def test_labels_follow_the_teacher():
    samples = synthetic.synthetic_samples(40_000, 0)
    probs = synthetic.teacher_probability(samples, 0)
    sigma = np.sqrt(np.sum(probs * (1 - probs)))
    assert abs(np.sum(samples.labels - probs)) < 4 * sigma
    rare, common = probs < 0.1, probs > 0.6
    assert abs(samples.labels[rare].mean() - probs[rare].mean()) < 0.02
    assert abs(samples.labels[common].mean() - probs[common].mean()) < 0.02
    assert auc(probs, samples.labels) > 0.80
    other = synthetic.teacher_probability(samples, 1)
    assert auc(other, samples.labels) < 0.75


def test_teacher_uses_dense_and_sparse_inputs():
    samples = synthetic.synthetic_samples(20_000, 0)
    whole = auc(synthetic.teacher_probability(samples, 0), samples.labels)
    no_dense = samples._replace(dense=np.zeros_like(samples.dense))
    no_ids = samples._replace(ids=np.zeros_like(samples.ids))
    assert auc(synthetic.teacher_probability(no_dense, 0), samples.labels) < whole - 0.02
    assert auc(synthetic.teacher_probability(no_ids, 0), samples.labels) < whole - 0.02


def test_columns_look_like_criteo():
    samples = synthetic.synthetic_samples(20_000, 2)
    above = (samples.dense > 1.0).mean(axis=0) / (1 - synthetic.BLANK_SHARE)
    assert np.all((above > 0.03) & (above < 0.07))
    counts = [np.sort(np.unique(column, return_counts=True)[1])[::-1] for column in samples.ids.T]
    assert counts[-1].size > 3000
    assert counts[0].size <= 4
    assert 1.5 < counts[-1][0] / counts[-1][1] < 2.5  # Zipf: the second half as often as the first


def test_another_process_generates_the_same():
    program = (
        "import zlib; from mpifleet.data import criteo_synthetic as s;"
        "print([zlib.crc32(a.tobytes()) for a in s.synthetic_samples(300, 9, 4)])"
    )
    here = [zlib.crc32(array.tobytes()) for array in synthetic.synthetic_samples(300, 9, 4)]
    for hash_seed in ("1", "2"):
        there = subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert there.stdout.strip() == str(here)


def test_command_line(tmp_path, capsys):
    arguments = ["--rows", "50", "--test-rows", "10", "--files", "3", "--out", str(tmp_path)]
    assert synthetic.main(arguments) == 0
    assert len(list((tmp_path / "train").iterdir())) == 3
    assert "60 of 60 rows" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        synthetic.main(["--rows", "0", "--out", str(tmp_path)])
    assert "rows=0" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="files=9"):
        synthetic.write_dataset(tmp_path, 3, 9, seed=0)


def auc(probs, labels):
    metric = AUC()
    metric.update(probs, labels)
    return metric.compute()
