"""Loads that take what fits, and single tables: what is taken, what is left, what is said."""

import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

from mpifleet.checkpoint import open_checkpoint
from mpifleet.compose import local_exchange
from mpifleet.embedding import SparseEmbedding
from mpifleet.errors import CheckpointError, ConfigError
from mpifleet.optimizer import DistributedOptimizer
from mpifleet.ps.load_report import LoadedEntry, LoadOptions
from mpifleet.ps.saving import SaveOptions
from mpifleet.strategy import DistributedStrategy
from tests.unit.checkpoint_content import REPOSITORY
from tests.unit.local_job import connect, persistables

FITTING = LoadOptions(strict=False)


class Net(nn.Module):
    def __init__(self, width=5, rows=11, tables=("one", "two"), norm=True):
        super().__init__()
        self.tables = nn.ModuleList(
            SparseEmbedding(name, rows if name == "one" else 7, 3, pooling="sum") for name in tables
        )
        self.norm = nn.BatchNorm1d(3) if norm else nn.Identity()
        self.hidden = nn.Linear(3, width)
        self.out = nn.Linear(3, 2)

    def forward(self, ids):
        pooled = self.norm(sum(table(ids % 7) for table in self.tables))
        return self.hidden(pooled).sum() + self.out(pooled).pow(2).sum()


class Job:
    """A trained single-process job of a Net."""

    def __init__(self, make=torch.optim.Adam, steps=3, seed=0, **shape):
        torch.manual_seed(seed)
        self.model = Net(**shape)
        self.optimizer = connect(self.model, make(self.model.parameters(), lr=0.1))
        self.face = persistables(self.optimizer, self.model)
        for _ in range(steps):
            self.step()

    def step(self):
        self.optimizer.zero_grad()
        self.model(torch.arange(12).view(4, 3)).backward()
        self.optimizer.step()

    def state(self, directory):
        """Everything as a save has it, as bytes by path."""
        self.face.save(directory)
        return saved(directory)


def saved(directory):
    found = {}
    with open_checkpoint(directory) as checkpoint:
        for name in checkpoint.dense_names:
            entry = checkpoint.dense(name)
            found[name, "step"] = entry.step
            arrays = {"value": entry.value, **entry.state}
            found |= {(name, slot): array.tobytes() for slot, array in arrays.items()}
        for name in checkpoint.sparse_names:
            table = checkpoint.sparse(name)
            found[name, "step"] = table.attrs["step"]
            block = checkpoint.sparse_block(name, 0, table.num_rows)
            found |= {(name, slot): array.tobytes() for slot, array in block.items()}
        found |= {(n, "value"): a.tobytes() for n, a in checkpoint.buffers().items()}
    return found


def outcomes(report):
    return {(e.kind, e.name): e.outcome for e in report.entries if e.outcome != "taken"}


def test_all_that_fits_is_taken_and_said_to_be(tmp_path):
    expected = Job().state(tmp_path / "a")
    other = Job(steps=1, seed=1)
    report = other.face.load(tmp_path / "a", FITTING)
    assert report.is_whole
    assert len(report.taken) == len(report.entries) == 6 + 2 + 3
    assert other.state(tmp_path / "b") == expected
    assert report.text().endswith(f"{len(report.entries)} of {len(report.entries)} entries taken")


def test_what_does_not_fit_stays_and_is_named_with_its_reason(tmp_path, capsys):
    """Wrong shapes, missing and extra entries: the rest comes with its state, bit for bit."""
    theirs = Job(tables=("one", "two", "old")).state(tmp_path / "a")
    job = Job(seed=1, width=6, rows=12, tables=("one", "two", "new"), steps=2)
    before = job.state(tmp_path / "b")
    report = job.face.load(tmp_path / "a", FITTING)
    assert outcomes(report) == {
        ("parameter", "hidden.weight"): "misfit",
        ("parameter", "hidden.bias"): "misfit",
        ("table", "one"): "misfit",
        ("table", "new"): "missing",
        ("table", "old"): "extra",
    }
    kept = {"hidden.weight", "hidden.bias", "one", "new"}
    for path, value in job.state(tmp_path / "c").items():
        assert value == (before if path[0] in kept else theirs)[path], path
    assert report.text() in capsys.readouterr().err
    for words in ("(5, 3), 'float32') in the file, ((6, 3)", "(11, 3, 'float32') in the file"):
        assert words in report.text()
    assert report.names("missing", "extra", kind="table") == ["new", "old"]
    job.step()


def test_strict_refuses_the_same_before_anything_changes(tmp_path):
    Job(tables=("one", "two", "old")).face.save(tmp_path / "a")
    for shape, words in (
        ({"width": 6, "tables": ("one", "two", "old")}, "'hidden.weight' is"),
        ({"rows": 12, "tables": ("one", "two", "old")}, "table 'one' is"),
        ({"tables": ("one", "two", "new")}, "table 'new' is not in the checkpoint"),
        ({"tables": ("one", "two")}, "table 'old' is not in the model"),
    ):
        job = Job(seed=1, **shape)
        before = job.state(tmp_path / words)
        with pytest.raises(CheckpointError, match=words.replace("(", r"\(")):
            job.face.load(tmp_path / "a")
        assert job.state(tmp_path / words) == before


def test_buffers_are_taken_one_by_one(tmp_path):
    Job(norm=False).face.save(tmp_path / "without")
    with_norm = Job()
    expected = with_norm.state(tmp_path / "with")
    with pytest.raises(CheckpointError, match=r"'norm\.running_mean' is not in the checkpoint"):
        with_norm.face.load(tmp_path / "without")
    report = with_norm.face.load(tmp_path / "without", FITTING)
    assert report.names("missing", kind="buffer") == [
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    ]
    after = with_norm.state(tmp_path / "with")
    for name in ("norm.running_mean", "norm.weight"):
        assert after[name, "value"] == expected[name, "value"]
    report = Job(norm=False).face.load(tmp_path / "with", FITTING)
    assert report.names("extra", kind="buffer")[0] == "norm.running_mean"


@pytest.mark.parametrize("strict", [True, False])
def test_another_rule_starts_the_state_anew_and_the_report_says_so(tmp_path, strict, capsys):
    theirs = Job().state(tmp_path / "a")
    job = Job(torch.optim.Adagrad, seed=1)
    report = job.face.load(tmp_path / "a", LoadOptions(strict))
    assert set(report.names("state anew")) == {
        *("norm.weight", "norm.bias", "hidden.weight", "hidden.bias", "out.weight", "out.bias"),
        *("one", "two"),
    }
    assert not report.is_whole
    words = "one was saved under rule adam and is used under adagrad"
    assert capsys.readouterr().err.count(words) == 1
    found = job.state(tmp_path / "b")
    for name in report.taken:
        slot = "rows" if name in ("one", "two") else "value"
        assert found[name, slot] == theirs[name, slot]
        if slot == "rows" or name in report.names("state anew"):
            assert found[name, "step"] == 0
            assert set(found[name, "sum"]) == {0}


def test_state_that_lacks_a_slot_is_refused_or_starts_anew_whole(tmp_path, monkeypatch):
    """Not half of it: a step count without its second moments would make huge steps."""
    from mpifleet.ps import saved_parts

    real = saved_parts.sparse_shapes

    def without(shard):
        shapes = real(shard)
        return [
            type(s)(*(s.name, s.num_rows, s.dim, s.dtype, ("exp_avg",), s.attrs, s.num_shards))
            for s in shapes
        ]

    job = Job()
    parts = saved_parts.sparse_parts

    def first_slot(shard, places, table, shape):
        known = dict.fromkeys([shape.path("exp_avg_sq")], 0) | places
        for offset, array in parts(shard, known, table, shape):
            if offset:
                yield offset, array

    monkeypatch.setattr("mpifleet.ps.save_content.sparse_shapes", without)
    monkeypatch.setattr("mpifleet.ps.save_content.sparse_parts", first_slot)
    job.face.save(tmp_path / "a")
    monkeypatch.undo()
    before = job.state(tmp_path / "b")
    with pytest.raises(CheckpointError, match=r"state 'exp_avg_sq' of 'one' is not in"):
        job.face.load(tmp_path / "a")
    assert job.state(tmp_path / "b") == before
    report = job.face.load(tmp_path / "a", FITTING)
    assert report.names("state anew") == ["one", "two"]
    after = job.state(tmp_path / "b")
    assert after["one", "step"] == 0
    assert set(after["one", "exp_avg"]) == {0}
    assert after["one", "rows"] == before["one", "rows"]


def test_a_server_starts_from_what_fits(tmp_path):
    """init_server's way: what the file lacks has its first values, as without a file."""
    theirs = Job(tables=("one", "old")).state(tmp_path / "a")

    def start(load_from, strict=True):
        torch.manual_seed(5)
        model = Net(tables=("one", "new"))
        optimizer = DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), model)
        strategy = DistributedStrategy()
        optimizer.connect(local_exchange(optimizer, strategy, load_from, strict))
        persistables(optimizer, model).save(tmp_path / "b")
        return saved(tmp_path / "b")

    fresh, found = start(None), start(tmp_path / "a", False)
    assert found["one", "exp_avg"] == theirs["one", "exp_avg"]
    assert found["new", "rows"] == fresh["new", "rows"]
    assert found["hidden.weight", "value"] == theirs["hidden.weight", "value"]
    with pytest.raises(CheckpointError, match="'new'"):
        start(tmp_path / "a")


def test_one_table_goes_and_comes_alone(tmp_path):
    """From its own file and out of a full one: nothing else changes."""
    source = Job()
    theirs = source.state(tmp_path / "full")
    source.face.save(tmp_path / "one", SaveOptions(table="one"))
    with open_checkpoint(tmp_path / "one") as checkpoint:
        assert checkpoint.sparse_names == ("one",)
        assert checkpoint.dense_names == checkpoint.buffer_names == ()
    for directory in ("one", "full"):
        job = Job(seed=1, steps=2)
        before = job.state(tmp_path / "b")
        report = job.face.load(tmp_path / directory, LoadOptions(table="one"))
        assert report.entries == (LoadedEntry("table", "one", "taken"),)
        for path, value in job.state(tmp_path / "b").items():
            assert value == (theirs if path[0] == "one" else before)[path], path
        job.step()


def test_one_table_of_another_shape_or_not_there_is_refused(tmp_path):
    Job().face.save(tmp_path / "one", SaveOptions(table="one"))
    job = Job(rows=12)
    for strict in (True, False):
        with pytest.raises(CheckpointError, match=r"table 'one' is \(11, 3"):
            job.face.load(tmp_path / "one", LoadOptions(strict, "one"))
    with pytest.raises(CheckpointError, match="table 'two' is not in the checkpoint"):
        job.face.load(tmp_path / "one", LoadOptions(table="two"))
    with pytest.raises(CheckpointError, match="is not in the checkpoint"):
        job.face.load(tmp_path / "one")
    for call in (
        lambda: job.face.load(tmp_path / "one", LoadOptions(table="three")),
        lambda: job.face.save(tmp_path / "one", SaveOptions(table="three")),
    ):
        with pytest.raises(ConfigError, match=r"'three' is not in the model.*'one', 'two'"):
            call()


def test_a_directory_is_of_the_whole_job_or_of_one_table(tmp_path):
    """Else the newest would not be what a load asks for, and the older ones would be pruned."""
    job = Job()
    one, two, whole = SaveOptions(table="one"), SaveOptions(table="two"), SaveOptions()
    for first in (one, two, whole):
        directory = tmp_path / str(first.table)
        job.face.save(directory, first)
        for other in {one, two, whole} - {first}:
            with pytest.raises(CheckpointError, match="use another directory"):
                job.face.save(directory, other)
        job.face.save(directory, first)
        assert [path.name for path in directory.glob("*.h5")] == ["model-000002.h5"]


def test_one_table_never_takes_the_place_of_a_file_of_version_1(tmp_path):
    old = tmp_path / "model.h5"
    old.write_bytes(b"a whole job")
    with pytest.raises(CheckpointError, match="use another directory"):
        Job().face.save(tmp_path, SaveOptions(table="one"))
    assert old.read_bytes() == b"a whole job"


def test_fleets_calls(tmp_path):
    script = """
        import sys
        import torch
        from mpifleet import fleet
        from mpifleet.errors import ConfigError
        fleet.init()
        table = fleet.SparseEmbedding("emb", 9, 2, pooling="sum")
        model = torch.nn.Sequential(table, torch.nn.Linear(2, 1))
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        optimizer = fleet.distributed_optimizer(optimizer, model=model)
        fleet.init_worker()
        fleet.save_one_table(table, sys.argv[1] + "/one", compression="gzip")
        fleet.save_persistables(sys.argv[1] + "/all")
        model(torch.arange(9).view(3, 3)).sum().backward()
        optimizer.step()
        assert fleet.load_one_table("emb", sys.argv[1] + "/one").is_whole
        assert fleet.load_one_table(table, sys.argv[1] + "/all").is_whole
        report = fleet.load_persistables(sys.argv[1] + "/one", strict=False)
        assert report.taken == ["emb"], report
        assert fleet.load_persistables(sys.argv[1] + "/all").is_whole
        try:
            fleet.save_one_table(3, sys.argv[1])
        except ConfigError as error:
            print(error)
        fleet.stop_worker()
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), tmp_path],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "table=3; use a SparseEmbedding or the name it was made with\n"
    assert "1 of 3 entries taken\n  missing: parameter '1.weight'" in done.stderr


@pytest.mark.parametrize(
    ("saved", "ours", "fits"),
    [
        (torch.float64, torch.float32, False),
        (torch.float32, torch.int32, False),
        (torch.float32, torch.bool, False),
        (torch.int64, torch.float16, False),
        (torch.float32, torch.float64, True),
        (torch.bool, torch.int64, True),
        (torch.bfloat16, torch.bfloat16, True),
    ],
)
def test_a_buffer_is_never_squeezed_into_another_dtype(tmp_path, saved, ours, fits):
    job, other = Job(), Job(seed=1)
    job.model.register_buffer("b", torch.tensor([1.5, 0.0]).to(saved))
    other.model.register_buffer("b", torch.tensor([7.0, 8.0]).to(ours))
    job.face.save(tmp_path)
    if fits:
        assert other.face.load(tmp_path).is_whole
        assert torch.equal(other.model.b, job.model.b.to(ours))
        return
    before = other.model.b.clone()
    with pytest.raises(CheckpointError, match=rf"buffer 'b' is {str(saved)[6:]} in the file, "):
        other.face.load(tmp_path)
    report = other.face.load(tmp_path, FITTING)
    assert report.names("misfit", kind="buffer") == ["b"]
    assert torch.equal(other.model.b, before)
