"""Options of a table are checked when the SparseEmbedding is made, each by name."""

import numpy as np
import pytest
import torch

from mpifleet.embedding import SparseEmbedding
from mpifleet.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": ""}, "table name ''"),
        ({"name": "a/b"}, "table name 'a/b'"),
        ({"name": np.zeros(2)}, "table name array"),
        ({"num_rows": 0}, "num_rows=0; use a whole number of at least 1"),
        ({"num_rows": True}, "num_rows=True; "),
        ({"num_rows": 2.0}, r"num_rows=2\.0; "),
        ({"num_rows": "3"}, "num_rows='3'; "),
        ({"dim": 1.5}, r"dim=1\.5; "),
        ({"num_slots": 0}, "num_slots=0; "),
        ({"pooling": "max"}, "pooling='max'; use one of sum, mean, concat"),
        ({"pooling": ["sum"]}, r"pooling=\['sum'\]; "),
        ({"shared": "no"}, "shared='no'; use True or False"),
        ({"shared": 0}, "shared=0; use True or False"),
        ({"initializer": "xavier"}, "initializer='xavier'; use one of uniform, normal, zeros, con"),
        ({"initializer": None}, "initializer=None; "),
        ({"scale": "x"}, "scale='x' of initializer 'uniform'; use None or a finite number of at l"),
        ({"scale": True}, "scale=True of initializer"),
        ({"scale": -0.5, "initializer": "normal"}, r"scale=-0\.5 of initializer 'normal'; "),
        ({"scale": float("nan")}, "scale=nan of "),
        ({"scale": float("inf"), "initializer": "constant"}, "constant'; use None or a finite num"),
        ({"seed": 1.5}, r"seed=1\.5; use a whole number"),
        ({"seed": "1"}, "seed='1'; "),
        ({"padding_idx": 9}, r"padding_idx=9; use None or a whole number in \[0, 9\)"),
        ({"padding_idx": -1}, "padding_idx=-1; "),
        ({"padding_idx": 1.5}, r"padding_idx=1\.5; "),
        ({"padding_idx": "x"}, "padding_idx='x'; "),
        ({"dtype": torch.bfloat16}, r"dtype=torch\.bfloat16; use torch\.float32 or torch\.float64"),
    ],
)
def test_options_are_checked_by_name(options, words):
    with pytest.raises(ConfigError, match=words) as caught:
        SparseEmbedding(**{"name": "tab", "num_rows": 9, "dim": 2, **options})
    assert "name" in options or str(caught.value).startswith("table 'tab': ")


def test_numpy_numbers_are_numbers():
    embedding = SparseEmbedding(
        "e", np.int64(5), np.int32(2), scale=np.float32(0.5), seed=np.int8(3)
    )
    assert embedding.table_rows == 5
    kept = (embedding.scale, embedding.seed)
    assert kept == (0.5, 3)
    assert [type(value) for value in kept] == [float, int]  # they travel as JSON


def test_a_constant_may_be_negative():
    assert SparseEmbedding("e", 5, 2, initializer="constant", scale=-1).scale == -1.0
