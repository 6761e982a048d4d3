"""Hubs and lifelines without MPI: each rank a plain process, or a bare socket that plays one."""

from __future__ import annotations

import json
import socket
import time

import pytest

from mpifleet.lifeline import listen_host
from mpifleet.lifeline.wire import MAX_MESSAGE_BYTES, Messages, ProtocolError, encode
from tests.unit.lifeline_programs import LIMIT_S, Player, hub_of


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


def test_a_told_failure_comes_before_the_death_that_follows(program):
    hub, address = hub_of(program, 3)
    first, second = Player(address, 1), Player(address, 2)
    first.until("welcome")
    first.sock.sendall(encode(kind="fail", status=5, text="failed: E: x"))
    first.sock.close()
    assert second.until("end")["text"] == "rank 1 (server 0) failed: E: x"
    second.sock.close()
    assert hub.end() == (5, ["mpifleet: rank 1 (server 0) failed: E: x"] * 2)


def test_who_comes_while_the_job_ends_is_told_why(program):
    hub, address = hub_of(program, 3)
    first = Player(address, 1)
    first.sock.sendall(encode(kind="fail", status=5, text="failed: E: x"))
    text = first.until("end")["text"]
    first.sock.close()
    assert Player(address, 2).until("end")["text"] == text == "rank 1 (server 0) failed: E: x"
    assert hub.end()[0] == 5


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
    hub, address = hub_of(program, 2, then="time.sleep(0.5); line.goodbye()")
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
