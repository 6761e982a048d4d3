"""Rank 0's end of all lifelines: hears every rank, and announces the end of a failing job."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import selectors
import socket
import threading
import time
import traceback
from dataclasses import dataclass, field
from typing import Any

from mpifleet.lifeline.ending import Voice, end_process
from mpifleet.lifeline.stop_agreement import AGREED_TEXT, StopAgreement
from mpifleet.lifeline.wire import Address, Messages, ProtocolError, encode

BEAT_S = 1.0
# A rank that got a signal is believed to be ended by the launcher for another rank's sake until
# no death is known after this time.  Shorter than the second that mpirun waits before SIGKILL.
SETTLE_S = 0.4
# How long the hub waits for the others to end before its last words; within the same second.
LINGER_S = 0.4
HELLO_S = 10.0
LEAVE_S = 1.0


@dataclass
class _Rank:
    """One connection; rank is None until its hello."""

    sock: socket.socket
    heard_s: float
    messages: Messages = field(default_factory=Messages)
    rank: int | None = None
    role: str = ""
    node: str = ""
    place: str = ""
    pid: int = 0
    signalled: bool = False
    said_goodbye: bool = False

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.role})"


class Hub:
    """Listens on rank 0.  Call open() there, broadcast .address, then connect every rank to it.

    The first hello that counts is rank 0's: it brings the size of the job and the two limits.
    """

    def __init__(self, listener: socket.socket, host: str) -> None:
        self.address = Address(host, listener.getsockname()[1], secrets.token_hex(16))
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ)
        self._ranks: dict[int, _Rank] = {}
        self._come: set[int] = set()  # ranks that ever said hello
        self._strangers: list[_Rank] = []
        self._size: int | None = None
        self._left: list[int] = []  # whose scripts are at their end; told to who comes later
        self._stall_report_s = self._stall_end_s = float("inf")
        self._beaten_s = self._reported_s = self._turned_s = time.monotonic()
        self._waiting: tuple[float, int, str] | None = None  # a signal: (until, status, text)
        self._end: tuple[float, int, str] | None = None  # (until, status, text)
        self._farewell = b""  # what ranks are told at the end
        self.voice = Voice()
        self._stops = StopAgreement()
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mpifleet-hub", daemon=True)

    @classmethod
    def open(cls, host: str) -> Hub:
        """Listen on `host` and a free port, and serve from a daemon thread.

        Raises OSError when the host is not an address of this machine.
        """
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, 0), family=family, backlog=1024)
        listener.setblocking(False)
        hub = cls(listener, host)
        hub._thread.start()
        return hub

    def wait_leaving(self) -> None:
        """Wait until the others know that rank 0 leaves in order; at most LEAVE_S.

        Were its process gone first, they would take it for dead.
        """
        self._leaving.wait(LEAVE_S)

    def close_in_child(self) -> None:
        """In a forked child: let go of every connection, so that its end is still seen."""
        for rank in (*self._ranks.values(), *self._strangers):
            rank.sock.close()
        self._listener.close()

    def _run(self) -> None:
        try:
            while True:
                self._turn()
        except Exception:
            # A bug here must not look like the death of rank 0: tell the ranks to do without.
            traceback.print_exc()
            self._tell_all(encode(kind="leaving"))

    def _turn(self) -> None:
        for key, _ in self._selector.select(self._patience_s()):
            if key.fileobj is self._listener:
                self._accept()
            else:
                self._receive(key.data)
        now_s, before_s = time.monotonic(), self._turned_s
        self._turned_s = now_s
        if now_s - before_s > 5 * BEAT_S:
            # This process itself was stopped: what it did not hear then tells nothing.
            for rank in self._ranks.values():
                rank.heard_s += now_s - before_s
        if self._end is not None:
            self._finish(now_s, *self._end)
            return
        if self._waiting is not None and now_s >= self._waiting[0]:
            self._announce(*self._waiting[1:])
        if now_s - self._beaten_s >= BEAT_S:
            self._beaten_s = now_s
            self._tell_all(encode(kind="beat"))
            self._look_for_silence(now_s)

    def _patience_s(self) -> float:
        return 0.02 if self._end or self._waiting else BEAT_S / 2

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            sock.setblocking(False)
            stranger = _Rank(sock, time.monotonic())
            self._strangers.append(stranger)
            self._selector.register(sock, selectors.EVENT_READ, stranger)

    def _receive(self, rank: _Rank) -> None:
        try:
            received = rank.sock.recv(65536)
            for message in rank.messages.feed(received):
                rank.heard_s = time.monotonic()
                self._act(rank, message)
        except BlockingIOError:
            return
        except (OSError, ProtocolError, KeyError, TypeError):
            received = b""
        if not received:
            self._lost(rank)

    def _act(self, rank: _Rank, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if rank.rank is None:
            self._greet(rank, message)
        elif kind == "patience":
            if rank.rank == 0:
                self._stall_report_s, self._stall_end_s = message["report_s"], message["end_s"]
        elif kind.startswith("stop_"):
            for answer in self._stops.hear(rank.rank, message):
                self._tell_all(encode(**answer))
                if answer["kind"] == "stop_agreed":
                    self.voice.say(AGREED_TEXT.format(answer["text"]))
        elif kind == "left":
            self._left.append(rank.rank)
            self._tell_all(encode(kind="left", ranks=[rank.rank]))
        elif kind == "goodbye":
            rank.said_goodbye = True
            if rank.rank == 0:
                self._tell_all(encode(kind="leaving"))
                self._leaving.set()
        elif kind == "fail":
            self._announce(message["status"], f"{rank.name} {message['text']}")
        elif kind == "signal":
            rank.signalled = True
            if self._waiting is None:
                until_s = time.monotonic() + SETTLE_S
                self._waiting = (until_s, message["status"], f"{rank.name} {message['text']}")

    def _greet(self, stranger: _Rank, hello: dict[str, Any]) -> None:
        if not hmac.compare_digest(str(hello["token"]).encode(), self.address.token.encode()):
            raise ProtocolError("wrong token")
        stranger.role, stranger.node = hello["role"], hello["node"]
        stranger.place, stranger.pid = hello["place"], hello["pid"]
        if hello["rank"] in self._ranks:
            raise ProtocolError(f"rank {hello['rank']} is here already")
        stranger.rank = hello["rank"]
        self._strangers.remove(stranger)
        self._ranks[hello["rank"]] = stranger
        self._come.add(hello["rank"])
        if stranger.rank == 0:
            self._size = hello["size"]
            self._stall_report_s, self._stall_end_s = hello["stall_report_s"], hello["stall_end_s"]
        if self._end is not None:
            self._tell(stranger, self._farewell)  # it came while the job was ending
        elif len(self._ranks) == self._size:
            self._welcome()

    def _welcome(self) -> None:
        """All are here: nobody else may come; tell each what it needs should rank 0 be lost."""
        self._selector.unregister(self._listener)
        self._listener.close()
        root, nodes = self._ranks[0], set()
        for number in sorted(self._ranks):
            rank = self._ranks[number]
            speaks = number == 1 or (number > 0 and rank.node not in nodes)
            nodes.add(rank.node)
            pid = root.pid if rank.place == root.place else 0
            facts = {"speaks": speaks, "hub_node": root.node, "hub_pid": pid, "left": self._left}
            self._tell(rank, encode(kind="welcome", **facts))

    def _lost(self, rank: _Rank) -> None:
        self._selector.unregister(rank.sock)
        rank.sock.close()
        if rank.rank is None:
            self._strangers.remove(rank)
            return
        del self._ranks[rank.rank]
        if not rank.said_goodbye and not rank.signalled:
            self._announce(1, f"{rank.name} on {rank.node} died")

    def _look_for_silence(self, now_s: float) -> None:
        for stranger in [s for s in self._strangers if now_s - s.heard_s > HELLO_S]:
            self._lost(stranger)
        watched = [r for r in self._ranks.values() if not r.said_goodbye and r.rank != 0]
        silent = [r for r in watched if now_s - r.heard_s >= self._stall_report_s]
        if not silent:
            return
        silent.sort(key=lambda r: r.rank or 0)
        names = ", ".join(f"{r.name} on {r.node}" for r in silent)
        longest_s = max(now_s - r.heard_s for r in silent)
        if longest_s >= self._stall_end_s:
            self._announce(1, f"{names} silent for {longest_s:.0f} s", stalled=silent)
        elif now_s - self._reported_s >= self._stall_report_s:
            self._reported_s = now_s
            self.voice.say(
                f"no sign of life for {longest_s:.0f} s from {names}; "
                f"the job ends at {self._stall_end_s:.0f} s"
            )

    def _announce(self, status: int, text: str, stalled: list[_Rank] | None = None) -> None:
        """Say why the job ends, at once, because the launcher may kill this process any moment."""
        if self._end is not None:
            return
        self.voice.say(text)
        kill = [[rank.place, rank.pid] for rank in stalled or ()]
        self._end = (time.monotonic() + LINGER_S, status, text)
        self._farewell = encode(kind="end", status=status, text=text, stall=bool(kill), kill=kill)
        self._tell_all(self._farewell)

    def _finish(self, now_s: float, until_s: float, status: int, text: str) -> None:
        # A rank whose hello is still on its way would take the end of this process for a death.
        all_told = len(self._come) == self._size
        if now_s >= until_s or (all_told and not any(number != 0 for number in self._ranks)):
            self.voice.flush()
            self.voice.say_last(text)
            end_process(status, self.voice)

    def _tell_all(self, message: bytes) -> None:
        for rank in self._ranks.values():
            self._tell(rank, message)

    def _tell(self, rank: _Rank, message: bytes) -> None:
        # A rank that is gone or does not read is noticed by its end of file or its silence.
        with contextlib.suppress(OSError):
            rank.sock.send(message)
