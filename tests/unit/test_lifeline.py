"""Hubs and lifelines without MPI: each rank a plain process, or a bare socket that plays one."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from mpifleet.lifeline import listen_host
from mpifleet.lifeline.hooks import describe
from mpifleet.lifeline.segments import RankSegments, is_segment, unlink_segments
from mpifleet.lifeline.wire import MAX_MESSAGE_BYTES, Address, Messages, ProtocolError, encode

LIMIT_S = 20

HUB = """
import os, sys, threading, time
from mpifleet.lifeline import Hub, Lifeline, install_excepthook
size = int(sys.argv[1])
hub = Hub.open("127.0.0.1")
print(*hub.address, flush=True)
line = Lifeline.connect(
    hub.address, rank=0, size=size, role="worker 0", roles=["worker 0"] + ["server"] * size,
    stall_report_s=float(sys.argv[2]), stall_end_s=float(sys.argv[3]), hub=hub,
)
"""
ALONE = """
import os, signal, sys, threading, time
from mpifleet.lifeline import Lifeline, install_excepthook
line = Lifeline.connect(None, rank=0, size=1, role="worker 0", roles=["worker 0"])
"""


class Program:
    """A Python program under test, killed after the test if it still runs."""

    def __init__(self, code: str, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", textwrap.dedent(code), *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def end(self) -> tuple[int, list[str]]:
        """(exit status, lines of stderr) at its end."""
        _, err = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, err.splitlines()


@pytest.fixture
def program():
    started = []

    def start(code, *arguments):
        started.append(Program(code, *arguments))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.communicate()


class Player:
    """A bare socket that plays one rank."""

    def __init__(self, address: Address, rank: int, **changes: object) -> None:
        self.sock = socket.create_connection((address.host, address.port), LIMIT_S)
        hello = {
            "kind": "hello",
            "token": address.token,
            "rank": rank,
            "size": 0,
            "role": f"server {rank - 1}",
            "node": f"node{rank % 3}",
            "place": "elsewhere",
            "pid": 0,
            "stall_report_s": 0,
            "stall_end_s": 0,
        }
        self.sock.sendall(encode(**{**hello, **changes}))
        self._messages = Messages()

    def until(self, kind: str) -> dict:
        """The next message of that kind; fails when the hub closes instead."""
        until_s = time.monotonic() + LIMIT_S
        while time.monotonic() < until_s:
            received = self.sock.recv(65536)
            assert received, f"closed before {kind!r}"
            for message in self._messages.feed(received):
                if message["kind"] == kind:
                    return message
        raise AssertionError(f"no {kind!r} message")


def hub_of(program, size, report_s=60, end_s=600, then="time.sleep(600)"):
    hub = program(HUB + then, size, report_s, end_s)
    host, port, token = hub.line().split()
    return hub, Address(host, int(port), token)


def test_a_lost_rank_of_three_hundred_ends_all_within_seconds(program):
    hub, address = hub_of(program, 300)
    players = [Player(address, rank) for rank in range(1, 300)]
    for player in players:
        player.until("welcome")
    began_s = time.monotonic()
    players[149].sock.close()
    text = "rank 150 (server 149) on node0 died"
    for player in players[:149] + players[150:]:
        assert player.until("end")["text"] == text
        player.sock.close()
    status, err = hub.end()
    assert time.monotonic() - began_s < 5.0
    assert status == 1
    assert err[-1] == f"mpifleet: {text}"


def test_a_rank_that_said_goodbye_may_go(program):
    hub, address = hub_of(program, 3, then="time.sleep(3); line.goodbye()")
    first, second = Player(address, 1), Player(address, 2)
    first.until("welcome")
    first.sock.sendall(encode(kind="goodbye"))
    first.sock.close()
    second.until("leaving")
    second.sock.sendall(encode(kind="goodbye"))
    assert hub.end() == (0, [])


def test_who_comes_last_learns_who_has_left_already(program):
    hub, address = hub_of(program, 3)
    first = Player(address, 1)
    first.sock.sendall(encode(kind="left"))
    time.sleep(0.3)
    last = Player(address, 2)
    assert last.until("welcome")["left"] == [1]
    first.sock.sendall(encode(kind="fail", status=3, text="failed"))
    hub.end()


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


def test_a_told_failure_comes_before_the_death_that_follows(program):
    hub, address = hub_of(program, 3)
    first, second = Player(address, 1), Player(address, 2)
    first.until("welcome")
    first.sock.sendall(encode(kind="fail", status=5, text="failed: E: x"))
    first.sock.close()
    assert second.until("end")["text"] == "rank 1 (server 0) failed: E: x"
    second.sock.close()
    assert hub.end() == (5, ["mpifleet: rank 1 (server 0) failed: E: x"] * 2)


def test_a_death_explains_the_signals_that_the_launcher_sends_after_it(program):
    hub, address = hub_of(program, 3)
    first, second = Player(address, 1), Player(address, 2)
    first.until("welcome")
    first.sock.sendall(encode(kind="signal", status=143, text="got SIGTERM"))
    second.sock.close()
    assert first.until("end")["text"] == "rank 2 (server 1) on node2 died"
    hub.process.kill()


def test_a_silent_rank_is_reported_then_ended(program):
    hub, address = hub_of(program, 3, report_s=1.5, end_s=4)
    first, second = Player(address, 1), Player(address, 2)
    began_s = time.monotonic()
    while True:  # rank 2 beats, rank 1 does not
        second.sock.sendall(encode(kind="beat"))
        second.sock.settimeout(0.5)
        try:
            end = second.until("end")
            break
        except TimeoutError:
            assert time.monotonic() - began_s < LIMIT_S
    second.sock.close()
    first.sock.close()
    status, err = hub.end()
    assert end["text"].startswith("rank 1 (server 0) on node1 silent for 4")
    assert end["kill"] == [["elsewhere", 0]]
    assert any("no sign of life for" in line and "rank 1 (server 0)" in line for line in err)
    assert not any("rank 2" in line for line in err)
    assert (status, err[-1]) == (1, f"mpifleet: {end['text']}")


@pytest.mark.parametrize(
    "bytes_sent",
    [
        b"GET / HTTP/1.0\r\n\r\n",
        b"[]\n",
        b'{"kind": "hello"}\n',
        b'{"kind": "fail", "status": 1, "text": "x"}\n',
        b"x" * (MAX_MESSAGE_BYTES + 1),
    ],
)
def test_strangers_are_shown_out_and_change_nothing(program, bytes_sent):
    hub, address = hub_of(program, 2, then="time.sleep(2); line.goodbye()")
    stranger = socket.create_connection((address.host, address.port), LIMIT_S)
    stranger.sendall(bytes_sent)
    assert stranger.recv(1) == b""
    player = Player(address, 1)
    player.until("welcome")
    player.sock.sendall(encode(kind="goodbye"))
    assert hub.end() == (0, [])


def test_a_wrong_token_or_a_taken_rank_is_shown_out(program):
    hub, address = hub_of(program, 3)
    first = Player(address, 1)
    for stranger in (Player(address, 2, token="0" * 32), Player(address, 1)):
        stranger.sock.settimeout(LIMIT_S)
        with pytest.raises((AssertionError, ConnectionResetError)):
            stranger.until("welcome")
    second = Player(address, 2)
    first.until("welcome")
    second.until("welcome")
    hub.process.kill()


def test_a_rank_that_cannot_reach_the_hub_says_so_once_and_goes_on(program):
    code = """
    from mpifleet.lifeline import Address, Lifeline
    roles = ["worker 0", "server 0"]
    nobody = Address("127.0.0.1", 1, "t")
    line = Lifeline.connect(nobody, rank=1, size=2, role=roles[1], roles=roles)
    line.goodbye()
    """
    status, err = program(code).end()
    assert status == 0
    assert len(err) == 1
    assert "rank 1 (server 0) cannot reach rank 0 at 127.0.0.1:1" in err[0]
    assert "MPIFLEET_LIFELINE_HOST" in err[0]


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


def test_messages_are_cut_anywhere():
    sent = encode(kind="a", text="é\n") + encode(kind="b")
    messages = Messages()
    got = [message for byte in sent for message in messages.feed(bytes([byte]))]
    assert got == [{"kind": "a", "text": "é\n"}, {"kind": "b"}]


@pytest.mark.parametrize("wrong", [b"no json\n", b"7\n", json.dumps({"kind": 1}).encode() + b"\n"])
def test_what_is_no_message_is_refused(wrong):
    with pytest.raises(ProtocolError):
        list(Messages().feed(wrong))


def test_listen_host():
    assert listen_host(True, {}) == "127.0.0.1"
    assert listen_host(False, {"MPIFLEET_LIFELINE_HOST": "10.1.2.3"}) == "10.1.2.3"
    assert socket.gethostbyname(listen_host(False, {}))


def test_describe_is_one_line():
    assert describe(ValueError, ValueError("one\ntwo")) == "ValueError: one"
    assert describe(KeyboardInterrupt, KeyboardInterrupt()) == "KeyboardInterrupt"
    assert len(describe(ValueError, ValueError("x" * 9999))) < 600


def test_segments_are_known_by_name():
    for name in ("vader_segment.h.0.1f.0", "sm_segment.h.0.1f.0", "osc_sm.h.1f.0.3", "mpich_shm_x"):
        assert is_segment(f"/dev/shm/{name}")
        assert is_segment(f"/dev/shm/node/{name}")
        assert not is_segment(f"/tmp/{name}")
    for name in ("sem.mine", "torch_1_2", "psm_abc", "my_vader_segment"):
        assert not is_segment(f"/dev/shm/{name}")


def test_unlink_segments_skips_what_is_gone(tmp_path):
    here = tmp_path / "a"
    here.touch()
    assert unlink_segments([str(here), str(tmp_path / "b")]) == [str(here)]
    assert not here.exists()


def test_rank_segments_of_a_process_without_mpi():
    segments = RankSegments(2)
    assert not segments.complete
    segments.restore(0)
    assert not [path for path in segments.paths if Path(path).exists()]


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
