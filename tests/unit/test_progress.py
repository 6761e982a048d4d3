"""What a pass over batches says of itself where there is no terminal."""

import re

import pytest

from mpifleet import progress
from mpifleet.progress import TrainProgress


def test_samples_of_all_workers_are_counted(capsys):
    shown = TrainProgress("epoch 3", total=40, num_workers=2)
    batches = [[0] * 5, [0] * 5, [0] * 3]
    seen = []
    for batch in shown.over(batches):
        seen.append(batch)
        shown.loss = 0.25
    assert seen == batches
    line = capsys.readouterr().err
    pattern = r"epoch 3: 26 samples, [\d,]+ samples/s, loss 0\.2500, done in \d+\.\d s\n"
    assert re.fullmatch(pattern, line), line


def test_time_left_is_told_every_few_seconds(capsys, monkeypatch):
    monkeypatch.setattr(progress, "PLAIN_EVERY_S", -1.0)
    for _ in TrainProgress("epoch 0", total=8).over([1, 2, 3], size=lambda batch: batch):
        pass
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    assert all(" s left" in line for line in lines[:3])


@pytest.mark.parametrize("total", [None, 5])
def test_an_invisible_pass_is_silent(capsys, total):
    assert list(TrainProgress("x", total, visible=False).over([[1], [2]])) == [[1], [2]]
    assert capsys.readouterr() == ("", "")
