"""Look-ups that are announced: the same rows as without, whatever else is looked up between."""

import itertools

import pytest
import torch
from torch import nn

from mpifleet.errors import ConfigError, KeyRangeError
from mpifleet.pull_ahead import ahead
from mpifleet.strategy import DistributedStrategy
from tests.unit.local_job import connect, single, table_of

IDS = [torch.tensor([[k, 2 * k]]) for k in range(6)]


def rows_of(embedding, optimizer, ids):
    return table_of(embedding, optimizer)[ids.reshape(-1)].reshape(1, -1)


class Asked:
    """Counts the pulls of an optimizer's exchange."""

    def __init__(self, optimizer, monkeypatch):
        self.times = 0
        exchange = optimizer._exchange
        begin = exchange.begin_rows

        def counted(*arguments):
            self.times += 1
            return begin(*arguments)

        monkeypatch.setattr(exchange, "begin_rows", counted)


@pytest.mark.parametrize("num_batches", [0, 1, 2, 10])
def test_batches_come_in_order_and_are_announced_so_many_ahead(num_batches):
    embedding, _ = single()
    told = []

    def look_ups(batch):
        told.append(batch)
        return {embedding: IDS[batch]}

    for position, batch in enumerate(ahead(range(6), look_ups, num_batches)):
        assert batch == position
        assert told == list(range(min(batch + max(num_batches, 1) + 1, 6)))


def test_an_announced_look_up_is_pulled_once(monkeypatch):
    embedding, optimizer = single()
    asked = Asked(optimizer, monkeypatch)
    for ids in ahead(IDS, lambda ids: {embedding: ids.clone()}, 2):
        assert torch.equal(embedding(ids).detach(), rows_of(embedding, optimizer, ids))
    assert asked.times == len(IDS)


def test_without_rows_the_keys_are_sorted_in_the_step_before(monkeypatch):
    embedding, optimizer = single()
    asked, sorted_in, now = Asked(optimizer, monkeypatch), [], []
    plan = embedding._plan
    monkeypatch.setattr(embedding, "_plan", lambda *ids: (sorted_in.append(now[-1]), plan(*ids))[1])
    for ids in ahead(IDS, lambda ids: {embedding: ids.clone()}, 0):
        now.append("forward")
        out = embedding(ids)
        assert torch.equal(out.detach(), rows_of(embedding, optimizer, ids))
        out.sum().backward()
        now.append("step")
        optimizer.step()
        optimizer.zero_grad()
    assert sorted_in == ["forward"] + ["step"] * 5  # the first has no step before it
    assert asked.times == len(IDS)


def test_a_key_outside_whose_rows_are_not_pulled_ahead_is_named_by_its_look_up():
    embedding, optimizer = single()
    bad = torch.tensor([[99]])
    for ids in ahead([IDS[0], bad], lambda ids: {embedding: ids}, 0):
        if ids is bad:
            with pytest.raises(KeyRangeError, match="key 99 is outside"):
                embedding(ids)
        else:
            embedding(ids).sum().backward()
            optimizer.step()


def test_other_look_ups_between_disturb_nothing(monkeypatch):
    embedding, optimizer = single()
    other = torch.tensor([[7, 8]])
    for ids in ahead(IDS, lambda ids: {embedding: ids}, 1):
        with torch.no_grad():
            embedding(ids)  # an evaluation takes nothing that training waits for
        assert torch.equal(embedding(other).detach(), rows_of(embedding, optimizer, other))
        asked = Asked(optimizer, monkeypatch)
        embedding(ids)
        assert asked.times == 0


def test_a_batch_left_out_is_forgotten(monkeypatch):
    embedding, optimizer = single()
    for number, ids in enumerate(ahead(IDS, lambda ids: {embedding: ids}, 1)):
        if number % 2:
            asked = Asked(optimizer, monkeypatch)
            embedding(ids)
            assert asked.times == 0


def test_after_a_break_nothing_is_expected(monkeypatch):
    embedding, optimizer = single()
    batches = ahead(IDS, lambda ids: {embedding: ids}, 3)
    for _ in batches:
        break
    batches.close()
    asked = Asked(optimizer, monkeypatch)
    embedding(IDS[1])
    assert asked.times == 1


def test_ids_changed_in_place_are_looked_up_anew():
    embedding, optimizer = single()
    ids = torch.tensor([[3, 4]])
    for _ in ahead([0], lambda _: {embedding: ids}, 1):
        ids[0, 0] = 9
        assert torch.equal(embedding(ids).detach(), rows_of(embedding, optimizer, ids))
    numbers = torch.tensor([[3, 4]]).numpy()
    shared = torch.from_numpy(numbers)
    for _ in ahead([0], lambda _: {embedding: shared}, 1):
        numbers[0, 0] = 9  # torch counts no change
        assert torch.equal(embedding(shared).detach(), rows_of(embedding, optimizer, shared))


@pytest.mark.parametrize("how", ["no_grad", "other ids"])
def test_what_nobody_looks_up_is_forgotten_and_said_once(how, capsys):
    name = f"unused, {how}"
    embedding, _ = single(name=name)
    for ids in itertools.chain(*(ahead(IDS, lambda ids: {embedding: ids}, 2) for _ in range(5))):
        with torch.set_grad_enabled(how != "no_grad"):
            embedding(ids if how == "no_grad" else ids + 1)
        assert len(embedding._expected._queue) <= 3
    assert len(embedding._expected._queue) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if repr(name) in line]
    assert len(said) == 1
    assert "was not made by the training of its batch" in said[0]


def test_ragged_look_ups():
    embedding, optimizer = single(pooling="sum")
    ids, offsets = torch.tensor([3, 4, 5]), torch.tensor([0, 2])
    for _ in ahead([0], lambda _: {embedding: (ids, offsets)}, 1):
        rows = table_of(embedding, optimizer)
        expected = torch.stack([rows[3] + rows[4], rows[5]])
        assert torch.equal(embedding(ids, offsets).detach(), expected)


def test_in_one_process_training_gives_the_same_bits():
    def train(num_batches):
        embedding, optimizer = single(name="same")
        for ids in ahead(IDS * 2, lambda ids: {embedding: ids}, num_batches):
            (embedding(ids) ** 2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return table_of(embedding, optimizer)

    assert torch.equal(train(0), train(3))
    assert torch.equal(train(0), train(1))


def test_a_key_outside_is_named_when_it_is_announced():
    embedding, _ = single()
    with pytest.raises(KeyRangeError, match="key 99 is outside"):
        next(ahead([0], lambda _: {embedding: torch.tensor([[99]])}, 1))


@pytest.mark.parametrize(
    ("look_ups", "said"),
    [(lambda ids: ids, "give a dict"), (lambda ids: {"t": ids}, "use fleet.SparseEmbedding")],
)
def test_wrong_look_ups_are_refused(look_ups, said):
    with pytest.raises(ConfigError, match=said):
        next(ahead(IDS, look_ups, 1))


def test_sync_mode_pulls_nothing_ahead():
    strategy = DistributedStrategy()
    strategy.pull_ahead = 2
    with pytest.raises(ConfigError, match=r"pull_ahead = 2 with strategy.a_sync = False"):
        strategy.a_sync = False
    assert strategy.a_sync
    strategy.pull_ahead = 0
    strategy.a_sync = False
    with pytest.raises(ConfigError, match=r"pull_ahead = 1 .*would miss an update"):
        strategy.pull_ahead = 1


def test_dense_models_expect_nothing():
    model = nn.Linear(2, 1)
    optimizer = connect(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in ahead(range(3), lambda _: {}, 2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("num_batches", [0, 1, 5])
@pytest.mark.parametrize("where", ["batches", "look-ups"])
def test_what_came_before_an_error_is_trained_before_it_is_raised(num_batches, where):
    embedding, _ = single()

    def batches():
        yield from IDS[:4]
        if where == "batches":
            raise OSError("the disk is gone")
        yield IDS[4]

    def look_ups(ids):
        if where == "look-ups" and ids is IDS[4]:
            raise OSError("the disk is gone")
        return {embedding: ids}

    trained = []
    try:
        for ids in ahead(batches(), look_ups, num_batches):
            embedding(ids)
            trained.append(ids)
    except OSError:
        trained.append("raised")
    assert trained == [*IDS[:4], "raised"]
    assert not embedding._expected._queue


def test_ids_of_another_width_are_the_same_look_up(monkeypatch):
    embedding, optimizer = single()
    asked = Asked(optimizer, monkeypatch)
    for ids in ahead(IDS, lambda ids: {embedding: ids.int()}, 1):
        embedding(ids)
    assert asked.times == len(IDS)
