"""A server's tables: the same bits however they are cut, chunked or published."""

import contextlib

import numpy as np
import pytest
import torch

from mpifleet import partition
from mpifleet.ps.initializers import initial_rows
from mpifleet.ps.message import DenseGradient, RowsGradient
from mpifleet.ps.rule_spec import HYPER_SIZE
from mpifleet.ps.shard import Shard
from mpifleet.ps.spec import TableSpecs, layouts
from tests.unit.table_examples import HYPERS, dense_spec, sparse_spec

SIZES = (5, 40, 1, 300, 17, 64, 3)  # 430 elements: three servers hold 144, 144 and 142
NUM_ROWS, DIM = 101, 10
RULES = list(HYPERS)
STEPS = 6


def specs_of(rule, dtype="float32"):
    return TableSpecs(
        (dense_spec("dense0", SIZES, rule, dtype), dense_spec("dense1", (9,), rule, dtype)),
        (sparse_spec("emb", NUM_ROWS, DIM, rule, dtype), sparse_spec("b", 2, 3, rule, dtype)),
    )


def make_shard(specs, rule, server=0, num_servers=1, **options):
    layout = layouts(specs, num_servers)[server]
    hypers = [np.stack([HYPERS[rule]] * 2)] * 2
    shard = Shard(layout, np.zeros(layout.num_bytes, np.uint8), *hypers, **options)
    shard.initialize_rows()
    rng = np.random.default_rng(1)
    for table, part in enumerate(layout.dense):
        flat = rng.normal(size=specs.dense[table].size).astype(specs.dense[table].dtype)
        shard.set_dense(table, flat[part.start : part.stop].copy())
    return shard


def rows_only(specs, rule):
    """A shard of one sparse table, all zeros."""
    layout = layouts(specs, 1)[0]
    memory = np.zeros(layout.num_bytes, np.uint8)
    return Shard(layout, memory, np.empty((0, HYPER_SIZE)), HYPERS[rule][None])


def pushes_of(specs, seed=0):
    """STEPS pushes: per dense table (present, gradient), per sparse table (keys, gradients)."""
    rng = np.random.default_rng(seed)
    for _ in range(STEPS):
        dense = [
            (
                rng.integers(0, 2, len(spec.params)).astype(np.uint8),
                rng.normal(size=spec.size).astype(spec.dtype),
            )
            for spec in specs.dense
        ]
        sparse = []
        for spec in specs.sparse:
            keys = rng.permutation(spec.num_rows)[: rng.integers(0, spec.num_rows + 1)]
            sparse.append((keys, rng.normal(size=(keys.size, spec.dim)).astype(spec.dtype)))
        yield dense, sparse


def train(shards, rule, seed=0):
    """Applies the same pushes to all servers of one job, each its share."""
    hyper, num_servers = HYPERS[rule], len(shards)
    for dense, sparse in pushes_of(shards[0].layout.specs, seed):
        for shard in shards:
            layout = shard.layout
            shard.apply_dense(
                [
                    DenseGradient(hyper, present, flat[part.start : part.stop].copy())
                    for (present, flat), part in zip(dense, layout.dense, strict=True)
                ]
            )
            gradients = []
            for keys, values in sparse:
                mine = keys % num_servers == layout.server
                rows = keys[mine] // num_servers
                gradients.append(RowsGradient(hyper, rows, values[mine], int(keys.size)))
            shard.apply_rows(gradients)


def whole(shards):
    """Every array of a job as one server would hold it, by name."""
    specs, num_servers = shards[0].layout.specs, len(shards)
    arrays = {}
    for table, spec in enumerate(specs.dense):
        slots = ["value", *shards[0].dense_state[table]]
        for slot in slots:
            parts = [
                s.dense(table) if slot == "value" else s.dense_state[table][slot].numpy()
                for s in shards
            ]
            arrays[spec.name, slot] = np.concatenate(parts)
        arrays[spec.name, "step"] = shards[0].dense_steps[table]
    for table, spec in enumerate(specs.sparse):
        for slot in ["value", *shards[0].sparse_state[table]]:
            rows = np.empty((spec.num_rows, spec.dim), spec.dtype)
            for server, s in enumerate(shards):
                own = s.rows(table) if slot == "value" else s.sparse_state[table][slot].numpy()
                rows[server::num_servers] = own
            arrays[spec.name, slot] = rows
        arrays[spec.name, "step"] = np.array([s.sparse_steps[table] for s in shards[:1]])
    return arrays


def assert_same_bits(left, right):
    assert left.keys() == right.keys()
    for name, array in left.items():
        assert array.tobytes() == right[name].tobytes(), name


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("num_servers", [2, 3, 7])
def test_any_number_of_servers_gives_the_same_bits(num_servers, dtype, rule):
    specs = specs_of(rule, dtype)
    one = [make_shard(specs, rule)]
    many = [make_shard(specs, rule, server, num_servers) for server in range(num_servers)]
    before = whole(one)["emb", "value"].copy()
    assert_same_bits(whole(one), whole(many))
    train(one, rule)
    train(many, rule)
    assert_same_bits(whole(one), whole(many))
    assert (whole(one)["emb", "value"] != before).any()
    assert len({tuple(s.sparse_steps.tolist()) for s in many}) == 1, "all count the same updates"


@pytest.mark.parametrize("rule", RULES)
def test_publishing_changes_no_bit(rule):
    specs = specs_of(rule)
    plain, published = make_shard(specs, rule), make_shard(specs, rule, published=True)
    train([plain], rule)
    train([published], rule)
    assert_same_bits(whole([plain]), whole([published]))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize("size", [1, 60, 148])
def test_updates_in_chunks_give_the_same_bits(size, published, rule, monkeypatch):
    specs = specs_of(rule)
    at_once = make_shard(specs, rule)
    train([at_once], rule)
    quiet = []
    make_shard(specs, rule, published=published, breathe=lambda: quiet.append(1))
    monkeypatch.setattr(partition, "CHUNK_BYTES", size)
    breaths = []
    chunked = make_shard(specs, rule, published=published, breathe=lambda: breaths.append(1))
    train([chunked], rule)
    assert_same_bits(whole([at_once]), whole([chunked]))
    assert len(breaths) > len(quiet) + STEPS, "MPI is looked at between chunks"


class Published:
    """What a reader sees: memory as it was whenever no writer held the lock."""

    def __init__(self):
        self.memory = None
        self.seen = None
        self.locks = 0

    @contextlib.contextmanager
    def exclusive(self):
        if self.seen is not None:
            np.testing.assert_array_equal(self.memory, self.seen, "changed outside the lock")
        self.locks += 1
        yield
        self.seen = self.memory.copy()


@pytest.mark.parametrize("rule", RULES)
def test_published_memory_changes_under_the_lock_only(rule):
    specs = specs_of(rule)
    layout = layouts(specs, 1)[0]
    readers = Published()
    readers.memory = np.zeros(layout.num_bytes, np.uint8)
    hypers = [np.stack([HYPERS[rule]] * 2)] * 2
    shard = Shard(layout, readers.memory, *hypers, exclusive=readers.exclusive, published=True)
    shard.initialize_rows()
    shard.set_dense(0, np.arange(shard.dense(0).size, dtype=np.float32))
    shard.set_rows(0, 5, np.ones((3, DIM), np.float32))
    train([shard], rule)
    with readers.exclusive():
        pass
    assert readers.locks > 2 * STEPS
    for table in range(2):
        in_memory = layout.dense_view(readers.memory, table)
        np.testing.assert_array_equal(in_memory, shard.dense(table), "what is published")


@pytest.mark.parametrize("published", [False, True])
def test_each_parameter_has_its_own_step(published):
    """Equal to one torch optimizer, in which a parameter without gradient is left alone."""
    sizes = (5, 40, 1, 300)
    specs = TableSpecs((dense_spec("d", sizes, "adam", "float64"),), ())
    layout = layouts(specs, 1)[0]
    memory = np.zeros(layout.num_bytes, np.uint8)
    none = np.empty((0, HYPER_SIZE))
    shard = Shard(layout, memory, HYPERS["adam"][None], none, published=published)
    rng = np.random.default_rng(4)
    params = [torch.nn.Parameter(torch.from_numpy(rng.normal(size=size))) for size in sizes]
    shard.set_dense(0, torch.cat([p.detach() for p in params]).numpy())
    optimizer = torch.optim.Adam(params, lr=0.01)
    for present in ([1, 1, 0, 1], [0, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 1]):
        flat = np.zeros(sum(sizes))
        for param, spec, flag in zip(params, specs.dense[0].params, present, strict=True):
            param.grad = torch.from_numpy(rng.normal(size=param.numel())) if flag else None
            if flag:
                flat[spec.start : spec.stop] = param.grad.numpy()
        optimizer.step()
        shard.apply_dense([DenseGradient(HYPERS["adam"], np.array(present, np.uint8), flat)])
    assert shard.dense_steps[0].tolist() == [3, 3, 2, 3]
    wanted = torch.cat([p.detach() for p in params]).numpy()
    np.testing.assert_allclose(shard.dense(0), wanted, rtol=1e-12)
    assert shard.dense(0)[45] != 0


def test_sparse_steps_count_pushes_with_rows_anywhere():
    specs = specs_of("adam")
    shard = make_shard(specs, "adam", server=2, num_servers=3)
    empty = np.empty(0, np.int64)
    for pushed in ([0, 4], [0, 0], [3, 1]):
        shard.apply_rows(
            [
                RowsGradient(HYPERS["adam"], empty, np.empty((0, spec.dim), np.float32), count)
                for spec, count in zip(specs.sparse, pushed, strict=True)
            ]
        )
    assert shard.sparse_steps.tolist() == [1, 2]


@pytest.mark.parametrize("rule", RULES)
def test_rows_that_are_not_pushed_stay_as_they_are(rule):
    specs = TableSpecs((), (sparse_spec("emb", NUM_ROWS, DIM, rule),))
    layout = layouts(specs, 1)[0]
    shard = Shard(
        layout, np.zeros(layout.num_bytes, np.uint8), np.empty((0, HYPER_SIZE)), HYPERS[rule][None]
    )
    shard.initialize_rows()
    before = shard.rows(0).copy()
    np.testing.assert_array_equal(
        before, initial_rows("uniform", np.arange(NUM_ROWS), DIM, seed=7, scale=0.5)
    )
    rows = np.array([100, 0, 33])
    ones = np.ones((3, DIM), np.float32)
    shard.apply_rows([RowsGradient(HYPERS[rule], rows, ones, 3)])
    changed = (shard.rows(0) != before).any(axis=1)
    assert np.flatnonzero(changed).tolist() == [0, 33, 100]


def test_gather_and_set_rows():
    specs = TableSpecs((), (sparse_spec("emb", 10, 2),))
    layout = layouts(specs, 1)[0]
    shard = Shard(
        layout, np.zeros(layout.num_bytes, np.uint8), np.empty((0, HYPER_SIZE)), HYPERS["sgd"][None]
    )
    shard.set_rows(0, 4, np.float32([[1, 2], [3, 4]]))
    out = np.empty((4, 2), np.float32)
    shard.gather(0, np.array([5, 0, 4, 5]), out)
    assert out.tolist() == [[3, 4], [0, 0], [1, 2], [3, 4]]
    shard.gather(0, np.empty(0, np.int64), np.empty((0, 2), np.float32))


def test_state_starts_as_the_rule_says():
    shard = make_shard(specs_of("adagrad"), "adagrad")
    assert set(np.unique(shard.dense_state[0]["sum"])) == {np.float32(0.1)}
    assert set(np.unique(shard.sparse_state[0]["sum"])) == {np.float32(0.1)}
