"""A directory for inference: the same predictions without a job, from all rows or some of them."""

import copy
import io
import json

import numpy as np
import pytest
import torch
from torch import nn

from mpifleet import current, fleet, inference
from mpifleet.embedding import SparseEmbedding
from mpifleet.errors import CheckpointError, ConfigError, KeyRangeError, TableError
from mpifleet.portable import inference_writing, sources
from mpifleet.portable.row_store import RowStore
from mpifleet.portable.safetensors_file import SafetensorsFile
from mpifleet.portable.sources import FirstValues
from tests.python_process import run_python
from tests.unit.local_job import LocalSession, connect

ROWS = 40
IDS = torch.tensor([[1, 5, 0, 3], [0, 0, 7, 7], [9, 1, 2, 0]])


class Net(nn.Module):
    """Two tables, one with padding and rows per slot, buffers, a tied and a frozen parameter."""

    def __init__(self, rows=ROWS, out=3, two="two"):
        super().__init__()
        self.one = SparseEmbedding(
            "öne", rows, 4, pooling="mean", num_slots=2, shared=False, padding_idx=0
        )
        self.part = nn.ModuleDict({"a": SparseEmbedding(two, rows, 2, initializer="normal")})
        self.norm = nn.BatchNorm1d(10)
        self.out = nn.Linear(10, out)
        self.tied = nn.Linear(10, out)
        self.tied.weight = self.out.weight
        self.frozen = nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.register_buffer("short", torch.tensor([1.5, 2.5], dtype=torch.bfloat16))
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("nothing", torch.empty(0, 3, dtype=torch.int64))

    def forward(self, ids):
        one = self.one(ids.reshape(-1, 2, 2))
        joined = torch.cat([one, self.part["a"](ids[:, :1])], 1)
        return self.frozen * (self.out(self.norm(joined)) + self.tied(joined))


class Plain(Net):
    """The same with torch's own modules for the tables."""

    def __init__(self, rows=ROWS):
        super().__init__(rows)
        self.one = nn.EmbeddingBag(2 * rows, 4, mode="mean", padding_idx=None)
        self.part = nn.ModuleDict({"a": nn.Embedding(rows, 2)})

    def forward(self, ids):
        rows = torch.stack([ids[:, :2], ids[:, 2:] + ROWS], 1).reshape(-1, 2)
        vectors = self.one.weight[rows]
        is_id = ((rows != 0) & (rows != ROWS)).float()
        one = (vectors * is_id[..., None]).sum(1) / is_id.sum(1).clamp(min=1)[:, None]
        joined = torch.cat([one.reshape(-1, 8), self.part["a"](ids[:, 0])], 1)
        return self.frozen * (self.out(self.norm(joined)) + self.tied(joined))


def train(model, optimizer, steps=3):
    for _ in range(steps):
        model(IDS).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def predictions(model, ids=IDS):
    with torch.no_grad():
        return model.eval()(ids)


@pytest.fixture
def job(monkeypatch):
    """A trained model whose job fleet's calls see; IDS were trained, other ids were not."""
    torch.manual_seed(0)
    model = Net()
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = connect(model, torch.optim.Adam(trained, 0.1))
    train(model, optimizer)
    monkeypatch.setattr(current, "_session", LocalSession(model, optimizer))
    monkeypatch.setattr(sources, "PIECE_BYTES", 100)
    return model


ALL_IDS = torch.arange(4 * ROWS).reshape(-1, 4) % ROWS


@pytest.mark.parametrize("keys", ["all", "trained"])
@pytest.mark.parametrize("mapped", [True, False])
def test_predictions_are_those_of_the_job(job, tmp_path, keys, mapped):
    fleet.save_inference_model(tmp_path / "served", keys=keys)
    model = inference.load(tmp_path / "served", Net(), mapped=mapped)
    for ids in (IDS, ALL_IDS, IDS[:0]):
        assert torch.equal(predictions(model, ids), predictions(job, ids))
    model.one(IDS.reshape(-1, 2, 2)), "with gradients, as somebody may forget to switch off"


def test_only_trained_rows_are_kept(job, tmp_path):
    fleet.save_inference_model(tmp_path / "all")
    fleet.save_inference_model(tmp_path / "some", keys="trained")
    ids = [sorted(set(IDS[:, part].flatten().tolist()) - {0}) for part in (slice(2), slice(2, 4))]
    wanted = [*ids[0], *(ROWS + key for key in ids[1])]
    file = SafetensorsFile(tmp_path / "some" / "rows-000001-000.safetensors")
    assert file.tensor("keys").tolist() == wanted
    whole = SafetensorsFile(tmp_path / "all" / "rows-000001-000.safetensors").tensor("rows")
    assert torch.equal(file.tensor("rows"), whole[wanted])
    facts = json.loads((tmp_path / "some" / "model.json").read_text())["tables"]
    assert [(t["name"], t["keys"], t["stored"]) for t in facts] == [
        ("öne", "trained", len(wanted)),
        ("two", "trained", 3),
    ]


def test_a_key_that_was_left_out_is_named_or_filled(job, tmp_path):
    fleet.save_inference_model(tmp_path, keys={"two": [0, 1, 9, 1]})
    assert torch.equal(predictions(inference.load(tmp_path, Net())), predictions(job))
    other = torch.tensor([[1, 5, 0, 3], [4, 0, 7, 7]])
    with pytest.raises(TableError, match="table 'two': key 4 is not among the 3 keys"):
        predictions(inference.load(tmp_path, Net()), other)
    first = inference.load(tmp_path, Net(), unknown="initial")
    assert torch.equal(predictions(first, other), predictions(job, other)), "4 was never trained"
    zeros = inference.load(tmp_path, Net(), unknown="zeros")
    with torch.no_grad():
        rows = [m.part["a"](torch.tensor([[4], [1]])) for m in (zeros, job)]
    assert rows[0].tolist() == [[0, 0], rows[1][1].tolist()]
    with pytest.raises(ConfigError, match=r"unknown='none'; use one of error, initial, zeros"):
        inference.load(tmp_path, Net(), unknown="none")


@pytest.mark.parametrize("keys", ["all", "trained"])
def test_a_plain_torch_model_is_filled(job, tmp_path, keys):
    fleet.save_inference_model(tmp_path, keys=keys)
    model = inference.load(tmp_path, Plain())
    torch.testing.assert_close(predictions(model, ALL_IDS), predictions(job, ALL_IDS))
    assert model.one.weight[[0, ROWS]].eq(0).all(), "what padding looks up is zeros"
    assert model.tied.weight is model.out.weight


def test_a_plain_torch_model_needs_all_rows_and_else_stays(job, tmp_path):
    fleet.save_inference_model(tmp_path, keys={"two": [0, 1]})
    model = Plain()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"'two' .* has 2 of 40 rows.*'part\.a' takes"):
        inference.load(tmp_path, model)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    inference.load(tmp_path, model, unknown="zeros")
    assert model.part["a"].weight[2:].eq(0).all()
    assert not model.part["a"].weight[:2].eq(0).all()


def test_a_model_with_untied_parameters_is_filled(job, tmp_path):
    fleet.save_inference_model(tmp_path)
    model = Net()
    model.tied.weight = nn.Parameter(torch.zeros(3, 10))
    assert torch.equal(predictions(inference.load(tmp_path, model)), predictions(job))


def test_keys_that_cannot_be_are_refused(job, tmp_path):
    for keys, error, message in (
        ("few", ConfigError, "keys='few'; use 'all', 'trained', or keys by table name"),
        (np.arange(2), ConfigError, r"keys=array\(\[0, 1\]\); use 'all', 'trained', or keys"),
        ({"three": [1]}, ConfigError, "table 'three': the model has no such table; it has 'öne'"),
        ({"two": [0.5]}, ConfigError, "keys of table 'two' are float64; use integers"),
        ({"two": [[1], [1, 2]]}, ConfigError, "keys of table 'two' are no array of integers: "),
        ({"two": [3, ROWS]}, KeyRangeError, r"key 40 is outside \[0, 40\)"),
        ({"two": [-1, 3]}, KeyRangeError, r"key -1 is outside \[0, 40\)"),
    ):
        with pytest.raises(error, match=message):
            fleet.save_inference_model(tmp_path / "new", keys=keys)
    assert not (tmp_path / "new").exists()
    fleet.save_inference_model(tmp_path / "new", keys={"two": []})
    with pytest.raises(TableError, match="key 0 is not among the 0 keys"):
        predictions(inference.load(tmp_path / "new", Net()))


def test_a_model_that_does_not_fit_is_named_and_stays(job, tmp_path):
    fleet.save_inference_model(tmp_path)
    lacking, more, wide = Net(), Net(), Net()
    del lacking.tied
    more.extra = nn.Linear(1, 1)
    wide.frozen = nn.Parameter(torch.tensor(0.0, dtype=torch.float64))
    plain = Plain()
    plain.part["a"] = nn.Linear(2, ROWS)
    for model, message in (
        (Net(out=4), r"'out.weight' is \(\(3, 10\), torch.float32\) in .* in the model"),
        (lacking, "parameter or buffer 'tied.bias' of .* is not in the model"),
        (more, "parameter or buffer 'extra.weight' of the model is not in"),
        (wide, "'frozen' is .*float32.* in .*float64"),
        (Net(rows=41), r"table 'öne' is \(80, 4, 'float32'\) in the file, \(82, 4"),
        (Net(two="three"), "table 'two'.* neither a SparseEmbedding .* at 'part.a'"),
        (plain, "table 'two'.* neither a SparseEmbedding"),
        (nn.Sequential(Net(), SparseEmbedding("more", 2, 2)), "table 'more' of the model is not"),
    ):
        before = {name: t.clone() for name, t in model.state_dict().items()}
        with pytest.raises(CheckpointError, match=message):
            inference.load(tmp_path, model)
        after = model.state_dict()
        assert all(torch.equal(t, after[name]) for name, t in before.items())


# -- the directory -------------------------------------------------------------------------------


def test_a_newer_model_takes_the_place_of_the_older(job, tmp_path):
    fleet.save_inference_model(tmp_path)
    old = inference.load(tmp_path, Net())
    before = predictions(old)
    optimizer = current.current().optimizer
    train(job.train(), optimizer)
    fleet.save_inference_model(tmp_path)
    new = inference.load(tmp_path, Net())
    assert torch.equal(predictions(new), predictions(job))
    assert torch.equal(predictions(old), before), "who has the older one goes on with it"
    assert not torch.equal(predictions(new), before)
    names = sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".sums")
    assert names == ["dense-000002.safetensors", "model.json"] + [
        f"rows-000002-00{table}.safetensors" for table in (0, 1)
    ]


def test_who_loads_while_the_model_is_replaced_gets_the_newer(job, tmp_path, monkeypatch):
    fleet.save_inference_model(tmp_path)
    optimizer, real, calls = current.current().optimizer, inference.open_inference, []

    def replaced_meanwhile(*arguments):
        found = real(*arguments)
        calls.append(found)
        if len(calls) == 1:  # its files go before any of them is read
            train(job.train(), optimizer)
            fleet.save_inference_model(tmp_path)
        return found

    monkeypatch.setattr(inference, "open_inference", replaced_meanwhile)
    model = inference.load(tmp_path, Net())
    assert len(calls) == 2
    assert torch.equal(predictions(model), predictions(job))


def test_a_failed_export_leaves_the_earlier_model(job, tmp_path, monkeypatch):
    fleet.save_inference_model(tmp_path)
    before = predictions(inference.load(tmp_path, Net()))
    train(job.train(), current.current().optimizer)
    real, calls = inference_writing.write_tensors, []

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return real(*arguments)

    monkeypatch.setattr(inference_writing, "write_tensors", failing)
    with pytest.raises(CheckpointError, match=r"cannot write a model into .*No space left"):
        fleet.save_inference_model(tmp_path)
    assert torch.equal(predictions(inference.load(tmp_path, Net())), before)
    assert not list(tmp_path.glob("*-000002*")), "nothing of it is left to fill the disk"
    fleet.save_inference_model(tmp_path)
    assert torch.equal(predictions(inference.load(tmp_path, Net())), predictions(job))
    assert not list(tmp_path.glob("*-000001*"))


def test_damage_is_refused(job, tmp_path):
    fleet.save_inference_model(tmp_path, keys="trained")
    intact = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for path, data in intact.items():
        for damaged in (data[:-3], data[: len(data) // 2], None):
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=r"no model|incomplete|damaged|cannot|trunc"):
                inference.load(tmp_path, Net())
            path.write_bytes(data)
    rows = tmp_path / "rows-000001-000.safetensors"
    rows.write_bytes(intact[rows][:-1] + bytes([intact[rows][-1] ^ 1]))
    with pytest.raises(CheckpointError, match="is damaged: bytes"):
        inference.load(tmp_path, Net())
    inference.load(tmp_path, Net(), verify=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.update(format_version=9), "format version 9; this mpifleet reads 1"),
        (lambda index: index.update(format="other"), "format 'other'"),
        (lambda index: index.update(dense="../dense.safetensors"), "not the name of a file in it"),
        (lambda index: index["tables"][0].update(file="/etc/passwd"), "not the name of a file"),
        (lambda index: index["tables"][0].update(keys="odd"), "keys 'odd'"),
        (lambda index: index["tables"][0].update(stored=3), "rows are .* says"),
        (lambda index: index["tables"][0].update(num_rows=9), "keys are not distinct, sorted and"),
        (lambda index: index["tables"][0].pop("dim"), "'dim'"),
    ],
)
def test_an_index_that_cannot_be_is_refused(job, tmp_path, change, message):
    fleet.save_inference_model(tmp_path, keys="trained")
    index = json.loads((tmp_path / "model.json").read_text())
    change(index)
    (tmp_path / "model.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        inference.load(tmp_path, Net(rows=5))


# -- the row store -------------------------------------------------------------------------------


def test_the_store_finds_what_a_dictionary_finds():
    generator = np.random.default_rng(0)
    keys = np.unique(generator.integers(0, 1_000, 300))
    rows = generator.normal(size=(keys.size, 3)).astype(np.float32)
    by_key = dict(zip(keys.tolist(), rows, strict=True))
    wanted = generator.integers(0, 1_000, 5_000)
    expected = np.array([by_key.get(key, np.zeros(3)) for key in wanted.tolist()], np.float32)
    store = RowStore("t", torch.from_numpy(rows), keys, "zeros")
    assert np.array_equal(store.take(wanted), expected)
    known = wanted[np.isin(wanted, keys)]
    strict = RowStore("t", torch.from_numpy(rows), keys)
    assert np.array_equal(strict.take(known), store.take(known))
    assert strict.take(known[:0]).shape == (0, 3)


def test_first_values_are_known_or_refused():
    with pytest.raises(ConfigError, match="table 't' does not say how its rows began"):
        RowStore("t", torch.zeros(1, 2), np.array([3]), "initial")
    whole = RowStore("t", torch.ones(1, 2), None, "initial")  # no key is unknown there
    assert whole.take(np.array([0])).tolist() == [[1, 1]]
    first = FirstValues("constant", 0.5, 1)
    store = RowStore("t", torch.zeros(1, 2), np.array([3]), "initial", first)
    assert store.take(np.array([2, 3, 9])).tolist() == [[0.5, 0.5], [0, 0], [0.5, 0.5]]


def test_a_loaded_model_is_not_trained(job, tmp_path):
    fleet.save_inference_model(tmp_path)
    model = inference.load(tmp_path, Net())
    with pytest.raises(TableError, match="'two' was loaded for inference: there is no step"):
        model.part["a"]._connected().step()


def test_a_loaded_model_is_copied(job, tmp_path):
    fleet.save_inference_model(tmp_path, keys="trained")
    model = inference.load(tmp_path, Net())
    twin = copy.deepcopy(model)
    assert torch.equal(predictions(twin), predictions(job))
    assert twin.part["a"]._connected().seat is not model.part["a"]._connected().seat
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(predictions(torch.load(file, weights_only=False)), predictions(job))


def test_predicting_needs_neither_mpi_nor_hdf5_to_be_used(job, tmp_path):
    """In a process where mpi4py cannot be imported."""
    fleet.save_inference_model(tmp_path, keys="trained")
    code = (
        "import sys; sys.modules['mpi4py'] = None\n"
        "import torch\nfrom mpifleet import inference\n"
        "from tests.unit.test_inference import Net, IDS, predictions\n"
        f"print(predictions(inference.load({str(tmp_path)!r}, Net())).tolist())"
    )
    assert json.loads(run_python("-c", code)) == predictions(job).tolist()
