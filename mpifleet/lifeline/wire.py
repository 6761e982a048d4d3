"""Addresses and messages between a lifeline and its hub: one JSON object a line."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

MAX_MESSAGE_BYTES = 64 * 1024
HOST = "MPIFLEET_LIFELINE_HOST"


class Address(NamedTuple):
    """Where a hub listens, and the secret that lets a rank in.  Broadcast it over MPI only."""

    host: str
    port: int
    token: str


class ProtocolError(ValueError):
    """The other side sent something that is not a message of ours."""


def encode(**fields: Any) -> bytes:
    """One message; its "kind" says what it is."""
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


class Messages:
    """Cuts the bytes of one connection into messages."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> Iterator[dict[str, Any]]:
        """The messages completed by `received`.  Raises ProtocolError on anything else."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        if max(map(len, (*lines, self._rest))) > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a message longer than {MAX_MESSAGE_BYTES} bytes")
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                raise ProtocolError("a line that is not JSON") from None
            if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
                raise ProtocolError("a JSON value without a kind")
            yield message


def place() -> str:
    """A name for the set of processes whose ids mean the same: this boot, this pid namespace.

    Two containers on one machine are two places: a pid of one is another process in the other.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()


def listen_host(one_node: bool, environ: Mapping[str, str] = os.environ) -> str:
    """The address a hub should listen on: MPIFLEET_LIFELINE_HOST if set, loopback on one node.

    On several nodes the address of the interface that holds the default route, else what this
    node's own name resolves to.
    """
    chosen = environ.get(HOST, "").strip()
    if chosen:
        return chosen
    if one_node:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting a datagram socket sends nothing; it makes the kernel choose an interface.
            # 192.0.2.1 is reserved for documentation and belongs to nobody.
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            pass
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
