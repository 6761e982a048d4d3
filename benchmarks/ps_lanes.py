"""The mailbox alone with many workers, on ranks without torch: memory and speed of delivery.

    python -m benchmarks.ps_lanes [--quick]

One server and 15 workers on this node, which deliver messages of rows as a batch of 1,000 CTR
samples pushes, every second worker larger ones that its lane does not hold in one piece. The server
takes the messages in turn and drops them: what is left is the cost of lanes. Counted is what the
server has come to hold since MPI was there: pages touched in the mailbox window, each once, and its
private memory at its highest, against strategy.mailbox_mib and one staged message. A look at the
lanes of 1,000 workers is timed beside it. Exit status 1 when it is more memory than that.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import ModuleType

import numpy as np

from benchmarks.process_memory import PrivatePeak, new_bytes, private_bytes, shared_bytes
from benchmarks.program import run_program
from benchmarks.report import Figure, Goal, interleave, plain, print_figures
from benchmarks.row_workload import wait_in_mpi
from mpifleet.mpi import load_mpi
from mpifleet.partition import ALIGN_BYTES
from mpifleet.patience import Backoff, Patience
from mpifleet.ps.assembler import Assembler
from mpifleet.ps.mailbox import Lane, MailboxLayout, ServerMailbox, WorkerMailbox
from mpifleet.ps.mailbox_plan import plan
from mpifleet.ps.message import Kind, lay_out, rows_arrays
from mpifleet.ps.rule_spec import HYPER_SIZE
from mpifleet.strategy import DistributedStrategy
from mpifleet.window import Window

NUM_RANKS, QUICK_RANKS, SERVER = 16, 4, 0
DIM, PUSHED, TIMES_LARGER = 10, 13_300, 20
ROW_BYTES = DIM * 4
STEPS, QUICK_STEPS = 20, 5
MANY = 1000
LOOKS = 31
MARGIN_BYTES = 8 << 20
"""What MPI itself comes to hold for windows and 15 neighbours."""
GOAL = Goal(1.0, at_most=True)


def message(num_rows: int) -> list[np.ndarray]:
    """The arrays of a push of so many rows to one server."""
    rows, values = np.arange(num_rows), np.full((num_rows, DIM), 0.5, np.float32)
    return rows_arrays(np.zeros((1, HYPER_SIZE)), [rows], [values], [num_rows])


def deliver(mailbox: WorkerMailbox, num_rows: int, steps: int) -> None:
    """One worker's pushes, and that it stops; returns when all was taken."""
    sections, total_bytes = lay_out(message(num_rows))
    for step in range(steps):
        mailbox.post(0, Lane.ROWS, Kind.STEP, step=step, sections=sections, total_bytes=total_bytes)
    mailbox.post(0, Lane.ROWS, Kind.STOP)
    mailbox.wait_empty(0, Lane.ROWS)


def take_all(mailbox: ServerMailbox, num_workers: int) -> tuple[int, float]:
    """Take messages until every worker has stopped: their number, and seconds from the first on."""
    assembler, backoff = Assembler(mailbox, Lane.ROWS), Backoff(1e-3)
    taken, began_s = 0, 0.0
    following = 0
    while num_workers:
        full = np.flatnonzero(mailbox.poll()[:, Lane.ROWS])
        worker = assembler.first(np.roll(full, -int(np.searchsorted(full, following))))
        if worker is None:
            backoff.pause()
            continue
        backoff.reset()
        began_s = began_s or time.perf_counter()
        following = worker + 1
        whole = assembler.take(worker)
        if whole is not None:
            num_workers -= whole[0].kind is Kind.STOP
            taken += whole[0].kind is Kind.STEP
            mailbox.clear(worker, Lane.ROWS)
    return taken, time.perf_counter() - began_s


def make_window(mpi: ModuleType, layout: MailboxLayout, is_server: bool) -> Window:
    """A window with this layout's memory on the server. Collective."""
    head = layout.lane(0, Lane.DENSE)
    size = layout.num_bytes if is_server else 0
    return Window(mpi, mpi.COMM_WORLD, size, atomic=True, zero_bytes=head)


def look_figure(mpi: ModuleType, is_server: bool) -> Figure | None:
    """How long a look at MANY workers takes. Collective; None on workers."""
    layout = MailboxLayout(MANY, (ALIGN_BYTES,) * 4)
    window = make_window(mpi, layout, is_server)
    figure = None
    if is_server:
        mailbox = ServerMailbox(window, layout, SERVER)
        times = interleave({f"look at {MANY:,} workers": lambda _: mailbox.poll()}, LOOKS)
        (figure,) = (plain(name, seconds) for name, seconds in times.items())
    wait_in_mpi(mpi.COMM_WORLD)
    window.free()
    return figure


def memory_figure(num_workers: int, windows: int, private: int, allowed: int) -> Figure:
    """Counted bytes against what is allowed."""
    ratio = (windows + private) / allowed
    name = f"mailbox of {num_workers} workers"
    against = f"mailbox_mib + one message + 8 MiB = {allowed / 2**20:.1f} MiB"
    mib = round((windows + private) / 2**20, 1)
    return Figure(name, mib, "MiB", against, round(ratio, 3), str(GOAL), GOAL.met_by(ratio))


def measure(quick: bool) -> None:
    """One rank's part of the job; the server prints. Collective."""
    mpi = load_mpi()
    world, steps = mpi.COMM_WORLD, QUICK_STEPS if quick else STEPS
    num_workers, is_server = world.size - 1, world.rank == SERVER
    budget = DistributedStrategy().mailbox_mib << 20
    layout = plan(num_workers, budget, 4 * 431_202, ROW_BYTES, served=False)
    # Memory that MPI shares on first contact is none of the mailbox's.
    world.Alltoall(np.zeros(world.size), np.empty(world.size))
    private_before, shared_before = private_bytes(), shared_bytes()
    window, taken, seconds = make_window(mpi, layout, is_server), 0, 1.0
    with PrivatePeak() as peak:
        if is_server:
            taken, seconds = take_all(ServerMailbox(window, layout, SERVER), num_workers)
        else:
            worker = world.rank - 1
            box = WorkerMailbox(window, layout, worker, [SERVER], Patience())
            deliver(box, PUSHED * (TIMES_LARGER if worker % 2 else 1), steps)
        wait_in_mpi(world)
    windows = np.array([new_bytes(shared_before, shared_bytes())])
    world.Allreduce(mpi.IN_PLACE, windows)
    window.free()
    look = look_figure(mpi, is_server)
    if is_server and look is not None:
        assert taken == num_workers * steps, f"{taken} of {num_workers * steps} messages"
        assert "torch" not in sys.modules
        _, largest = lay_out(message(PUSHED * TIMES_LARGER))
        private = peak.peak_bytes - private_before
        allowed = budget + largest + MARGIN_BYTES
        rate = Figure(f"messages from {num_workers} workers", round(taken / seconds), "1/s")
        print_figures([memory_figure(num_workers, int(windows[0]), private, allowed), rate, look])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure here when a launcher started us, else start the job that does."""
    means = f"{QUICK_RANKS} ranks"
    return run_program("ps_lanes", __doc__, means, measure, NUM_RANKS, QUICK_RANKS, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
