"""Log files of ranks, written by processes of their own."""

from __future__ import annotations

import subprocess
import sys

WRITE = """
import ctypes, os, sys
from mpifleet.ranklog import redirect
print("before")
voice = redirect(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
print("python out")
print("python err", file=sys.stderr)
os.write(1, b"raw out\\n")
os.system("echo child out")
ctypes.CDLL(None).puts(b"c out")
ctypes.CDLL(None).fflush(None)
if len(sys.argv) > 5:
    from mpifleet.lifeline.ending import end_process
    print("unflushed")
    voice.say("last words")
    end_process(3, voice)
"""
PRINTED = ["python out", "python err", "raw out", "child out", "c out"]


def written(folder, *arguments):
    """(finished process, lines of the only log) of a program that logs to `folder`."""
    done = subprocess.run(
        [sys.executable, "-c", WRITE, *map(str, arguments[:3]), str(folder), *arguments[3:]],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    (log,) = folder.iterdir()
    return done, log.name, log.read_text().splitlines()


def test_a_server_writes_to_its_log_only(tmp_path):
    done, name, lines = written(tmp_path, "server", 2, 5)
    assert name == "serverlog.2"
    assert sorted(lines) == sorted(PRINTED)
    assert (done.returncode, done.stdout, done.stderr) == (0, "before\n", "")


def test_rank_0_stays_on_the_terminal_too(tmp_path):
    done, name, lines = written(tmp_path, "worker", 0, 0)
    assert name == "workerlog.0"
    assert sorted(lines) == sorted(PRINTED)
    printed_out = [line for line in PRINTED if line != "python err"]
    assert sorted(done.stdout.splitlines()) == sorted(["before", *printed_out])
    assert done.stderr == "python err\n"


def test_the_folder_is_made_and_the_file_begun_anew(tmp_path):
    folder = tmp_path / "a" / "b"
    written(folder, "worker", 1, 1)
    _, _, lines = written(folder, "worker", 1, 1)
    assert sorted(lines) == sorted(PRINTED)


def test_last_words_reach_log_and_launcher(tmp_path):
    done, _, lines = written(tmp_path / "1", "worker", 1, 1, "fail")
    assert done.returncode == 3
    assert done.stderr == "mpifleet: last words\n"
    assert "mpifleet: last words" in lines
    assert "unflushed" in lines
    done, _, lines = written(tmp_path / "0", "worker", 0, 0, "fail")
    assert done.returncode == 3
    assert "mpifleet: last words" in done.stderr.splitlines()
    assert "unflushed" in done.stdout
    assert any(line.endswith("mpifleet: last words") for line in lines), "after a line cut short"
