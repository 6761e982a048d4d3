"""Mailboxes over MPI: workers post, a server loop of the tests' own takes, checks and answers."""

import time

import numpy as np
import pytest

from mpifleet.errors import StallError
from mpifleet.patience import Backoff, Patience
from mpifleet.ps.assembler import Assembler
from mpifleet.ps.mailbox import Lane, MailboxLayout, ServerMailbox, WorkerMailbox
from mpifleet.ps.message import Header, Kind, lay_out
from mpifleet.window import Window
from tests.mpi.outcomes import raised, together
from tests.ranks import MPI

pytestmark = pytest.mark.ranks(2, 3, 4)

CAPACITY = 256
SIZES = (0, 1, 63, 64, 65, 255, 256, 257, 300, 512, 513, 5000)
PATIENCE = Patience(report_s=20, end_s=40)


def message_of(worker, step, server):
    """The bytes that this worker sends in this step: a function of all three."""
    size = SIZES[(step + 3 * worker) % len(SIZES)]
    return np.random.default_rng((worker, step, server)).integers(0, 256, size).astype(np.uint8)


def sections_of(message):
    """The message in up to three arrays, as an encoder would give them."""
    cuts = [cut for cut in (64, 192) if cut < message.size]
    return lay_out(np.split(message, cuts))


class Place:
    """This rank's side: the last `num_servers` ranks are servers."""

    def __init__(self, comm, num_servers, capacity=CAPACITY, patience=PATIENCE):
        self.comm = comm
        self.num_workers = comm.size - num_servers
        self.server = comm.rank - self.num_workers if comm.rank >= self.num_workers else None
        self.servers = range(num_servers)
        self.layout = MailboxLayout(self.num_workers, (capacity,) * 4)
        num_bytes = 0 if self.server is None else self.layout.num_bytes
        self.window = Window(MPI, comm, num_bytes, atomic=True)
        if self.server is None:
            ranks = range(self.num_workers, comm.size)
            self.mailbox = WorkerMailbox(self.window, self.layout, comm.rank, ranks, patience)
        else:
            self.mailbox = ServerMailbox(self.window, self.layout, comm.rank)

    def serve(self, lanes, deal):
        """Deals with what arrives until every worker has sent STOP in every lane."""
        assemblers = {lane: Assembler(self.mailbox, lane) for lane in lanes}
        left = {(worker, lane) for worker in range(self.num_workers) for lane in lanes}
        backoff, end_s = Backoff(1e-4), time.monotonic() + 30
        while left:
            assert time.monotonic() < end_s, f"nothing more from {left}"
            flags = self.mailbox.poll().copy()
            backoff.pause()
            for worker, lane in sorted(left):
                taken = assemblers[lane].take(worker) if flags[worker, lane] else None
                if taken is None:
                    continue
                backoff.reset()
                is_stop = taken[0].kind is Kind.STOP
                if is_stop:
                    left.discard((worker, lane))
                else:
                    deal(worker, lane, *taken)
                if is_stop or lane is not Lane.REQUEST:  # an answer frees its question itself
                    self.mailbox.clear(worker, lane)

    def stop(self, *lanes):
        """A worker sends no more in these lanes."""
        for server in self.servers:
            for lane in lanes:
                self.mailbox.post(server, lane, Kind.STOP)
                self.mailbox.wait_empty(server, lane)

    def end(self, *facts):
        """Frees the window and tells whether the facts hold everywhere. Collective."""
        self.comm.Barrier()
        self.window.free()
        return together(self.comm, *facts)


def server_counts(comm):
    return range(1, comm.size)


@pytest.mark.parametrize("lane", [Lane.DENSE, Lane.ROWS])
def test_every_byte_arrives_in_order(comm, lane):
    """Messages of all sizes around the capacity, from all workers to all servers at once."""
    num_steps = 2 * len(SIZES)
    for num_servers in server_counts(comm):
        place = Place(comm, num_servers)
        wrong, steps = [], [[] for _ in range(place.num_workers)]

        def deal(worker, _, header, message, place=place, wrong=wrong, steps=steps):
            steps[worker].append(header.step)
            expected = message_of(worker, header.step, place.server)
            # Sections start on cache lines; up to the last one the sizes are multiples of that.
            if message[: expected.size].tobytes() != expected.tobytes():
                wrong.append((worker, header.step))

        if place.server is not None:
            place.serve([lane], deal)
            in_order = steps == [list(range(num_steps))] * place.num_workers
        else:
            for step in range(num_steps):
                for server in place.servers:
                    sections, total = sections_of(message_of(comm.rank, step, server))
                    place.mailbox.post(
                        server, lane, Kind.STEP, step=step, sections=sections, total_bytes=total
                    )
            place.stop(lane)
            in_order = True
        assert place.end(not wrong, in_order), (num_servers, wrong, steps)


def test_lanes_of_one_worker_do_not_meet(comm):
    place = Place(comm, 1)
    seen = []
    if place.server is not None:
        place.serve(
            [Lane.DENSE, Lane.ROWS],
            lambda worker, lane, header, message: seen.append(
                (worker, lane, header.argument, int(message[0]))
            ),
        )
        expected = [
            (worker, lane, 10 * lane + worker, lane + 1)
            for worker in range(place.num_workers)
            for lane in (Lane.DENSE, Lane.ROWS)
        ]
        assert place.end(sorted(seen) == sorted(expected)), seen
    else:
        for lane in (Lane.DENSE, Lane.ROWS):
            sections, total = lay_out([np.full(400, lane + 1, np.uint8)])
            place.mailbox.post(
                0,
                lane,
                Kind.STEP,
                argument=10 * lane + comm.rank,
                sections=sections,
                total_bytes=total,
            )
        place.stop(Lane.DENSE, Lane.ROWS)
        assert place.end()


@pytest.mark.parametrize("size", [8, 3 * CAPACITY])
def test_a_worker_is_at_most_one_message_ahead(comm, size):
    """Back pressure: a post returns only when all before it were dealt with; lanes stay as put."""
    num_steps = 12
    place = Place(comm, 1)
    facts, versions = [], [0] * place.num_workers

    def slowly(worker, lane, header, message):
        before = message.copy()
        time.sleep(0.004)
        facts.append(message.tobytes() == before.tobytes())
        facts.append(bool((message[:size] == header.step).all()))
        versions[worker] += 1
        # The only worker's count; with more workers the least of them.
        place.mailbox.set_version(lane, min(versions))

    if place.server is not None:
        place.serve([Lane.ROWS], slowly)
        facts.append(versions == [num_steps] * place.num_workers)
    else:
        ahead = []
        for step in range(num_steps):
            sections, total = lay_out([np.full(size, step, np.uint8)])
            place.mailbox.post(
                0, Lane.ROWS, Kind.STEP, step=step, sections=sections, total_bytes=total
            )
            if place.num_workers == 1:
                ahead.append(step + 1 - place.mailbox.version(0, Lane.ROWS))
        place.mailbox.wait_version(0, Lane.ROWS, num_steps)
        place.mailbox.wait_empty(0, Lane.ROWS)
        facts.append(place.mailbox.version(0, Lane.ROWS) == num_steps)
        facts.append(max(ahead, default=1) == 1)
        place.stop(Lane.ROWS)
    assert place.end(*facts)


def test_answers_belong_to_their_questions(comm):
    """All workers ask all servers; questions and answers of all sizes, also larger than a lane."""
    num_questions = 30
    for num_servers in server_counts(comm):
        place = Place(comm, num_servers)
        facts = []
        if place.server is not None:
            mailbox = place.mailbox

            def answer(worker, lane, header, message, place=place, mailbox=mailbox):
                sequence = int(mailbox.poll()[worker, lane])
                reply = message[: header.total_bytes][::-1][:CAPACITY] ^ (place.server + 1)
                mailbox.payload(worker, Lane.REPLY, reply.size)[:] = reply
                done = Header(header.kind, 0, header.argument + 1, reply.size, 0, reply.size)
                mailbox.reply(worker, sequence, done)

            place.serve([Lane.REQUEST], lambda *parts, answer=answer: answer(*parts))
        else:
            for number in range(num_questions):
                questions = [message_of(comm.rank, number, server) for server in place.servers]
                tickets = [
                    place.mailbox.post(
                        server,
                        Lane.REQUEST,
                        Kind.PULL_ROWS,
                        argument=number,
                        sections=[(0, question)],
                        total_bytes=question.size,
                    )
                    for server, question in enumerate(questions)
                ]
                for server, (ticket, question) in enumerate(zip(tickets, questions, strict=True)):
                    header = place.mailbox.wait_reply(server, ticket)
                    out = np.empty(header.num_bytes, np.uint8)
                    place.mailbox.read_reply(server, out)
                    expected = question[::-1][:CAPACITY] ^ (server + 1)
                    facts.append(header.argument == number + 1)
                    facts.append(out.tobytes() == expected.tobytes())
            place.stop(Lane.REQUEST)
        assert place.end(*facts), num_servers


def test_versions_of_servers_are_their_own(comm):
    place = Place(comm, comm.size - 1)
    if place.server is not None:
        place.mailbox.set_version(Lane.DENSE, 10 + place.server)
        place.mailbox.set_version(Lane.ROWS, 20 + place.server)
        assert place.end()
    else:
        seen = []
        for server in place.servers:
            place.mailbox.wait_version(server, Lane.DENSE, 10 + server)
            place.mailbox.wait_version(server, Lane.ROWS, 20 + server)
            seen.append([place.mailbox.version(server, lane) for lane in (Lane.DENSE, Lane.ROWS)])
        assert place.end(seen == [[10 + s, 20 + s] for s in place.servers]), seen


def test_a_server_that_does_nothing_is_named(comm):
    """The server stands in a barrier; its memory can still be read and written."""
    place = Place(comm, 1, patience=Patience(report_s=60, end_s=0.05))
    if place.server is not None:
        facts = []
    else:
        mailbox, worker = place.mailbox, comm.rank
        mailbox.post(0, Lane.ROWS, Kind.STEP)
        messages = [
            raised(StallError, mailbox.post, 0, Lane.ROWS, Kind.STEP),
            raised(StallError, mailbox.wait_version, 0, Lane.DENSE, 7),
            raised(StallError, mailbox.wait_reply, 0, 5),
        ]
        facts = [
            f"server 0 taking what worker {worker} put in lane ROWS" in messages[0],
            "server 0 finishing DENSE update 7 (it is at 0)" in messages[1],
            "the answer of server 0 to request 5" in messages[2],
        ]
    assert place.end(*facts)
