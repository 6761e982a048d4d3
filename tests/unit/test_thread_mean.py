"""The mean of threads' gradients against dense arithmetic."""

import numpy as np
import pytest
import torch
from torch import nn

from mpifleet.embedding import SparseEmbedding
from mpifleet.errors import ConfigError
from mpifleet.exchange import Gradients
from mpifleet.model_tables import ModelTables
from mpifleet.partition import unique_keys
from mpifleet.thread_mean import mean_of
from mpifleet.training_threads import make_threads

ROWS, DIM, SERVERS = 31, 3, 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = SparseEmbedding("t", ROWS, DIM, dtype=torch.float64)
        self.one = nn.Parameter(torch.zeros(4, dtype=torch.float64))
        self.two = nn.Parameter(torch.zeros(2, dtype=torch.float64))


def specs():
    model = Net()
    return ModelTables.of(torch.optim.SGD(model.parameters(), lr=0.1), model).specs


def gradients(rng, present):
    unique = unique_keys(rng.integers(0, ROWS, 12), ROWS, SERVERS, "t")
    rows = rng.integers(-50, 50, (unique.keys.size, DIM)).astype(np.float64)
    dense = rng.integers(-50, 50, 6).astype(np.float64) * np.repeat(present, [4, 2])
    flags = np.array(present, np.uint8)
    hypers = np.zeros((1, 8))
    return Gradients(hypers, [flags], [dense], hypers, [unique], [rows])


def as_dense(unique, rows):
    out = np.zeros((ROWS, DIM))
    np.add.at(out, unique.keys, rows)
    return out


def test_the_mean_is_that_of_dense_arrays():
    rng = np.random.default_rng(5)
    given = [gradients(rng, present) for present in ([1, 0], [1, 1], [0, 0], [1, 0])]
    dense = np.mean([each.dense[0] for each in given], axis=0)
    rows = np.mean([as_dense(each.unique[0], each.rows[0]) for each in given], axis=0)
    mean = mean_of(given, specs(), SERVERS)
    np.testing.assert_array_equal(mean.dense[0], dense)
    np.testing.assert_array_equal(mean.present[0], [1, 1])
    np.testing.assert_array_equal(as_dense(mean.unique[0], mean.rows[0]), rows)
    assert np.unique(mean.unique[0].keys).size == mean.unique[0].keys.size
    assert mean.unique[0].num_servers == SERVERS


def test_of_one_thread_it_is_the_same_object():
    one = gradients(np.random.default_rng(1), [1, 1])
    assert mean_of([one], specs(), SERVERS) is one


@pytest.mark.parametrize("number", [0, -1, 2.5, "3", True])
def test_a_number_of_threads_that_cannot_be_is_named(number):
    with pytest.raises(ConfigError, match=f"thread_num={number!r}"):
        make_threads(None, Net(), None, number, False)


def test_the_number_of_threads_comes_from_fleets_variable(monkeypatch):
    monkeypatch.setenv("CPU_NUM", "0")
    with pytest.raises(ConfigError, match="CPU_NUM=0"):
        make_threads(None, Net(), None, None, False)
    monkeypatch.delenv("CPU_NUM")
    (alone,) = make_threads(None, Net(), None, None, False)
    assert (alone.index, alone.num) == (0, 1)
    with pytest.raises(ConfigError, match="distributed_model"):
        make_threads(None, None, None, None, False)
