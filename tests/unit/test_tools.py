"""The demo's verdict, the counting of test runs, and the parts they consist of."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tools import (
    demo,
    outcomes,
    parallel_h5py,
    parts,
    prerequisites,
    processes,
    set_up,
    side_by_side,
    venvs,
)
from tools.test import main, run_parts

ROOT = Path(__file__).parents[2]
GOOD = demo.Auc("0.7900", 20000)


def part(kind: str = "mpi", ranks: int = 2) -> parts.Part:
    return parts.Part(kind, "tests/mpi", "system", ["python", "-m", "pytest"], 10, ranks)


def tally(path: Path, *records: dict) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


class TestDemo:
    def test_good_figures_pass(self):
        demo.check(GOOD, GOOD, demo.Auc("0.7949", 20000))

    @pytest.mark.parametrize(
        ("trained", "loaded", "plain", "said"),
        [
            ("0.7499", "0.7499", "0.7499", "below 0.75"),
            ("0.7900", "0.7901", "0.7900", "from the checkpoint"),
            ("0.7900", "0.7900", "0.7951", "further apart"),
        ],
    )
    def test_bad_figures_name_what_is_bad(self, trained, loaded, plain, said):
        with pytest.raises(demo.DemoError, match=said):
            demo.check(*(demo.Auc(text, 20000) for text in (trained, loaded, plain)))

    def test_another_number_of_samples_fails(self):
        with pytest.raises(demo.DemoError, match="one process"):
            demo.check(GOOD, GOOD, demo.Auc(GOOD.text, 19999))

    def test_the_last_printed_figure_counts(self):
        text = "test AUC 0.7000 (10 samples)\nnoise\ntest AUC 0.7900 (20000 samples)\n"
        assert demo.last_auc("training", text) == GOOD

    def test_no_figure_is_an_error(self):
        with pytest.raises(demo.DemoError, match=r"infer\.py printed no line"):
            demo.last_auc("infer.py", "test AUC nan (20000 samples)")

    @pytest.mark.parametrize("mpi", ["Open MPI v4.1.4", "MPICH Version:      4.1.2"])
    def test_it_ends_with_two_short_lines(self, mpi):
        lines = demo.closing(mpi, GOOD, GOOD, GOOD, 120).strip().splitlines()
        assert len(lines) == 2
        assert all(len(line) <= 100 for line in lines)
        assert (ROOT / lines[1].split()[-1]).is_file()


class TestOutcomes:
    def test_tests_are_counted_and_a_lost_one_has_failed(self, tmp_path):
        outcome = outcomes.Outcome(part())
        path = tally(
            tmp_path / "t",
            {"started": "tests/mpi/test_a.py::one"},
            {"test": "tests/mpi/test_a.py::one", "outcome": "passed", "seconds": 1, "reason": ""},
            {"started": "tests/mpi/test_b.py::two"},
            {"test": "tests/mpi/test_b.py::two", "outcome": "skipped", "seconds": 0, "reason": ""},
            {"started": "tests/mpi/test_a.py::three"},
        )
        outcomes.read_tally(outcome, path)
        outcomes.close(outcome, 1)
        assert outcome.counts == {"passed": 1, "skipped": 1, "failed": 1}
        assert outcome.ran == {"tests/mpi/test_a.py"}
        assert "tests/mpi/test_a.py::three: did not end" in outcome.notes

    def test_a_part_without_a_test_has_failed(self, tmp_path):
        outcome = outcomes.Outcome(part())
        outcomes.read_tally(outcome, tmp_path / "absent")
        outcomes.close(outcome, 0)
        assert outcome.counts["failed"] == 1

    def test_a_status_without_a_failed_test_is_a_failure(self, tmp_path):
        outcome = outcomes.Outcome(part())
        record = {"test": "x.py::y", "outcome": "passed", "seconds": 1, "reason": ""}
        outcomes.read_tally(outcome, tally(tmp_path / "t", record))
        outcomes.close(outcome, 3)
        assert outcome.counts == {"passed": 1, "failed": 1}
        assert outcome.notes == ["exit status 3"]

    def test_files_that_no_rank_count_runs(self, tmp_path):
        for name in ("test_one.py", "test_two.py"):
            (tmp_path / "tests" / "mpi").mkdir(parents=True, exist_ok=True)
            (tmp_path / "tests" / "mpi" / name).touch()
        first = outcomes.Outcome(part(ranks=1))
        second = outcomes.Outcome(part(ranks=2), ran={"tests/mpi/test_one.py"})
        untested = outcomes.files_without_a_test(tmp_path, [first, second])
        assert untested == ["tests/mpi/test_two.py"]
        text, well = outcomes.report([first, second], untested)
        assert not well
        assert text.splitlines()[-1] == "0 passed, 1 failed, 0 skipped"

    def test_what_did_not_run_is_said_and_does_not_fail(self):
        done = outcomes.Outcome(part("unit", 0))
        done.counts.update(passed=3, skipped=1)
        absent = outcomes.Outcome(part("cluster", 0), not_run="missing: srun")
        text, well = outcomes.report([done, absent], [])
        assert well
        assert "NOT RUN  tests/mpi (system): missing: srun" in text
        assert text.splitlines()[-1] == "3 passed, 0 failed, 1 skipped"


def test_the_tally_plugin_writes_what_happens(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import os, pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 0\n"
        "@pytest.mark.skip(reason='why')\ndef test_not(): pass\n"
        "@pytest.fixture\ndef torn():\n    yield\n    assert 0\n"
        "def test_torn(torn): pass\n"
        "def test_dies(): os._exit(9)\n"
    )
    path = tmp_path / "tally"
    subprocess.run(
        [sys.executable, "-m", "pytest", "-ptests.tally", "-pno:cacheprovider", "--rootdir=."],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "MPIFLEET_TEST_TALLY": str(path)},
        capture_output=True,
        timeout=60,
        check=False,
    )
    outcome = outcomes.Outcome(part("unit", 0))
    outcomes.read_tally(outcome, path)
    assert outcome.counts == {"passed": 1, "failed": 3, "skipped": 1}
    assert any("test_dies: did not end" in note for note in outcome.notes)


class TestProcesses:
    def test_ranks_keep_what_python_compiled(self, monkeypatch):
        monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        assert "PYTHONDONTWRITEBYTECODE" not in processes.environment()

    def test_output_and_status_come_back(self):
        code = "import sys; print('hello'); sys.exit(3)"
        ended = processes.run(
            [sys.executable, "-c", code], env=os.environ, limit_s=30, cwd=ROOT, quiet=True
        )
        assert (ended.status, ended.output) == (3, "hello\n")

    def test_a_command_past_its_limit_leaves_no_child(self, tmp_path):
        pid_file = tmp_path / "pid"
        script = f"sleep 50 & echo $! > {pid_file}; wait"
        begin = time.monotonic()
        ended = processes.run(["sh", "-c", script], env=os.environ, limit_s=1, cwd=ROOT, quiet=True)
        assert ended.status == processes.TIMED_OUT
        assert time.monotonic() - begin < 20
        status = Path(f"/proc/{pid_file.read_text().strip()}/status")
        assert not status.exists() or "State:\tZ" in status.read_text()

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_ending_the_program_ends_the_command(self, tmp_path, number):
        pid_file = tmp_path / "pid"
        code = (
            "import os, pathlib, signal\nfrom tools.processes import exit_on_sigterm, run\n"
            "exit_on_sigterm()\n"
            # A shell in the background has its children ignore SIGINT.
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            f"run(['sh', '-c', 'echo $$ > {pid_file}; exec sleep 50'], env=os.environ, limit_s=60,"
            " cwd=pathlib.Path('.'))"
        )
        program = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        deadline = time.monotonic() + 30
        while not (pid_file.exists() and pid_file.read_text().strip()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        child = int(pid_file.read_text())
        program.send_signal(number)
        try:
            program.communicate(timeout=30)
        finally:
            program.kill()
        assert program.returncode != 0
        assert not Path(f"/proc/{child}").exists()


class TestSideBySide:
    def tasks(self, *codes: str, limit_s: float = 20) -> list[side_by_side.Task]:
        return [side_by_side.Task(c, [sys.executable, "-c", c], os.environ, limit_s) for c in codes]

    def test_two_at_a_time_each_with_its_own_status_and_output(self, tmp_path, capsys):
        meet = "import os, time; open({!r}, 'w')\nwhile not os.path.exists({!r}): time.sleep(0.01)"
        one, two = str(tmp_path / "one"), str(tmp_path / "two")
        codes = [f"{meet.format(one, two)}\nprint('first')", f"{meet.format(two, one)}\nexit(3)"]
        tasks = self.tasks(*codes, "print('third')")
        until_s = time.monotonic() + 60
        ended = dict(side_by_side.run_side_by_side(tasks, 2, tmp_path, until_s))
        assert [ended[i].status for i in range(3)] == [0, 3, 0]
        assert (ended[0].output, ended[2].output) == ("first\n", "third\n")
        assert "\nfirst\n" in capsys.readouterr().out

    def test_no_more_than_so_many(self, tmp_path):
        alone = (
            f"import os, time; os.mkdir({str(tmp_path / 'lock')!r}); time.sleep(0.2)\n"
            f"os.rmdir({str(tmp_path / 'lock')!r})"
        )
        tasks = self.tasks(alone, alone)
        ended = list(side_by_side.run_side_by_side(tasks, 1, tmp_path, time.monotonic() + 60))
        assert [(number, how.status) for number, how in ended] == [(0, 0), (1, 0)]

    def test_the_second_lane_begins_at_the_end(self, tmp_path):
        began = tmp_path / "began"
        write = f"open({str(began)!r}, 'a').write('{{}} ')"
        wait = f"import time\nwhile 'b' not in open({str(began)!r}).read(): time.sleep(0.01)"
        codes = [f"{write.format('a')}\n{wait}", *map(write.format, "bcd")]
        tasks = self.tasks(*codes)
        list(side_by_side.run_side_by_side(tasks, 2, tmp_path, time.monotonic() + 60))
        assert began.read_text().replace("a ", "") == "d c b "

    def test_a_task_waits_for_another_and_does_not_begin_where_that_failed(self, tmp_path):
        done = str(tmp_path / "done")
        codes = [f"import time; time.sleep(0.3); open({done!r}, 'w')", "exit(3)", "pass", "pass"]
        first, bad, other, never = self.tasks(*codes)
        last = replace(first, title="last", command=[sys.executable, "-c", f"open({done!r})"])
        last, never = replace(last, after=first.title), replace(never, title="n", after=bad.title)
        tasks = [first, replace(bad, after="last"), other, never, last]
        ended = dict(side_by_side.run_side_by_side(tasks, 2, tmp_path, time.monotonic() + 60))
        assert [ended[i].status for i in range(5)] == [0, 3, 0, side_by_side.NOT_BEGUN, 0]

    def test_a_task_past_its_limit_is_ended_and_the_others_go_on(self, tmp_path):
        tasks = self.tasks("import time; time.sleep(50)", limit_s=0.5) + self.tasks("print(1)")
        ended = dict(side_by_side.run_side_by_side(tasks, 1, tmp_path, time.monotonic() + 60))
        assert ended[0].status == processes.TIMED_OUT
        assert ended[1].status == 0

    def test_what_would_begin_too_late_counts_as_timed_out(self, tmp_path):
        ended = list(side_by_side.run_side_by_side(self.tasks("print(1)"), 1, tmp_path, 0.0))
        assert [(number, how.status) for number, how in ended] == [(0, processes.TIMED_OUT)]

    def test_leaving_ends_what_runs(self, tmp_path):
        pid_file = tmp_path / "pid"
        code = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid()))\n"
        tasks = self.tasks("print(1)", code + "time.sleep(50)")
        for number, _ in side_by_side.run_side_by_side(tasks, 2, tmp_path, time.monotonic() + 60):
            assert number == 0
            while not (pid_file.exists() and pid_file.read_text()):
                time.sleep(0.01)
            break
        gc.collect()  # the generator is closed
        assert not Path(f"/proc/{pid_file.read_text()}").exists()


def test_every_part_names_tests_that_are_there():
    for each in parts.all_parts(ROOT, ROOT / ".venvs"):
        for word in each.command:
            if word.startswith("tests/"):
                assert (ROOT / word).exists(), word


def test_world_sizes_and_mpis_are_all_there():
    found = {(p.mpi, p.ranks) for p in parts.all_parts(ROOT, ROOT / ".venvs") if p.kind == "mpi"}
    assert found == {(mpi, ranks) for mpi in ("system", "wheel") for ranks in (1, 2, 3, 4)}


class TestH5pyWithMpi:
    def test_it_is_built_before_its_tests_at_all_world_sizes(self):
        build, *tests = (p for p in parts.all_parts(ROOT, ROOT / ".venvs") if p.kind == "hdf5")
        assert build.command[1:] == ["-m", "tools.set_up", "parallel"]
        assert [(p.mpi, p.ranks) for p in tests] == [("parallel", n) for n in (1, 2, 3, 4)]
        assert {p.after for p in tests} == {build.title}
        source = (ROOT / parts.CHECKPOINTS[0]).read_text()
        assert all(f"def {name}(" in source for name in parts.NOT_OF_HDF5)

    @pytest.mark.parametrize("is_built", [True, False])
    def test_without_it_they_did_not_run_and_the_rest_does(self, monkeypatch, tmp_path, is_built):
        """Nothing fails where it cannot be built."""
        monkeypatch.setattr(prerequisites, "is_ready", lambda _name: is_built)
        monkeypatch.setattr(prerequisites, "missing", lambda _programs: [])
        command = [sys.executable, "-c", f"exit({int(not is_built)})"]
        build = parts.Part("hdf5", "build", "parallel", command, 60)
        test = replace(build, name="test", command=[sys.executable, "-c", ""], after=build.title)
        other = replace(test, mpi="system", after="")
        found = run_parts([build, test, other], tmp_path, time.monotonic() + 60)
        assert ["libhdf5-openmpi-dev" in each.not_run for each in found] == [not is_built] * 2 + [
            False
        ]
        assert [sum(each.counts.values()) for each in found] == [int(is_built)] * 2 + [1]
        assert outcomes.report(found, [])[1]

    def test_what_cannot_be_built_is_said(self, monkeypatch, tmp_path, capsys):
        def fail(*_arguments, **_options):
            raise venvs.SetUpError("no compiler")

        monkeypatch.setattr(parallel_h5py, "ROOT", tmp_path)
        monkeypatch.setattr(parallel_h5py, "prepare_built", fail)
        assert set_up.main(["parallel"]) == 1
        assert "which needs libhdf5-openmpi-dev: no compiler" in capsys.readouterr().err


def test_help_lists_the_kinds(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "lint,unit,mpi,hdf5,launch,cluster" in shown


class TestDisk:
    """What an installation of torch will take is said before it, not after."""

    def prepared(self, monkeypatch, tmp_path, has_torch):
        def install(*_arguments, **_options):
            print("installing")

        python = tmp_path / ".venvs" / "x" / "bin" / "python"
        monkeypatch.setattr(venvs, "ROOT", tmp_path)
        monkeypatch.setattr(venvs, "_stamp", lambda _files, _extras: "stamp")
        monkeypatch.setattr(venvs, "_make", lambda _venv: python.parent.mkdir(parents=True) or [])
        monkeypatch.setattr(venvs, "install", install)
        absent = "" if has_torch else "no torch"
        monkeypatch.setattr(
            venvs, "_failure", lambda _venv, check: absent if check == "import torch" else ""
        )
        venvs.prepare("x", "", "import mpifleet, torch")

    def test_it_is_one_line_before_pip(self, monkeypatch, tmp_path, capsys):
        self.prepared(monkeypatch, tmp_path, has_torch=False)
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines] == ["preparing", "PyTorch", "installing"]
        assert "5 GB" in lines[1]
        assert "PIP_EXTRA_INDEX_URL" in lines[1]

    def test_it_is_not_said_where_torch_is(self, monkeypatch, tmp_path, capsys):
        self.prepared(monkeypatch, tmp_path, has_torch=True)
        assert "GB" not in capsys.readouterr().out


def test_an_unknown_kind_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--only", "unit,nothing"])
    assert "--only nothing: use some of" in capsys.readouterr().err
