"""The click-through benchmark: what is compared, what counts as disturbed, how jobs are ended."""

import json
import os
import subprocess
import sys
import time

import pytest

from benchmarks import ctr, ctr_auc, ctr_job, ctr_runs
from benchmarks.ctr_data import CtrData
from benchmarks.ctr_runs import Job
from benchmarks.quiet import Busy

ROOFS = {"dense_bf16": 6e-6, "dense_fp32": 26e-6, "sparse": 1e-6, "server": 3e-6}
BURN = "import time\nwhile time.process_time() < 1.0: pass"


def results(ours, one_thread, two_threads, others=0.0):
    rates = {
        "async 2 workers bf16": ours,
        f"{ctr.PADDLE}, 1 thread": one_thread,
        f"{ctr.PADDLE}, 2 threads": two_threads,
    }
    return {
        **{name: {"samples_per_s": rate, "others_share": others} for name, rate in rates.items()},
        "roofs": {**ROOFS, "others_share": others},
    }


def test_the_peer_has_its_better_number_of_threads_and_the_bound_is_of_two_cores(monkeypatch):
    monkeypatch.setattr(ctr, "has_bf16", lambda: True)
    rounds = [results(180e3, 10e3, 12e3), results(150e3, 15e3, 14e3), results(1e3, 99e3, 1e3)]
    figures = {(f.name, f.against): f for f in ctr.rate_figures(rounds)}
    ours = figures["async 2 workers bf16", ctr.PADDLE]
    assert (ours.value, ours.ratio, ours.met) == (150e3, 10.0, False)
    bound = figures["async 2 workers bf16", "bound bf16"]
    assert (bound.ratio, bound.met) == (0.75, False)
    assert figures["bound bf16", None].value == pytest.approx(200e3)


def test_without_bf16_units_its_goals_are_only_reported(monkeypatch):
    monkeypatch.setattr(ctr, "has_bf16", lambda: False)
    figures = ctr.rate_figures([results(1e3, 10e3, 12e3)])
    met = {(f.name, f.against): f.met for f in figures}
    assert met["async 2 workers bf16", ctr.PADDLE] is None
    assert met["async 2 workers bf16", "bound bf16"] is False


def test_what_was_not_measured_is_not_compared():
    figures = ctr.rate_figures([{"plain torch fp32": {"samples_per_s": 1.0, "others_share": 0.0}}])
    assert [(f.name, f.against) for f in figures] == [("plain torch fp32", None)]


def test_the_least_disturbed_run_is_taken(monkeypatch):
    shares = iter([0.5, 0.2, 0.4, 0.0])
    monkeypatch.setattr(ctr, "run", lambda *_: {"others_share": next(shares)})
    assert ctr.least_disturbed(Job("job"), CtrData(None), 3) == {"others_share": 0.2}
    assert next(shares) == 0.0


def test_every_comparison_names_what_is_run():
    jobs = {*ctr.JOBS, *ctr.PEER_JOBS, ctr.PADDLE, "bound bf16", "bound fp32"}
    assert {name for asked in ctr.ASKED for name in (asked.name, asked.against)} <= jobs
    areas = {*ctr_auc.JOBS, ctr_auc.TEACHER}
    assert {name for asked in ctr_auc.ASKED for name in (asked.name, asked.against)} <= areas
    for job in (*ctr.JOBS.values(), *ctr_auc.JOBS.values()):
        if job.kind == "job":
            ctr_job.parse([*job.arguments, "--data", "d", "--out", "o"])


def test_the_largest_difference_counts():
    areas = {"async 1 worker bf16": [0.8, 0.7985, 0.8], "one process bf16": [0.8004, 0.8, 0.8]}
    (figure,) = ctr_auc.compared(areas)
    assert (figure.value, figure.ratio, figure.met) == (0.8, -0.0015, False)


def test_a_peer_runs_in_its_own_environment(tmp_path):
    command = Job("paddle", ("--threads", "2")).command(CtrData(tmp_path), tmp_path / "out")
    assert command[0] == str(ctr_runs.PEERS / "bin" / "python")
    assert "--server_num=1" in command
    assert command[-2:] == ["--threads", "2"]
    assert "PYTHONPATH" not in Job("paddle").environment()


def test_what_servers_say_about_lag_is_found():
    said = "mpifleet: rank 2 (server 0): {}: DENSE p50 0, p90 1, max 4 of 9 pushes; ROWS {}\n"
    text = said.format("a", "p50 1, p90 2, max 3 of 9 pushes") + said.format("b", "no push")
    assert ctr_runs.lags_in(text * 2) == {
        "dense p90": 1,
        "dense most": 4,
        "rows p90": 2,
        "rows most": 3,
    }


@pytest.mark.timeout(60)
def test_a_job_that_hangs_after_its_figures_is_ended(monkeypatch, tmp_path):
    code = (
        "import sys, time, pathlib\npathlib.Path(sys.argv[1]).write_text('{\"auc\": 0.5}')\n"
        "time.sleep(300)"
    )
    monkeypatch.setattr(ctr_runs, "ENDING_S", 0.5)
    monkeypatch.setattr(Job, "command", lambda *given: [sys.executable, "-c", code, given[-1]])
    begin = time.monotonic()
    result = ctr_runs.run(Job("job"), CtrData(tmp_path), quiet=False)
    assert result["auc"] == 0.5
    assert time.monotonic() - begin < 30


@pytest.mark.timeout(60)
def test_a_job_without_figures_is_an_error_with_its_words(monkeypatch, tmp_path):
    code = "print('no such mode')"
    monkeypatch.setattr(Job, "command", lambda *_: [sys.executable, "-c", code])
    with pytest.raises(ctr_runs.RunError, match="no such mode"):
        ctr_runs.run(Job("job"), CtrData(tmp_path), quiet=False)


@pytest.mark.timeout(60)
def test_a_childs_time_is_not_that_of_others():
    inside, outside = Busy(os.getpid()), Busy(1 << 22)
    begin = time.monotonic()
    subprocess.run([sys.executable, "-c", BURN], check=True)
    cores = (os.cpu_count() or 1) * (time.monotonic() - begin)
    assert outside.others_share() - inside.others_share() > 0.8 / cores


@pytest.mark.timeout(110)
def test_one_process_trains_and_writes_its_figures(tmp_path):
    from benchmarks import ctr_data, multislot
    from mpifleet.data.criteo_synthetic import synthetic_samples

    data = CtrData(tmp_path)
    for name, rows, part in (("train", 2000, 0), ("test", 1000, 1)):
        ctr_data._write(data, name, synthetic_samples(rows, 0, part))
    out = tmp_path / "out.json"
    read = {}
    for source in ("memory", "text"):
        options = ["--source", source, "--auc", "--batch-size", "500"]
        command = [sys.executable, "-m", "benchmarks.ctr_job", *options]
        command += ["--data", str(tmp_path), "--out", str(out)]
        subprocess.run(command, check=True, timeout=60, cwd=ctr_runs.ROOT)
        read[source] = json.loads(out.read_text())
        assert read[source]["samples"] == 2000
        assert set(read[source]["split_ms"]) > {"forward", "backward"}
    assert multislot.LINE_NUMBERS == 68
    assert read["memory"]["auc"] == read["text"]["auc"]
