"""Windows that tests open, on every kind of memory."""

import contextlib

import pytest

from mpifleet.window import Window
from tests.ranks import MPI

ATOMIC = [pytest.param(on_node, id="shared" if on_node else "world") for on_node in (False, True)]


@contextlib.contextmanager
def opened(comm, num_bytes, atomic=True, on_node=False):
    """A window that is freed unless the test fails (then ranks may not be in step)."""
    window = Window(MPI, comm, num_bytes, atomic=atomic, on_node=on_node)
    yield window
    window.free()
