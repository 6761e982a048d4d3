"""Notices a dead, failed or frozen rank and ends the whole job, naming it; makes no MPI call.

Rank 0 opens a `Hub`; every rank, rank 0 too, holds one TCP connection to it (`Lifeline`) and
beats once a second from a daemon thread, which lives on while the main thread waits inside MPI.
A connection that closes without a goodbye is a death; silence is a frozen rank; a failure or a
signal is told.  The hub says the reason at once, has every rank end itself, and says it again as
the last line when the others are gone.
"""

from mpifleet.lifeline.hooks import install_excepthook
from mpifleet.lifeline.hub import Hub
from mpifleet.lifeline.line import Lifeline
from mpifleet.lifeline.segments import RankSegments
from mpifleet.lifeline.stopping import Stopping, end_undisturbed
from mpifleet.lifeline.wire import Address, listen_host

__all__ = [
    "Address",
    "Hub",
    "Lifeline",
    "RankSegments",
    "Stopping",
    "end_undisturbed",
    "install_excepthook",
    "listen_host",
]
