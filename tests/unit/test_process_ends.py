"""How one process ends: exceptions, sys.exit, signals, forked children, and its last words."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest

from mpifleet.lifeline.hooks import describe
from tests.unit.lifeline_programs import ALONE


@pytest.mark.parametrize(
    "end",
    [
        "raise ValueError('of the child')",
        "sys.exit(5)",
        "t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join(); sys.exit(5)",
    ],
)
def test_the_end_of_a_forked_child_is_not_the_ranks(program, end):
    code = f"""
if os.fork() == 0:
    {end}
_, status = os.wait()
time.sleep(0.2)
line.goodbye()
print("child", os.waitstatus_to_exitcode(status), flush=True)
"""
    parent = program(ALONE + "install_excepthook(line)\nimport atexit\n" + code)
    assert parent.line() == f"child {1 if 'raise' in end else 5}\n"
    status, errors = parent.end()
    assert status == 0
    assert not [line for line in errors if "rank 0" in line]


def test_an_exception_ends_with_traceback_then_name(program):
    status, err = program(ALONE + "install_excepthook(line)\n1/0").end()
    assert status == 1
    assert "ZeroDivisionError: division by zero" in err
    assert err[-1] == "mpifleet: rank 0 (worker 0) failed: ZeroDivisionError: division by zero"


def test_earlier_hooks_run_once_each_although_installed_twice(program):
    code = ALONE + textwrap.dedent("""
    sys.excepthook = lambda *about: print("mine", file=sys.stderr)
    install_excepthook(line)
    install_excepthook(line)
    raise KeyError("k")
    """)
    status, err = program(code).end()
    assert status == 1
    assert err[0] == "mine"
    assert set(err[1:]) == {"mpifleet: rank 0 (worker 0) failed: KeyError: 'k'"}


def test_an_exception_in_a_thread_ends_the_process(program):
    code = ALONE + textwrap.dedent("""
    install_excepthook(line)
    threading.Thread(target=lambda: 1 / 0, name="reader").start()
    time.sleep(600)
    """)
    status, err = program(code).end()
    assert status == 1
    assert err[-1].startswith("mpifleet: rank 0 (worker 0) failed in reader: ZeroDivisionError")


@pytest.mark.parametrize(
    ("leave", "status", "last"),
    [
        ("sys.exit(4)", 4, "mpifleet: rank 0 (worker 0) left with exit status 4"),
        ("sys.exit('why')", 1, "mpifleet: rank 0 (worker 0) left with exit status 1: why"),
        ("line.goodbye(); sys.exit(4)", 4, ""),
        ("sys.exit(0)", 0, ""),
        ("sys.exit()", 0, ""),
    ],
)
def test_sys_exit(program, leave, status, last):
    ended, err = program(ALONE + "install_excepthook(line)\n" + leave).end()
    assert ended == status
    assert (err[-1] if err else "") == last


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_a_signal_ends_with_its_status(program, name):
    rank = program(ALONE + "print('up'); time.sleep(600)")
    rank.line()
    rank.process.send_signal(getattr(signal, name))
    status, err = rank.end()
    assert status == 128 + getattr(signal, name)
    assert err[-1] == f"mpifleet: rank 0 (worker 0) got {name}"


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_handler_of_the_user_wins(program, when):
    theirs = "signal.signal(signal.SIGTERM, lambda *about: (print('mine'), os._exit(7)))\n"
    imports, connect = ALONE.strip().rsplit("\n", 1)
    order = [theirs, connect + "\n"] if when == "before" else [connect + "\n", theirs]
    rank = program(f"{imports}\n{''.join(order)}print('up')\ntime.sleep(600)")
    rank.line()
    rank.process.send_signal(signal.SIGTERM)
    assert rank.end() == (7, [])


def test_an_ignored_signal_stays_ignored(program):
    imports, connect = ALONE.strip().rsplit("\n", 1)
    rank = program(
        f"{imports}\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n{connect}\n"
        "print('up')\ntime.sleep(1.5); line.goodbye()"
    )
    rank.line()
    rank.process.send_signal(signal.SIGHUP)
    assert rank.end() == (0, [])


def test_a_plain_python_run_keeps_its_signals(program):
    code = ALONE.replace('roles=["worker 0"])', 'roles=["worker 0"], launched=False)')
    rank = program(code + "print('up'); time.sleep(600)")
    rank.line()
    rank.process.send_signal(signal.SIGTERM)
    assert rank.end() == (-signal.SIGTERM, [])


def test_describe_is_one_line():
    assert describe(ValueError, ValueError("one\ntwo")) == "ValueError: one"
    assert describe(KeyboardInterrupt, KeyboardInterrupt()) == "KeyboardInterrupt"
    assert len(describe(ValueError, ValueError("x" * 9999))) < 600


def test_nothing_of_the_process_is_shown_after_its_last_words():
    chatter = (
        "import os, threading, time\n"
        "from mpifleet.lifeline.ending import Voice, end_process\n"
        "def chatter():\n"
        "    while True:\n"
        "        os.write(2, b'noise\\n')\n"
        "        time.sleep(0.001)\n"
        "threading.Thread(target=chatter, daemon=True).start()\n"
        "time.sleep(0.1)\n"
        "voice = Voice()\n"
        "voice.say_last('the end')\n"
        "time.sleep(0.1)\n"
        "end_process(3, voice)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", chatter], capture_output=True, text=True, timeout=30, check=False
    )
    assert ended.returncode == 3
    assert ended.stderr.splitlines().count("noise") > 1
    assert ended.stderr.splitlines()[-1] == "mpifleet: the end"
