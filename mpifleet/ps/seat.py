"""What each training thread of a worker has for itself at the worker's one exchange."""

from dataclasses import dataclass

from mpifleet.ps.read_versions import ReadVersions
from mpifleet.step_clock import StepClock


@dataclass(frozen=True)
class Seat:
    """clock: where the thread's time goes.  read: which versions its next push is computed from."""

    clock: StepClock
    read: ReadVersions

    @classmethod
    def new(cls, num_servers: int) -> "Seat":
        """Nothing measured and nothing read yet."""
        return cls(StepClock(), ReadVersions(num_servers))

    def beside(self) -> "Seat":
        """One for a thread that shares the dense parameters: what anybody pulls, all have read."""
        return Seat(StepClock(), self.read.beside())
