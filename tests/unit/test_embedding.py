"""SparseEmbedding against nn.Embedding and nn.EmbeddingBag: outputs, gradients, errors."""

import copy
import io

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mpifleet.embedding import SparseEmbedding
from mpifleet.errors import KeyRangeError, NotAvailable, TableError
from tests.unit.local_job import connect, single, table_of, twin

GENERATOR = torch.Generator().manual_seed(3)


def ragged(num_bags, rows, longest=5, dtype=torch.int64):
    """Flat ids with duplicates and empty bags, and where each bag begins."""
    lengths = torch.randint(0, longest + 1, (num_bags,), generator=GENERATOR)
    lengths[0] = lengths[-1] = 0
    ids = torch.randint(rows, (int(lengths.sum()),), generator=GENERATOR)
    return ids.to(dtype), lengths.cumsum(0) - lengths


def same_update(embedding, optimizer, ours, reference, theirs, *, exact=True):
    """Both outputs agree, and one sgd step with the same upstream gradient changes rows alike."""
    torch.testing.assert_close(ours, theirs, rtol=0 if exact else 1e-14, atol=0 if exact else 1e-14)
    upstream = torch.randn(ours.shape, dtype=ours.dtype, generator=GENERATOR)
    (ours * upstream).sum().backward()
    (theirs * upstream).sum().backward()
    optimizer.step()
    with torch.no_grad():
        reference.weight -= 0.5 * reference.weight.grad
    torch.testing.assert_close(
        table_of(embedding, optimizer), reference.weight.detach(), rtol=1e-12, atol=1e-13
    )


@pytest.mark.parametrize("padding", [None, 4])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32])
def test_ragged_bags_equal_embedding_bag(pooling, padding, ids_dtype):
    embedding, optimizer = single(pooling=pooling, padding_idx=padding)
    reference = twin(embedding, optimizer, padding_idx=padding)
    ids, offsets = ragged(13, 20, dtype=ids_dtype)
    theirs = reference(ids.long(), offsets)
    same_update(embedding, optimizer, embedding(ids, offsets), reference, theirs, exact=False)


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_rectangular_bags_equal_embedding_bag(pooling):
    embedding, optimizer = single(pooling=pooling)
    reference = twin(embedding, optimizer)
    ids = torch.randint(20, (9, 4), generator=GENERATOR)
    same_update(embedding, optimizer, embedding(ids), reference, reference(ids), exact=False)


@pytest.mark.parametrize("padding", [None, 4])
def test_concat_equals_embedding_side_by_side(padding):
    embedding, optimizer = single(pooling="concat", padding_idx=padding)
    reference = twin(embedding, optimizer, padding_idx=padding)
    if padding is not None:
        with torch.no_grad():
            reference.weight[padding] = 0  # nn.Embedding reads the row, a padding of ours is zeros
    ids = torch.randint(20, (9, 4), generator=GENERATOR)
    ids[0] = 4
    ours, theirs = embedding(ids), reference(ids).flatten(1)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    upstream = torch.randn(ours.shape, dtype=ours.dtype, generator=GENERATOR)
    before = table_of(embedding, optimizer)
    (ours * upstream).sum().backward()
    (theirs * upstream).sum().backward()
    optimizer.step()
    change = table_of(embedding, optimizer) - before
    torch.testing.assert_close(change, -0.5 * reference.weight.grad, rtol=1e-12, atol=1e-13)


def test_slots_of_a_shared_table_stand_side_by_side():
    embedding, optimizer = single(pooling="sum", num_slots=3)
    reference = twin(embedding, optimizer)
    ids, offsets = ragged(4 * 3, 20)
    theirs = reference(ids, offsets).reshape(4, 9)
    same_update(embedding, optimizer, embedding(ids, offsets), reference, theirs, exact=False)


@pytest.mark.parametrize("pooling", ["sum", "concat"])
def test_slots_of_their_own_use_rows_of_their_own(pooling):
    embedding, optimizer = single(rows=5, pooling=pooling, num_slots=3, shared=False)
    assert embedding.table_rows == 15
    reference = twin(embedding, optimizer)
    ids = torch.randint(5, (6, 3), generator=GENERATOR)
    shifted = ids + torch.tensor([0, 5, 10])
    theirs = reference(shifted.reshape(-1, 1)) if pooling == "sum" else reference(shifted)
    same_update(embedding, optimizer, embedding(ids), reference, theirs.reshape(6, 9))
    with pytest.raises(KeyRangeError, match=r"'t'.*key 5 .*\[0, 5\)"):
        embedding(torch.full((1, 3), 5))


def test_three_dimensions_are_ids_per_slot():
    embedding, optimizer = single(rows=5, pooling="mean", num_slots=2, shared=False)
    reference = twin(embedding, optimizer)
    ids = torch.randint(5, (6, 2, 4), generator=GENERATOR)
    theirs = reference((ids + torch.tensor([[[0], [5]]])).reshape(12, 4)).reshape(6, 6)
    same_update(embedding, optimizer, embedding(ids), reference, theirs, exact=False)


@pytest.mark.parametrize("padding", [None, 0])
@pytest.mark.parametrize("pooling", ["sum", "mean", "concat"])
def test_no_samples_and_no_ids(pooling, padding):
    embedding, optimizer = single(pooling=pooling, num_slots=2, padding_idx=padding)
    empty = embedding(torch.zeros(0, 2, dtype=torch.int64))
    assert empty.shape == (0, 6)
    none = torch.zeros(0, dtype=torch.int64)
    assert embedding(none, none).shape[0] == 0
    bags = embedding(none, torch.zeros(8, dtype=torch.int64))
    assert bags.shape == (4, 6) if pooling != "concat" else (4, 0)
    assert not bags.any()
    before = table_of(embedding, optimizer)
    (empty.sum() + bags.sum()).backward()
    optimizer.step()
    assert torch.equal(table_of(embedding, optimizer), before)


def test_an_empty_batch_joins_dense_inputs():
    embedding, _ = single(pooling="concat")
    out = embedding(torch.zeros(0, 4, dtype=torch.int64))
    assert torch.cat([out, torch.zeros(0, 2, dtype=out.dtype)], 1).shape == (0, 14)


def test_ids_that_are_not_contiguous():
    embedding, optimizer = single(pooling="concat")
    reference = twin(embedding, optimizer)
    ids = torch.randint(20, (4, 9), generator=GENERATOR).t()
    assert not ids.is_contiguous()
    same_update(embedding, optimizer, embedding(ids), reference, reference(ids).flatten(1))


def test_no_grad_look_ups_push_nothing_and_change_no_state():
    embedding, optimizer = single(pooling="sum", optimizer=torch.optim.Adam)
    shard = optimizer._exchange._shard
    with torch.no_grad():
        out = embedding(torch.tensor([[1, 2]]))
    assert not out.requires_grad
    with torch.inference_mode():
        assert torch.equal(embedding(torch.tensor([[1, 2]])), out)
    before = table_of(embedding, optimizer)
    optimizer.step()
    assert torch.equal(table_of(embedding, optimizer), before)
    assert shard.sparse_steps[0] == 0
    assert not any(values.any() for values in shard.sparse_state[0].values())


def one_row(embedding, key=1):
    return embedding(torch.tensor([[key]])).sum()


def change(embedding, optimizer, key=1):
    """How far a step moves a row whose gradient is one per contribution: lr 0.5."""
    before = table_of(embedding, optimizer)[key]
    optimizer.step()
    return ((before - table_of(embedding, optimizer)[key]) / 0.5).tolist()


def test_several_forwards_and_backwards_sum():
    embedding, optimizer = single(pooling="sum")
    one_row(embedding).backward()
    one_row(embedding).backward()
    (one_row(embedding) + 2 * one_row(embedding)).backward()  # two look-ups of one forward
    assert change(embedding, optimizer) == [5, 5, 5]


def test_gradients_accumulate_over_steps_until_zero_grad():
    embedding, optimizer = single(pooling="sum")
    one_row(embedding).backward()
    assert change(embedding, optimizer) == [1, 1, 1]
    one_row(embedding).backward()
    assert change(embedding, optimizer) == [2, 2, 2]
    optimizer.zero_grad()
    assert change(embedding, optimizer) == [0, 0, 0]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("whose", ["optimizer", "model"])
def test_zero_grad_forgets_rows(whose, set_to_none):
    embedding, optimizer = single(pooling="sum")
    one_row(embedding).backward()
    (optimizer if whose == "optimizer" else embedding).zero_grad(set_to_none=set_to_none)
    assert change(embedding, optimizer) == [0, 0, 0]
    one_row(embedding).backward()
    (optimizer if whose == "optimizer" else embedding).zero_grad(set_to_none=set_to_none)
    one_row(embedding).backward()
    assert change(embedding, optimizer) == [1, 1, 1]


def test_grad_leaves_nothing_behind():
    embedding, optimizer = single(pooling="sum")
    torch.autograd.grad(one_row(embedding), embedding.weight)
    assert change(embedding, optimizer) == [0, 0, 0]
    torch.autograd.grad(one_row(embedding), embedding.weight)
    one_row(embedding).backward()
    assert change(embedding, optimizer) == [1, 1, 1]


def test_a_kept_graph_counts_once_per_backward():
    embedding, optimizer = single(pooling="sum")
    loss = one_row(embedding)
    loss.backward(retain_graph=True)
    loss.backward()
    assert change(embedding, optimizer) == [2, 2, 2]


def test_a_second_derivative_is_refused():
    embedding, _ = single(pooling="sum")
    scale = torch.ones(1, dtype=torch.float64, requires_grad=True)
    loss = ((one_row(embedding) * scale) ** 2).sum()
    (gradient,) = torch.autograd.grad(loss, embedding.weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_forwards_count_once(use_reentrant):
    embedding, optimizer = single(pooling="sum")
    again = torch.utils.checkpoint.checkpoint
    anchor = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    again(lambda x: one_row(embedding) + x, anchor, use_reentrant=use_reentrant).sum().backward()
    assert change(embedding, optimizer) == [1, 1, 1]


def test_padding_is_never_trained():
    embedding, optimizer = single(pooling="sum", padding_idx=2)
    assert embedding(torch.tensor([[2, 2]])).tolist() == [[0, 0, 0]]
    before = table_of(embedding, optimizer)
    embedding(torch.tensor([[2, 1]])).sum().backward()
    optimizer.step()
    moved = (table_of(embedding, optimizer) != before).any(1).nonzero().flatten().tolist()
    assert moved == [1]


def test_autocast_computes_in_bf16_and_keeps_rows_in_float32():
    torch.manual_seed(0)
    embedding = SparseEmbedding("t", 20, 4, pooling="sum")
    linear = nn.Linear(4, 2)
    model = nn.Sequential(embedding, linear)
    optimizer = connect(model, torch.optim.SGD(model.parameters(), lr=0.5))
    before = table_of(embedding, optimizer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(torch.tensor([[3, 3, 5]]))
        assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    optimizer.step()
    after = table_of(embedding, optimizer)
    assert after.dtype == torch.float32
    ratio = (before - after)[3] / (before - after)[5]
    torch.testing.assert_close(ratio, torch.full((4,), 2.0), rtol=1e-5, atol=0)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: load(saved(m))], ids=["deep", "torch"])
def test_a_copy_is_a_table_of_its_own(copied):
    embedding, optimizer = single(pooling="sum")
    one_row(embedding).backward()
    other = copied(embedding)
    with pytest.raises(TableError, match="not connected"):
        one_row(other)
    theirs = connect(other, torch.optim.SGD(other.parameters(), lr=0.5))
    assert change(other, theirs) == [0, 0, 0]
    one_row(other).backward()
    assert change(other, theirs) == [1, 1, 1]
    assert change(embedding, optimizer) == [1, 1, 1]


def saved(model):
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    return stream


def load(stream):
    return torch.load(stream, weights_only=False)


def test_first_rows_do_not_depend_on_what_was_looked_up_before():
    one, other = single(), single()
    one[0](torch.tensor([[7, 1]]))
    assert torch.equal(table_of(*one), table_of(*other))
    scale = 3**-0.5
    assert table_of(*one).abs().max() <= scale
    assert len(set(table_of(*one).flatten().tolist())) == 60


@pytest.mark.parametrize(
    ("ids", "offsets", "error", "words"),
    [
        (torch.tensor([[20]]), None, KeyRangeError, r"'t'.*key 20 .*\[0, 20\)"),
        (torch.tensor([[-1]]), None, KeyRangeError, r"'t'.*key -1 "),
        (torch.tensor([[1.0]]), None, TableError, "'t'.*integers.*float32"),
        (torch.tensor([1]), None, TableError, r"'t'.*\[1\]"),
        (torch.zeros(1, 2, 3, dtype=torch.int64), None, TableError, r"'t'.*\[1, 2, 3\]"),
        (torch.tensor([1, 2]), torch.tensor([1]), TableError, "'t'.*begin at 0"),
        (torch.tensor([1, 2]), torch.tensor([0, 2, 1]), TableError, "'t'.*not decrease"),
        (torch.tensor([1, 2]), torch.tensor([0, 3]), TableError, "'t'.*up to 2"),
        (torch.tensor([[1, 2]]), torch.tensor([0]), TableError, r"'t'.*\[1, 2\]"),
        ([[1, 2]], None, TableError, r"'t': ids=\[\[1, 2\]\] is of type list; use a tensor"),
        (np.array([[1]]), None, TableError, r"'t': ids=array.* type ndarray; use a tensor"),
        (torch.tensor([1, 2]), [0], TableError, r"'t': offsets=\[0\] is of type list"),
        (None, None, TableError, "'t': ids=None is of type NoneType"),
    ],
)
def test_what_does_not_fit_is_named(ids, offsets, error, words):
    embedding, _ = single(pooling="sum")
    with pytest.raises(error, match=words):
        embedding(ids, offsets)


def test_bags_of_different_length_cannot_stand_side_by_side():
    embedding, _ = single(pooling="concat")
    with pytest.raises(TableError, match=r"'t'.*bag 1 has 1 ids, bag 0 has 2"):
        embedding(torch.tensor([1, 2, 3]), torch.tensor([0, 2]))


def test_the_gradient_of_a_step_is_what_finite_differences_say():
    embedding, optimizer = single(pooling="mean")
    ids, offsets = ragged(6, 20)
    weights = torch.randn(6, 3, dtype=torch.float64, generator=GENERATOR)
    rows = table_of(embedding, optimizer)

    def loss(table):
        return (nn.functional.embedding_bag(ids, table, offsets, mode="mean") * weights).sum()

    (embedding(ids, offsets) * weights).sum().backward()
    optimizer.step()
    gradient = (rows - table_of(embedding, optimizer)) / 0.5
    numeric = np.zeros(rows.shape)
    for place in np.ndindex(*rows.shape):
        up, down = rows.clone(), rows.clone()
        up[place] += 1e-6
        down[place] -= 1e-6
        numeric[place] = (loss(up) - loss(down)) / 2e-6
    np.testing.assert_allclose(gradient.numpy(), numeric, atol=1e-8)


def test_nested_backward_passes_keep_all_gradients():
    embedding = SparseEmbedding("e", 20, 1, pooling="sum", initializer="zeros")
    optimizer = connect(embedding, torch.optim.SGD(embedding.parameters(), 1.0))
    outside = embedding(torch.tensor([[1]]))
    inside = checkpoint(
        lambda scale: embedding(torch.tensor([[2]])) * scale,
        torch.ones(1, requires_grad=True),
        use_reentrant=True,
    )
    (outside + inside + embedding(torch.tensor([[3]]))).sum().backward()
    optimizer.step()
    with torch.no_grad():
        rows = embedding(torch.tensor([[1], [2], [3], [4]])).flatten().tolist()
    assert rows == [-1, -1, -1, 0]


def test_a_grad_scaler_is_refused():
    embedding = SparseEmbedding("e", 20, 1, pooling="sum")
    optimizer = connect(embedding, torch.optim.SGD(embedding.parameters(), 1.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(embedding(torch.tensor([[1]])).sum()).backward()
    with pytest.raises(NotAvailable, match="GradScaler"):
        scaler.step(optimizer)
