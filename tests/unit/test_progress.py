"""What a pass over batches says of itself, on a terminal and where there is none."""

import os
import pty
import re
import subprocess
import sys
import threading

import pytest

from mpifleet import progress
from mpifleet.progress import TrainProgress
from mpifleet.step_clock import StepClock
from tests.python_process import ROOT


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


def test_the_count_stops_at_what_there_is(capsys):
    shown = TrainProgress("epoch 0", total=8, num_workers=2, at_most=8)
    list(shown.over([[0] * 3, [0] * 3]))
    assert capsys.readouterr().err.startswith("epoch 0: 8 samples, ")


def test_the_end_names_the_longest_phases(capsys):
    clock = StepClock()
    for _ in TrainProgress("epoch 0", clock=clock).over([[1], [2]]):
        clock.enter("forward")
        clock.end_step()
    line = capsys.readouterr().err
    assert re.search(r", done in \d+\.\d s; step \d+\.\d\d ms: \w+ \d+ %(, \w+ \d+ %)?\n$", line), (
        line
    )
    assert line.count("\n") == 1


def test_without_a_step_no_phase_is_named(capsys):
    list(TrainProgress("epoch 0", clock=StepClock()).over([[1]]))
    assert "step" not in capsys.readouterr().err


TERMINAL_PROGRAM = """
import time
from mpifleet.progress import TrainProgress
from mpifleet.step_clock import StepClock
clock = StepClock()
shown = TrainProgress("epoch 0", 80_000, clock=clock)
for _ in shown.over([1_000] * 80, size=lambda number: number):
    clock.enter("forward")
    time.sleep(0.005)
    clock.enter("backward")
    time.sleep(0.005)
    clock.end_step()
    shown.loss = 0.5432
"""


def on_terminal(columns: int) -> list[str]:
    """What TERMINAL_PROGRAM shows on a terminal so wide, picture by picture, and its last line."""
    master, slave = pty.openpty()
    chunks: list[bytes] = []

    def read() -> None:
        try:
            while chunk := os.read(master, 65536):
                chunks.append(chunk)
        except OSError:  # Linux says so where the other side is closed
            pass

    reader = threading.Thread(target=read, daemon=True)
    environ = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": str(columns), "TERM": "xterm"}
    try:
        program = [sys.executable, "-c", TERMINAL_PROGRAM]
        with subprocess.Popen(program, stderr=slave, env=environ) as process:
            os.close(slave)
            reader.start()
            assert process.wait(60) == 0
        reader.join(10)
    finally:
        os.close(master)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", b"".join(chunks).decode())
    return [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.strip()]


@pytest.mark.parametrize(("columns", "phases"), [(60, False), (80, False), (120, True)])
def test_a_terminal_keeps_title_bar_rate_and_time_left(columns, phases):
    *pictures, last = on_terminal(columns)
    pictures = [line for line in pictures if "samples/s" in line]
    assert len(pictures) > 3
    for line in pictures:
        assert len(line) <= columns
        assert re.match(r"epoch 0 [━╸╺]{10,} .*\d samples/s, loss .* [\d-]:[\d-]+:[\d-]+$", line), (
            line
        )
        assert ("step" in line) == phases, line
        assert bool(re.search(r"\d samples,", line)) == (columns > 60), line
    assert re.fullmatch(
        r"epoch 0: 80,000 samples, [\d,]+ samples/s, loss 0\.5432, done in \d\.\d s; "
        r"step \d+\.\d\d ms: forward \d+ %, backward \d+ %",
        last,
    ), last
