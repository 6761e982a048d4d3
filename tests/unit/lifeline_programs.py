"""What tests of the lifeline start: a hub in a process, and bare sockets that play ranks."""

from __future__ import annotations

import socket
import subprocess
import sys
import textwrap
import time

from mpifleet.lifeline.wire import Address, Messages, encode

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
    """A hub of `size` ranks in a process of its own, and its address."""
    hub = program(HUB + then, size, report_s, end_s)
    host, port, token = hub.line().split()
    return hub, Address(host, int(port), token)
