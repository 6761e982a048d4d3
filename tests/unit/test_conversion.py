"""Whole models as state_dicts and vectors: out of a job or a checkpoint, and back into either."""

import re

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from mpifleet import current, fleet
from mpifleet.checkpoint import MODEL_FACT, blocks, open_checkpoint, write_checkpoint
from mpifleet.cli import main as cli
from mpifleet.embedding import SparseEmbedding
from mpifleet.errors import CheckpointError, ConfigError, DataError
from mpifleet.persistables import Persistables
from mpifleet.portable import sources
from mpifleet.portable.state_dict import read_state
from mpifleet.private_directory import private_directory
from tests.unit.local_job import LocalSession, connect, table_of
from tests.unit.test_inference import ROWS, Net, predictions, train


@pytest.fixture
def start(monkeypatch):
    """start(seed) -> a model whose job fleet's calls see from then on, trained a little."""
    monkeypatch.setattr(sources, "PIECE_BYTES", 100)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 100)

    def begin(seed=0, model=None):
        torch.manual_seed(seed)
        model = model or Net()
        trained = [param for param in model.parameters() if param.requires_grad]
        optimizer = connect(model, torch.optim.Adam(trained, 0.1))
        train(model, optimizer, 2 + seed)
        monkeypatch.setattr(current, "_session", LocalSession(model, optimizer))
        return model

    return begin


def values_of(model):
    """Everything a job holds, by the names of a plain model."""
    optimizer = current.current().optimizer
    optimizer.refresh()
    state = {n: t.clone() for n, t in model.state_dict().items() if "sparse" not in n}
    state["one.weight"] = table_of(model.one, optimizer).clone()
    state["part.a.weight"] = table_of(model.part["a"], optimizer).clone()
    return state


def with_zero_padding(state):
    """As plain modules have the rows that padding looks up."""
    state["one.weight"][[0, ROWS]] = 0
    return state


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert torch.equal(tensor, right[name]), name


READERS = {
    ".safetensors": safetensors.torch.load_file,
    ".pt": lambda path: torch.load(path, weights_only=True),
}


@pytest.mark.parametrize("suffix", READERS)
def test_a_job_becomes_a_plain_state_dict(start, tmp_path, suffix):
    model, path = start(), tmp_path / f"model{suffix}"
    fleet.save_state_dict(path)
    found = READERS[suffix](path)
    assert_same(dict(found), with_zero_padding(values_of(model)))
    assert found["short"].dtype == torch.bfloat16
    assert found["flag"].dtype == torch.bool
    assert_same(dict(read_state(path)), dict(found))


@pytest.mark.parametrize("suffix", READERS)
def test_a_checkpoint_gives_the_same_file(start, tmp_path, suffix):
    start()
    fleet.save_persistables(tmp_path / "saved")
    fleet.save_state_dict(tmp_path / f"job{suffix}")
    to = "safetensors" if suffix == ".safetensors" else "state_dict"
    command = ["export", str(tmp_path / "saved"), str(tmp_path / f"file{suffix}"), "--to", to]
    assert cli.main(command) == 0
    job, file = (READERS[suffix](tmp_path / f"{name}{suffix}") for name in ("job", "file"))
    assert_same(dict(job), dict(file))


@pytest.mark.parametrize("suffix", READERS)
def test_a_job_takes_over_a_state_dict(start, tmp_path, suffix):
    first = start()
    wanted, expected = with_zero_padding(values_of(first)), predictions(first)
    fleet.save_state_dict(tmp_path / f"model{suffix}")
    second = start(1)
    assert not torch.equal(predictions(second), expected)
    assert fleet.load_state_dict(tmp_path / f"model{suffix}") == ([], [])
    assert_same(values_of(second), wanted)
    assert torch.equal(predictions(second), expected)
    assert [path.name for path in tmp_path.iterdir()] == [f"model{suffix}"], "nothing is left"
    train(second.train(), current.current().optimizer)


def test_a_state_dict_of_plain_modules_in_half_precision_is_taken(start, tmp_path):
    model = start()
    state = {
        n: t.bfloat16() if t.dtype == torch.float32 else t for n, t in values_of(model).items()
    }
    del state["tied.weight"], state["out.bias"]
    state["two.weight"], state["more"] = state.pop("part.a.weight"), torch.zeros(1)
    safetensors.torch.save_file(state, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=r"'out.bias': not in .*; strict=False skips"):
        fleet.load_state_dict(tmp_path / "x.safetensors")
    before = values_of(model)
    report = fleet.load_state_dict(tmp_path / "x.safetensors", strict=False)
    assert report.missing_keys == ["out.bias"]
    assert report.unexpected_keys == ["more"]
    after = values_of(model)
    assert torch.equal(after["out.bias"], before["out.bias"])
    assert torch.equal(after["part.a.weight"], state["two.weight"].float())
    assert torch.equal(after["tied.weight"], state["out.weight"].float())


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("out.bias", torch.zeros(4), r"'out.bias' is \(4,\) in the file, \(3,\) in"),
        ("out.bias", torch.zeros(3).double(), "float64 in the file, float32 in .*cannot hold"),
        ("out.bias", torch.zeros(3, dtype=torch.int64), "int64 in the file"),
        ("short", torch.zeros(2), "float32 in the file, bfloat16 in"),
        ("one.weight", torch.zeros(ROWS, 4), r"\(40, 4\) in the file, \(80, 4\) in"),
        ("more", torch.zeros(4), "'more': in .* but not in the model"),
    ],
)
def test_what_does_not_fit_is_named(start, tmp_path, name, tensor, message):
    model = start()
    before = values_of(model)
    safetensors.torch.save_file(
        {k: v for k, v in before.items() if k != "tied.weight"} | {name: tensor},
        tmp_path / "x.safetensors",
    )
    with pytest.raises(CheckpointError, match=message):
        fleet.load_state_dict(tmp_path / "x.safetensors")
    assert_same(values_of(model), before)
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


class Harm:
    """What a pickle could run."""

    def __reduce__(self):
        return (exec, ("raise SystemExit('ran')",))


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({"a": Harm()}, "cannot be read as tensors"),
        ([torch.zeros(1)], "holds a list, not a state_dict"),
        ({"model": {"a": torch.zeros(1)}}, "'model' is a dict, not a tensor"),
        ({1: torch.zeros(1)}, "1 is a Tensor, not a tensor"),
    ],
)
def test_torch_files_hold_tensors_by_name_or_are_refused(tmp_path, saved, message):
    torch.save(saved, tmp_path / "x.pt")
    with pytest.raises(DataError, match=message):
        read_state(tmp_path / "x.pt")


def test_dense_parameters_go_alone(start, tmp_path):
    model = start()
    fleet.save_dense_params(tmp_path / "dense.safetensors")
    found = safetensors.torch.load_file(tmp_path / "dense.safetensors")
    names = values_of(model).keys() - {"one.weight", "part.a.weight", "tied.weight"}
    assert_same(found, {name: values_of(model)[name] for name in names})
    with pytest.raises(ConfigError, match="must come before init_worker"):
        fleet.load_dense_params(tmp_path / "dense.safetensors")
    session, other = current.current(), Net()
    session.model, session.exchange, session._job = other, None, None
    fleet.load_dense_params(tmp_path / "dense.safetensors")
    assert torch.equal(other.out.weight, model.out.weight)
    assert torch.equal(other.short, model.short)
    with pytest.raises(ConfigError, match=r"must end in .safetensors, .pt, .pth"):
        fleet.save_dense_params(tmp_path / "dense.h5")


@pytest.mark.parametrize("where", ["no.safetensors", "nowhere/no.safetensors"])
def test_a_missing_file_is_named_before_anything_is_written(start, tmp_path, monkeypatch, where):
    start()
    monkeypatch.setattr(Persistables, "save", lambda *_: pytest.fail("the job's state is written"))
    for load in (fleet.load_state_dict, lambda path: fleet.load_word2vec(path, "two")):
        with pytest.raises(CheckpointError, match=rf"{where} cannot be read: there is no such"):
            load(tmp_path / where)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("binary", [False, True])
def test_vectors_leave_and_enter_a_job(start, tmp_path, binary):
    first, path = start(), tmp_path / "vectors"
    (tmp_path / "words").write_text("".join(f"w{key}\n" for key in range(30)))
    vocab = tmp_path / "words"
    fleet.save_word2vec(path, "two", vocab=vocab, binary=binary)
    theirs = values_of(first)["part.a.weight"]
    second = start(1)
    before = values_of(second)
    report = fleet.load_word2vec(path, "two", vocab=vocab, binary=binary)
    assert (report.taken, report.missing, report.unknown) == (30, 0, 0)
    after = values_of(second)
    assert torch.equal(after["part.a.weight"][:30], theirs[:30])
    assert torch.equal(after["part.a.weight"][30:], before["part.a.weight"][30:])
    assert_same({**after, "part.a.weight": 0 * theirs}, {**before, "part.a.weight": 0 * theirs})
    with pytest.raises(CheckpointError, match="vectors of 2 elements, the table rows of 4"):
        fleet.load_word2vec(path, "öne", vocab=vocab, binary=binary)
    with pytest.raises(ConfigError, match="table 'three' is not in the model, which has 'öne'"):
        fleet.load_word2vec(path, "three", vocab=vocab, binary=binary)


def test_what_a_killed_import_left_goes_and_what_lives_stays(start, tmp_path):
    start()
    fleet.save_state_dict(tmp_path / "m.pt")
    (tmp_path / ".import-killed").mkdir()
    (tmp_path / ".import-killed" / "model.h5").write_bytes(b"x")
    (tmp_path / ".import-file").write_text("no directory")
    with private_directory(tmp_path, ".import-") as alive:
        fleet.load_state_dict(tmp_path / "m.pt")
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {".import-file", alive.name, "m.pt"}
        assert alive.stat().st_mode & 0o777 == 0o700
    assert not alive.exists()


def test_paths_that_are_none_are_named(start):
    start()
    for name in ("", None, 3, b"bytes", "nul\0"):
        for call in (
            fleet.save_persistables,
            fleet.load_persistables,
            fleet.save_checkpoint,
            fleet.resume,
            fleet.save_inference_model,
            fleet.save_state_dict,
            fleet.load_state_dict,
            lambda path: fleet.load_one_table("two", path),
            lambda path: fleet.save_word2vec("v", "two", vocab="" if path is None else path),
        ):
            with pytest.raises(ConfigError, match=r"(dirname|path|vocab)=.*; use a path"):
                call(name)


# -- commands ------------------------------------------------------------------------------------


@pytest.fixture
def mpifleet(capsys):
    """mpifleet(words...) -> (exit status, stdout, stderr)."""

    def run(*words):
        capsys.readouterr()
        try:
            status = cli.main([str(word) for word in words])
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    return run


def test_a_checkpoint_is_imported_and_loaded(start, tmp_path, mpifleet):
    first, wanted = start(), {}
    wanted = with_zero_padding(values_of(first))
    fleet.save_state_dict(tmp_path / "model.safetensors")
    second = start(1)
    fleet.save_persistables(tmp_path / "base")
    words = ("import", tmp_path / "model.safetensors", tmp_path / "warm", "--like")
    status, out, err = mpifleet(*words, tmp_path / "base")
    assert (status, err) == (0, "")
    assert re.fullmatch(r"\S+warm: [\d.]+ KiB in [\d.]+ s \([\d.]+ \w+/s\)\n", out)
    fleet.load_persistables(tmp_path / "warm")
    assert_same(values_of(second), wanted)


def test_vectors_are_imported_into_one_table_alone(start, tmp_path, mpifleet):
    start()
    fleet.save_one_table("two", tmp_path / "two")
    (tmp_path / "vectors").write_text("1 2\n3 1.5 2.5\n")
    words = ("import", tmp_path / "vectors", tmp_path / "two", "--like", tmp_path / "two")
    status, _, err = mpifleet(*words, "--from", "word2vec-text")
    assert (status, err) == (0, "")
    with open_checkpoint(tmp_path / "two") as checkpoint:
        assert checkpoint.path.name == "model-000002.h5"
        assert checkpoint.about.table == "two"
        assert checkpoint.sparse_block("two", 3, 4)["rows"].tolist() == [[1.5, 2.5]]


def test_what_is_not_replaced_keeps_its_state(start, tmp_path, mpifleet):
    start()
    fleet.save_persistables(tmp_path / "base")
    state = {"out.bias": torch.ones(3), "odd": torch.ones(1)}
    safetensors.torch.save_file(state, tmp_path / "x.safetensors")
    words = ("import", tmp_path / "x.safetensors", tmp_path / "base", "--like", tmp_path / "base")
    assert "; --partial skips such names" in mpifleet(*words)[2]
    status, out, _ = mpifleet(*words, "--partial")
    assert status == 0
    assert re.search(r"^not in \S+, taken from \S+: part.a.weight$", out, re.MULTILINE)
    assert "has no such name: odd\n" in out
    with (
        open_checkpoint(tmp_path / "base/model-000001.h5") as old,
        open_checkpoint(tmp_path / "base/model-000002.h5") as new,
    ):
        assert new.dense("out.bias").value.tolist() == [1, 1, 1]
        assert new.dense("out.bias").state == {}
        for name in set(old.dense_names) - {"out.bias"}:
            left, right = old.dense(name), new.dense(name)
            assert (left.step, left.attrs) == (right.step, right.attrs)
            assert all(np.array_equal(left.state[slot], right.state[slot]) for slot in left.state)
            assert left.state.keys() == right.state.keys() != set()
        for name in old.sparse_names:
            rows = old.sparse(name).num_rows
            left, right = (file.sparse_block(name, 0, rows) for file in (old, new))
            assert all(np.array_equal(left[slot], right[slot]) for slot in left)
            assert left.keys() == right.keys() == {"rows", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("form", ["text", "binary"])
def test_vectors_by_command(start, tmp_path, mpifleet, form):
    model = start()
    fleet.save_persistables(tmp_path / "saved")
    words = ("export", tmp_path / "saved", tmp_path / "v", "--to", f"word2vec-{form}")
    assert "name one table: the checkpoint has 'öne', 'two'" in mpifleet(*words)[2]
    assert mpifleet(*words, "--table", "two")[0] == 0
    start(1)
    fleet.save_persistables(tmp_path / "base")
    words = ("import", tmp_path / "v", tmp_path / "warm", "--like", tmp_path / "base")
    status, out, _ = mpifleet(*words, "--from", f"word2vec-{form}", "--table", "two")
    assert status == 0
    assert out.startswith("table two: 40 rows taken\n")
    with open_checkpoint(tmp_path / "warm") as checkpoint:
        rows = checkpoint.sparse_block("two", 0, ROWS)
        assert rows.keys() == {"rows"}
        fleet.load_persistables(tmp_path / "saved")
        wanted = table_of(model.part["a"], connect_like(model, tmp_path / "saved"))
        assert np.array_equal(rows["rows"], wanted.numpy())


def connect_like(model, directory):
    """The optimizer of another job of this model, as a checkpoint has it."""
    optimizer = connect(model, torch.optim.Adam([p for p in model.parameters() if p.requires_grad]))
    optimizer.exchange.load(directory)
    return optimizer


def test_a_directory_for_inference_by_command(start, tmp_path, mpifleet):
    from mpifleet import inference

    model = start()
    fleet.save_persistables(tmp_path / "saved")
    (tmp_path / "keys").write_text("0\n1\n9\n9\n")
    for number, keys in enumerate((["all"], ["trained"], [f"two={tmp_path / 'keys'}"])):
        target = tmp_path / f"served{number}"
        words = ("export", tmp_path / "saved", target, "--to", "inference", "--keys", *keys)
        assert mpifleet(*words)[0] == 0
        assert torch.equal(predictions(inference.load(target, Net())), predictions(model))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export", "c", "x", "--to", "safetensors"], "use a name in .safetensors"),
        (["export", "c", "x.pt", "--to", "inference", "--vocab", "w"], "--vocab w goes with word2"),
        (["export", "c", "x.pt", "--to", "state_dict", "--keys", "all"], "needs --to inference"),
        (["export", "c", "x", "--to", "inference", "--keys", "few"], "or T=FILE"),
        (["export", "c", "x", "--to", "inference", "--keys", "t=/none"], "one key, a whole number"),
        (["export", "none", "x", "--to", "inference"], "no checkpoint at none"),
        (["export", "c", "x"], "the following arguments are required: --to"),
        (["import", "x.pt", "t", "--like", "c"], "no checkpoint at c"),
        (["import", "x.pt", "t", "--like", "c", "--table", "t"], "goes with word2vec formats"),
        (["import", "v.txt", "t", "--like", "c"], "or say what it is with --from"),
        (["import", "x", "t"], "the following arguments are required: --like"),
    ],
)
def test_options_that_cannot_be_are_refused(mpifleet, words, message):
    status, out, err = mpifleet(*words)
    assert (status, out) == (2, "")
    assert message in err


def test_a_model_of_many_tables_is_saved_with_all_their_names(tmp_path):
    names = {"tables": {f"table {number}": {"modules": [f"t.{number}"]} for number in range(3_000)}}
    meta = {MODEL_FACT: names, "package": "1"}
    write_checkpoint(tmp_path, dense=[], buffers={}, meta=meta)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.meta == meta


def test_tables_and_parameters_need_names_of_their_own(start, tmp_path):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = SparseEmbedding("t", 20, 2)
            self.add_module("t", nn.Linear(2, 2))
            self.forward = lambda ids: self.t(self.table(ids[:, :1]))

    start(model=Odd())
    fleet.save_state_dict(tmp_path / "x.safetensors")
    found = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert found.keys() == {"table.weight", "t.weight", "t.bias"}
    current.current().model = None  # then the table goes by its own name
    with pytest.raises(CheckpointError, match=r"table 't' and a parameter are called 't.weight'"):
        fleet.save_state_dict(tmp_path / "x.safetensors")
