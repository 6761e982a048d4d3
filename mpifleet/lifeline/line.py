"""Each rank's own end of the lifeline: beats, listens, and ends this process when told."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn

from mpifleet.lifeline.ending import Voice, end_process, kill, obey
from mpifleet.lifeline.hub import BEAT_S, SETTLE_S, Hub
from mpifleet.lifeline.signals import SignalPipe
from mpifleet.lifeline.stopping import STOPS_TEXT, Stopping
from mpifleet.lifeline.wire import Address, Messages, ProtocolError, encode, place

CONNECT_S = 10.0
ANSWER_S = 2.0
ALONE_LINGER_S = 0.3


class Lifeline:
    """Watches over one rank from a daemon thread.  Make it with connect().

    rank, roles: this rank's number, and every rank's role as words for messages ("server 0").
    voice: where last words go.  hub: rank 0's own, else None.  left: ranks whose scripts are at
    their end.
    """

    def __init__(self, rank: int, roles: Sequence[str], voice: Voice, hub: Hub | None) -> None:
        self.said_goodbye = False
        self.left: set[int] = set()
        self._rank = rank
        self._roles = tuple(roles)
        self._voice = voice
        self._hub = hub
        self._pid, self._parent = os.getpid(), os.getppid()
        self._sock: socket.socket | None = None
        self._messages = Messages()
        self._signals = SignalPipe()
        self._failure: tuple[int, str] | None = None
        self._stopping: Stopping | None = None
        self._alone_at_s = float("inf")  # when to end without an answer of the hub
        self._speaks = rank == 1
        self._hub_node, self._hub_pid, self._hub_may_leave = "", 0, False
        self._stall_report_s = self._stall_end_s = float("inf")
        self._heard_s = self._reported_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="mpifleet-lifeline", daemon=True)

    @classmethod
    def connect(
        cls,
        address: Address | None,
        *,
        rank: int,
        size: int,
        role: str,
        roles: Sequence[str],
        stall_report_s: float = 60.0,
        stall_end_s: float = 600.0,
        voice: Voice | None = None,
        hub: Hub | None = None,
        node: str | None = None,
        launched: bool = True,
    ) -> Lifeline:
        """Connect this rank to the hub and start its watchdog thread.  Called by every rank.

        address: the hub's, as broadcast; None for a job of one rank, which needs no socket.
        role: this rank's own.  stall_report_s, stall_end_s: silence after which a rank is reported,
        and the job ended.  node: name to print, the host's by default.  launched: False for a plain
        `python train.py`: neither the parent nor signals are watched then, nor signals outside the
        main thread.  Prints one warning when the hub cannot be reached; only the launcher and
        signals are watched then.
        """
        line = cls(rank, roles, voice or Voice(), hub)
        if address is not None and size > 1:
            line._stall_report_s, line._stall_end_s = stall_report_s, stall_end_s
            node = node or socket.gethostname()
            limits = {"stall_report_s": stall_report_s, "stall_end_s": stall_end_s}
            line._open(address, rank=rank, size=size, role=role, node=node, **limits)
        line._start(launched)
        return line

    def _start(self, launched: bool) -> None:
        if self._hub is not None:
            self._hub.voice = self._voice
        if launched:
            self._signals.install()
        else:
            self._parent = 0
        myself = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _close_in_child(myself()))
        self._thread.start()

    @property
    def in_forked_child(self) -> bool:
        """Whether this is a copy in a process forked from the rank, which speaks for no rank."""
        return os.getpid() != self._pid

    def set_patience(self, stall_report_s: float, stall_end_s: float) -> None:
        """Change the silence after which a rank is reported, and the job ended; by every rank."""
        if self._sock is not None:
            self._stall_report_s, self._stall_end_s = stall_report_s, stall_end_s
            self._send(encode(kind="patience", report_s=stall_report_s, end_s=stall_end_s))

    def stopping(self, num_workers: int, is_worker: bool) -> Stopping:
        """This rank's part in stopping at a step boundary; every rank makes one."""
        self._stopping = Stopping(lambda m: self._send(encode(**m)), num_workers, is_worker)
        return self._stopping

    def heed_stops(self) -> None:
        """From now on SIGTERM and SIGUSR2 ask to stop.  When every rank has its `stopping`."""
        if self._stopping is not None and self._sock is not None:
            self._stopping.heed(self._signals)
        if self._rank == 0:
            self._voice.say(f"{self._name(0)}: {STOPS_TEXT}")

    def leave(self) -> None:
        """Tell every rank, which finds it in `left`, that this one's script is at its end."""
        self._send(encode(kind="left"))

    def goodbye(self) -> None:
        """Say that this rank ends as it should: its closed connection is then no failure.

        Rank 0 should be last, after a barrier: when its process ends, the ranks still at work
        are only watched by the launcher.
        """
        self.said_goodbye = True
        self._send(encode(kind="goodbye"))
        if self._hub is not None and not self.in_forked_child:
            self._hub.wait_leaving()

    def fail(self, exit_status: int, text: str) -> NoReturn:
        """End the whole job: "rank R (role) <text>" is its last line, exit_status this rank's.

        Any thread may call it.  Never returns; takes at most about 3 s.
        """
        if self._failure is None:
            self._failure = (exit_status, text)
            self._voice.flush()
            self._signals.wake()
        self._thread.join(ANSWER_S + 1.0)
        # The watchdog is stuck, or the interpreter has already ended it.
        self._voice.say(f"{self._name(self._rank)} {self._failure[1]}")
        end_process(self._failure[0], self._voice)

    def _open(self, address: Address, **facts: Any) -> None:
        hello = encode(kind="hello", token=address.token, place=place(), pid=os.getpid(), **facts)
        try:
            self._sock = socket.create_connection((address.host, address.port), CONNECT_S)
            self._sock.sendall(hello)
            self._sock.setblocking(False)
        except OSError as error:
            self._sock = None
            self._voice.say(
                f"warning: {self._name(self._rank)} cannot reach rank 0 at {address.host}:"
                f"{address.port} ({error}); the death of another rank will not be seen here. "
                "MPIFLEET_LIFELINE_HOST chooses another address"
            )

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self._roles[rank]})"

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._signals.read_fd, selectors.EVENT_READ)
            if self._sock is not None:
                selector.register(self._sock, selectors.EVENT_READ)
            beat_s, now_s = 0.0, time.monotonic()
            while True:
                before_s = now_s
                ready = [key.fileobj for key, _ in selector.select(self._patience_s(beat_s))]
                now_s = time.monotonic()
                if now_s - before_s > 5 * BEAT_S:
                    self._heard_s += now_s - before_s  # we were stopped, not the hub
                if self._sock in ready and not self._receive():
                    selector.unregister(self._sock)
                    self._lost_hub()
                for number in self._signals.arrived():
                    self._on_signal(number, now_s)
                self._on_failure(now_s)
                if now_s - beat_s >= BEAT_S:
                    beat_s = now_s
                    self._send(encode(kind="beat"))
                    self._check_parent()
                    self._check_hub(now_s)

    def _patience_s(self, beat_s: float) -> float:
        now_s = time.monotonic()
        return max(0.0, min(beat_s + BEAT_S, self._alone_at_s) - now_s)

    def _send(self, message: bytes) -> None:
        sock = self._sock
        if sock is not None:
            with contextlib.suppress(OSError):  # the reading side finds out
                sock.send(message)

    def _receive(self) -> bool:
        assert self._sock is not None
        try:
            received = self._sock.recv(65536)
            for message in self._messages.feed(received):
                self._heard_s = time.monotonic()
                self._act(message)
        except BlockingIOError:
            return True
        except (OSError, ProtocolError, KeyError, TypeError):
            return False
        return bool(received)

    def _act(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "welcome":
            self._speaks = message["speaks"]
            self._hub_node, self._hub_pid = message["hub_node"], message["hub_pid"]
            self.left.update(message["left"])
        elif kind == "end":
            obey(message, self._voice, ANSWER_S if self._rank == 0 else 0.0)
        elif self._stopping is not None and kind.startswith("stop_"):
            self._stopping.hear(message)
        elif kind == "left":
            self.left.update(message["ranks"])
        elif kind == "leaving":
            self._hub_may_leave = True

    def _lost_hub(self) -> None:
        self._sock = None
        if self._hub_may_leave or self.said_goodbye:
            return
        silent_s = time.monotonic() - self._heard_s
        # Another rank may have killed a frozen rank 0 a moment before this one would have.
        how = "died" if silent_s < self._stall_report_s else f"silent for {silent_s:.0f} s"
        self._end_alone(1, f"{self._name(0)} on {self._hub_node or 'its node'} {how}")

    def _end_alone(self, status: int, text: str) -> NoReturn:
        """End without the hub: one rank a node speaks, at once and when the others are gone."""
        self._voice.say(text, show=self._speaks)
        if self._speaks:
            self._voice.flush()
            time.sleep(ALONE_LINGER_S)
            self._voice.say_last(text)
        end_process(status, self._voice)

    def _on_signal(self, number: int, now_s: float) -> None:
        if self._failure is not None:
            return
        name = signal.Signals(number).name
        if self._stopping is not None and self._stopping.takes(number, self._name(self._rank)):
            return
        self._failure = (128 + number, f"got {name}")
        self._send(encode(kind="signal", status=128 + number, text=f"got {name}"))
        self._alone_at_s = now_s + (SETTLE_S if self._sock is None else ANSWER_S)

    def _on_failure(self, now_s: float) -> None:
        if self._failure is None:
            return
        status, text = self._failure
        if self._alone_at_s == float("inf"):
            self._send(encode(kind="fail", status=status, text=text))
            self._alone_at_s = now_s + (0.0 if self._sock is None else ANSWER_S)
        if now_s >= self._alone_at_s:
            self._speaks = True
            self._end_alone(status, f"{self._name(self._rank)} {text}")

    def _check_parent(self) -> None:
        if self._parent > 1 and os.getppid() != self._parent and self._failure is None:
            self._failure = (1, "lost its launcher")
            self._signals.wake()

    def _check_hub(self, now_s: float) -> None:
        if self._sock is None or self._rank == 0 or self.said_goodbye:
            return
        silent_s = now_s - self._heard_s
        name = f"{self._name(0)} on {self._hub_node}"
        if silent_s >= self._stall_end_s:
            self._voice.dump_stacks()
            kill([self._hub_pid])
            self._end_alone(1, f"{name} silent for {silent_s:.0f} s")
        elif self._speaks and silent_s >= self._stall_report_s <= now_s - self._reported_s:
            self._reported_s = now_s
            self._voice.say(
                f"no sign of life for {silent_s:.0f} s from {name}; "
                f"the job ends at {self._stall_end_s:.0f} s"
            )


def _close_in_child(line: Lifeline | None) -> None:
    """A forked child holds no end of the lifeline and obeys no signal of the job."""
    if line is not None:
        if line._sock is not None:
            line._sock.close()
        if line._hub is not None:
            line._hub.close_in_child()
        line._signals.forget_in_child()
        line._sock = line._failure = line._stopping = None
