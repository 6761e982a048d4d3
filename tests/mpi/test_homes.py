"""Both homes of tables: what is read is what a server has, whole, however busy it is."""

import itertools
import time

import numpy as np
import pytest

from mpifleet.errors import ConfigError
from mpifleet.ps.homes import HOMES, make_home
from mpifleet.ps.rule_spec import RuleSpec
from mpifleet.ps.spec import DenseSpec, ParamSpec, SparseSpec, TableSpecs, layouts
from mpifleet.roles import Role, Roles
from tests.mpi.outcomes import raised, together
from tests.ranks import MPI, WORLD

SGD = RuleSpec("sgd")
NUM_ROWS, DIM = 211, 16
DENSE_SIZE = 100
CONTEST_S = 0.6
MIN_WRITES, MIN_READS = 10, 3

on_both = pytest.mark.parametrize("name", list(HOMES))


def sparse(name, num_rows, dim, dtype="float32"):
    return SparseSpec(name, num_rows, dim, dtype, SGD, "zeros", 0.0, 0)


SPECS = TableSpecs(
    (
        DenseSpec("dense0", "float32", SGD, (ParamSpec("w", (DENSE_SIZE,), 0, DENSE_SIZE),)),
        DenseSpec("dense1", "float64", SGD, (ParamSpec("b", (5,), 0, 5),)),
    ),
    (sparse("emb", NUM_ROWS, DIM), sparse("small", 2, 3, "float64")),
)


class Place:
    """This rank's part of a job whose tables have the home `name`. Collective."""

    def __init__(self, comm, name, num_servers):
        self.comm = comm
        self.roles = Roles.assign(MPI, comm, num_servers=num_servers)
        self.num_servers = num_servers
        self.layouts = layouts(SPECS, num_servers)
        self.home = make_home(name, MPI, self.roles, self.layouts)
        self.is_server = self.roles.role is Role.SERVER

    def fill(self):
        """Row k of every sparse table has the values 1000 * k + column, dense element i is i."""
        if self.is_server:
            layout, memory = self.layouts[self.roles.index], self.home.memory
            with self.home.exclusive():
                for table, spec in enumerate(SPECS.sparse):
                    rows = layout.sparse_view(memory, table)
                    keys = np.arange(len(rows)) * self.num_servers + self.roles.index
                    rows[:] = 1000 * keys[:, None] + np.arange(spec.dim)
                for table, part in enumerate(layout.dense):
                    layout.dense_view(memory, table)[:] = np.arange(part.start, part.stop)
        self.comm.Barrier()

    def end(self, *facts):
        """Frees the home and tells whether the facts hold everywhere. Collective."""
        self.comm.Barrier()
        self.home.free()
        return together(self.comm, *facts)


@on_both
@pytest.mark.ranks(2, 3, 4)
def test_memory_is_there_and_empty_on_workers(comm, name):
    place = Place(comm, name, comm.size // 2)
    layout = place.layouts[place.roles.index] if place.is_server else None
    expected = layout.num_bytes if layout else 0
    assert place.end(
        place.home.memory.size == expected,
        not place.home.memory.any(),
        place.home.name == name,
        all(place.home.reaches(server) for server in range(place.num_servers)),
    )


@on_both
@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("num_servers", range(1, WORLD.size))
def test_rows_come_in_any_order_from_every_server(comm, name, num_servers):
    place = Place(comm, name, num_servers)
    place.fill()
    wrong = []
    if not place.is_server:
        rng = np.random.default_rng(comm.rank)
        for server, (table, spec) in itertools.product(range(num_servers), enumerate(SPECS.sparse)):
            own = place.layouts[server].sparse_rows[table]
            for count in sorted({0, min(1, own), own // 2, own}):
                for rows in (np.arange(own)[:count], rng.permutation(own)[:count]):
                    out = np.full((count, spec.dim), -1, spec.dtype)
                    place.home.read_rows(server, table, rows, out)
                    keys = rows * num_servers + server
                    if not (out == 1000 * keys[:, None] + np.arange(spec.dim)).all():
                        wrong.append((server, table, count))
    assert place.end(not wrong), wrong


@on_both
@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("num_servers", range(1, WORLD.size))
def test_a_pull_reads_into_its_part_of_a_larger_array(comm, name, num_servers):
    """As a client does: the keys of one look-up in server-major order, one array for all."""
    place = Place(comm, name, num_servers)
    place.fill()
    fact = True
    if not place.is_server:
        keys = [np.arange(server, NUM_ROWS, num_servers)[::-1] for server in range(num_servers)]
        out = np.full((NUM_ROWS, DIM), -1, np.float32)
        start = 0
        for server, mine in enumerate(keys):
            part = out[start : start + mine.size]
            place.home.read_rows(server, 0, mine // num_servers, part)
            start += mine.size
        fact = bool((out == 1000 * np.concatenate(keys)[:, None] + np.arange(DIM)).all())
    assert place.end(fact)


@on_both
@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("num_servers", range(1, WORLD.size))
def test_dense_tables_come_from_all_servers(comm, name, num_servers):
    place = Place(comm, name, num_servers)
    place.fill()
    outs = [np.full(spec.size, -1, spec.dtype) for spec in SPECS.dense]
    if not place.is_server:
        for server in range(num_servers):
            place.home.read_dense(server, outs)
    got = [out.tolist() for out in outs]
    expected = [list(range(spec.size)) for spec in SPECS.dense]
    assert place.end(place.is_server or got == expected), got


def write_without_pause(place, until_s):
    """Sets all of a server's memory to one value after the other. Returns how many times."""
    layout, memory = place.layouts[place.roles.index], place.home.memory
    rows, dense = layout.sparse_view(memory, 0), layout.dense_view(memory, 0)
    writes = 0
    while time.monotonic() < until_s:
        writes += 1
        with place.home.exclusive():
            half = len(rows) // 2
            rows[:half] = writes
            time.sleep(20e-6)  # long enough for a reader that does not wait to see one half
            dense[:] = writes
            rows[half:] = writes
    return writes


def read_without_pause(place, until_s):
    """(reads, torn reads, values that went back) of one server's rows and dense elements."""
    rng = np.random.default_rng(place.comm.rank)
    server = place.roles.index % place.num_servers
    own = place.layouts[server].sparse_rows[0]
    dense = [np.zeros(spec.size, spec.dtype) for spec in SPECS.dense]
    part = place.layouts[server].dense[0]
    reads = torn = back = last = 0
    while time.monotonic() < until_s:
        rows = rng.permutation(own)
        out = np.full((own, DIM), -1, np.float32)
        place.home.read_rows(server, 0, rows, out)
        place.home.read_dense(server, dense)
        mine = dense[0][part.start : part.stop]
        torn += bool((out != out[0, 0]).any()) + bool((mine != mine[:1]).any())
        back += out[0, 0] < last or (mine < out[0, 0]).any()
        last = max(last, float(out[0, 0]))
        reads += 1
    return reads, torn, back


@on_both
@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("num_servers", [1, 2] if WORLD.size == 4 else [1])
def test_readers_and_writers_that_never_pause(comm, name, num_servers):
    """No read is torn, and neither side is kept from its turn: 1, 2 and 3 readers of a writer."""
    place = Place(comm, name, num_servers)
    comm.Barrier()
    until_s = time.monotonic() + CONTEST_S
    if place.is_server:
        writes = write_without_pause(place, until_s)
        facts = writes >= MIN_WRITES, True
        seen = f"server {place.roles.index}: {writes} writes"
    else:
        reads, torn, back = read_without_pause(place, until_s)
        facts = reads >= MIN_READS, torn == back == 0
        seen = f"worker {place.roles.index}: {reads} reads, {torn} torn, {back} back"
    everyone = comm.allgather(seen)
    assert place.end(*facts), everyone


@on_both
@pytest.mark.ranks(2, 3, 4)
def test_readers_wait_at_a_closed_gate(comm, name):
    """A writer that only waits for its lock is let in before any reader that comes later."""
    place = Place(comm, name, 1)
    out = np.full((1, DIM), -1, np.float32)
    if place.is_server:
        place.home._set_gate(np.ones(1, np.int64))
    comm.Barrier()
    if place.is_server:
        time.sleep(0.1)  # the readers are at the gate, the lock is free
        with place.home.exclusive():
            place.layouts[0].sparse_view(place.home.memory, 0)[:] = 7
    else:
        place.home.read_rows(0, 0, np.zeros(1, np.int64), out)
    assert place.end(place.is_server or bool((out == 7).all()))


@on_both
@pytest.mark.ranks(2, 3, 4)
def test_a_failing_writer_opens_the_gate_again(comm, name):
    place = Place(comm, name, 1)
    message = ""
    if place.is_server:
        try:
            with place.home.exclusive():
                raise ValueError("mid-way")
        except ValueError as error:
            message = str(error)
    comm.Barrier()
    out = np.full((1, DIM), -1, np.float32)
    if not place.is_server:
        place.home.read_rows(0, 0, np.zeros(1, np.int64), out)
    assert place.end(message == "mid-way" if place.is_server else not out.any())


def test_an_unknown_home_is_refused(comm):
    roles = Roles.assign(MPI, comm)
    message = raised(ConfigError, make_home, "nowhere", MPI, roles, [])
    expected = "table home 'nowhere' is unknown; use one of ['node', 'world']"
    assert together(comm, message == expected), message
