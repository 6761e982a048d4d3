"""DistributedOptimizer against torch.optim on the same model, in one process."""

import copy

import pytest
import torch
from torch import nn

from mpifleet.embedding import SparseEmbedding
from mpifleet.errors import ConfigError, NonFiniteGradient, TableError
from mpifleet.optimizer import DistributedOptimizer
from tests.unit.local_job import connect, single, table_of
from tests.unit.torch_reference import DTYPE, TwoTables, batches, follow, loss_of, net

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.1),
    "nesterov": lambda p: torch.optim.SGD(
        p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "adagrad": lambda p: torch.optim.Adagrad(
        p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.2, weight_decay=0.01
    ),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "maximize": lambda p: torch.optim.Adam(p, lr=0.01, maximize=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_dense_parameters_follow_torch(name):
    follow(lambda model: OPTIMIZERS[name](model.parameters()))


@pytest.mark.parametrize("eps", [1e-8, 1e-3])
def test_tables_under_adam_follow_sparse_adam(eps):
    def build(params):
        return torch.optim.SparseAdam(list(params), lr=0.02, eps=eps)

    embedding = SparseEmbedding("t", 30, 4, pooling="concat", dtype=DTYPE)
    optimizer = connect(embedding, build(embedding.parameters()))
    reference = nn.Embedding.from_pretrained(
        table_of(embedding, optimizer).clone(), freeze=False, sparse=True
    )
    theirs = build(reference.parameters())
    generator = torch.Generator().manual_seed(5)
    for _ in range(25):
        ids = torch.randint(30, (4, 3), generator=generator)
        for module, stepper in ((embedding, optimizer), (reference, theirs)):
            stepper.zero_grad()
            module(ids).reshape(4, -1).square().sum().backward()
            stepper.step()
        torch.testing.assert_close(
            table_of(embedding, optimizer), reference.weight.detach(), rtol=1e-9, atol=1e-12
        )


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.first = nn.Linear(4, 4, dtype=DTYPE)
        self.second = nn.Linear(4, 4, dtype=DTYPE)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def test_tied_parameters():
    ours, _ = follow(lambda model: torch.optim.Adam(model.parameters(), lr=0.05), make=Tied)
    assert ours.first.weight is ours.second.weight


class Image(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.conv = nn.Conv2d(2, 3, 2, dtype=DTYPE).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(6, 5, dtype=DTYPE).t())

    def forward(self, x):
        pixels = torch.cat([x, x[:, :4] * 2], 1).reshape(-1, 2, 2, 2)
        return self.conv(pixels).flatten(1) @ self.turned[:3, :]


def test_parameters_that_are_not_contiguous():
    assert not Image().turned.is_contiguous()
    ours, _ = follow(lambda m: torch.optim.Adam(m.parameters(), lr=0.05), make=Image, steps=8)
    assert ours.conv.weight.is_contiguous(memory_format=torch.channels_last)


def test_float32_and_float64_in_one_model():
    def make():
        model = net()
        model[0].float()
        model.insert(0, Cast(torch.float32))
        model.insert(2, Cast(DTYPE))
        return model

    follow(lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), make=make, steps=8)


class Cast(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        return x.to(self.dtype)


def test_scalars_and_empty_parameters():
    model = nn.Module()
    model.scalar = nn.Parameter(torch.tensor(1.0))
    model.empty = nn.Parameter(torch.zeros(0, 3))
    optimizer = connect(model, torch.optim.Adam(model.parameters(), lr=0.5))
    (model.scalar * 2 + model.empty.sum()).backward()
    optimizer.step()
    assert model.scalar.item() == pytest.approx(0.5, abs=1e-6)


def test_a_model_of_tables_only():
    embedding, optimizer = single(pooling="sum", initializer="zeros")
    embedding(torch.tensor([[1, 1]])).sum().backward()
    optimizer.step()
    assert table_of(embedding, optimizer)[1].tolist() == [-1, -1, -1]


def test_torch_clipping_before_step():
    def clip(model, stepper):
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    follow(lambda model: torch.optim.SGD(model.parameters(), lr=0.5), each=clip)


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_our_clipping_counts_rows_too(max_norm):
    """The oracle is torch's own clipping over nn.Embedding and the other parameters."""
    torch.manual_seed(0)
    embedding = SparseEmbedding("t", 9, 3, pooling="sum", dtype=DTYPE)
    head = nn.Linear(3, 2, dtype=DTYPE)
    model = nn.ModuleList([embedding, head])
    optimizer = connect(model, torch.optim.SGD(model.parameters(), lr=1.0))
    bag = nn.EmbeddingBag.from_pretrained(
        table_of(embedding, optimizer).clone(), freeze=False, mode="sum"
    )
    theirs = nn.ModuleList([bag, copy.deepcopy(head)])
    first, second = torch.tensor([[1, 1, 2]]), torch.tensor([[2, 5]])
    for pair in (model, theirs):
        for ids in (first, second):  # two backwards: the norm is that of their sum
            pair[1](pair[0](ids)).square().sum().backward()
    norm = nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
    torch.testing.assert_close(optimizer.clip_grad_norm_(max_norm), norm)
    optimizer.step()
    torch.optim.SGD(theirs.parameters(), lr=1.0).step()
    torch.testing.assert_close(table_of(embedding, optimizer), bag.weight.detach())
    torch.testing.assert_close(head.weight, theirs[1].weight)


def test_a_closure_is_called_once_with_gradients_on():
    model = net()
    optimizer = connect(model, torch.optim.SGD(model.parameters(), lr=0.1))
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        loss = loss_of(model, batches(1)[0])
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert calls == [True]
    assert loss.item() > loss_of(model, batches(1)[0]).item()


def test_optimizers_without_a_rule_are_refused_with_a_list():
    model = net()
    with pytest.raises(ConfigError, match=r"RMSprop.*SGD, Adagrad, Adam, AdamW, SparseAdam"):
        DistributedOptimizer(torch.optim.RMSprop(model.parameters()), model)


def test_half_precision_parameters_are_refused_by_name():
    model = net().to(torch.bfloat16)
    with pytest.raises(ConfigError, match=r"'0.weight'.*bfloat16.*autocast"):
        DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)


def test_two_tables_of_one_name_are_refused():
    model = nn.ModuleList([SparseEmbedding("t", 3, 2), SparseEmbedding("t", 3, 2)])
    with pytest.raises(ConfigError, match="2 tables are called 't'"):
        DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)


def test_nothing_works_before_the_start():
    model = nn.Sequential(SparseEmbedding("t", 3, 2))
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with pytest.raises(TableError, match="init_worker"):
        optimizer.step()
    with pytest.raises(TableError, match=r"'t'.*init_worker"):
        model(torch.tensor([[1]]))


@pytest.mark.parametrize("where", ["dense", "rows"])
def test_non_finite_gradients_touch_nothing(where):
    model = TwoTables()
    optimizer = connect(model, torch.optim.SGD(model.parameters(), lr=1.0))
    loss = model()
    if where == "rows":
        loss = loss + float("nan") * model.slow(torch.tensor([[2]])).sum()
    loss.backward()
    if where == "dense":
        model.dense.grad[0] = float("inf")
    table = "slow" if where == "rows" else "dense0.float64"
    with pytest.raises(NonFiniteGradient, match=f"worker 0 .* table '{table}' at step 1"):
        optimizer.step()
    assert not table_of(model.slow, optimizer).any()
    assert not table_of(model.fast, optimizer).any()
    optimizer.refresh()
    assert not model.dense.any()


def test_non_finite_gradients_can_be_skipped():
    model = TwoTables()
    optimizer = connect(model, torch.optim.SGD(model.parameters(), lr=1.0), nonfinite="skip")
    for factor in (1.0, float("nan"), 1.0):
        optimizer.zero_grad()
        (model() * factor).backward()
        optimizer.step()
    assert model.dense.tolist() == [-2, -2]
    assert table_of(model.fast, optimizer)[1].tolist() == [-2, -2]


def test_a_backward_through_values_that_have_changed_is_refused():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = connect(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = model(torch.ones(1, 2)).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_parameters_that_moved_to_other_memory_are_still_read():
    model, twin = nn.Linear(2, 3), nn.Linear(2, 3)
    twin.load_state_dict(model.state_dict())
    optimizer = connect(model, torch.optim.SGD(model.parameters(), lr=0.1))
    theirs = torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(3):
        if step == 1:
            model.weight.data = model.weight.data.clone()  # as model.to(...) does
        for module, stepper in ((model, optimizer), (twin, theirs)):
            stepper.zero_grad()
            module(torch.ones(1, 2)).sum().backward()
            stepper.step()
        assert torch.equal(model.weight, twin.weight)


def test_a_copy_of_the_model_does_not_follow():
    model = nn.Linear(2, 3)
    optimizer = connect(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = copy.deepcopy(model)
    weight = before.weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert torch.equal(before.weight, weight)
    assert not torch.equal(model.weight, weight)


def test_parameters_whose_storage_torch_has_moved_are_still_read():
    model, twin = nn.Linear(2, 3), nn.Linear(2, 3)
    twin.load_state_dict(model.state_dict())
    optimizer = connect(model, torch.optim.SGD(model.parameters(), lr=0.1))
    theirs = torch.optim.SGD(twin.parameters(), lr=0.1)
    model.share_memory()
    for module, stepper in ((model, optimizer), (twin, theirs)):
        module(torch.ones(1, 2)).sum().backward()
        stepper.step()
    assert torch.equal(model.weight, twin.weight)
    assert model.weight.is_shared()


def test_memory_that_others_see_stays_theirs():
    model = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(2, 3), "c": nn.Linear(2, 3)})
    model["a"].weight.data = model["b"].weight.data
    model["c"].share_memory()
    optimizer = connect(model, torch.optim.SGD(model.parameters(), lr=0.1))
    sum(layer(torch.ones(1, 2)).sum() for layer in model.values()).backward()
    optimizer.step()
    assert model["a"].weight.data_ptr() == model["b"].weight.data_ptr()
    assert model["c"].weight.is_shared()
