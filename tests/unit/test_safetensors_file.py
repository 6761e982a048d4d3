"""safetensors files: every dtype and name comes back, readers agree, damage is refused."""

import io
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from mpifleet.checkpoint.digests import Sums, digest_of
from mpifleet.errors import CheckpointError, DataError
from mpifleet.portable import safetensors_file as module
from mpifleet.portable.safetensors_file import SafetensorsFile, write_tensors
from mpifleet.portable.tensor_stream import DTYPES, TensorStream

NAMES = ["a/b", "..", "100%", "fc.1 ü", "日本", "", '"\\\n']


def random_bits(dtype, shape, seed=0):
    count = int(np.prod(shape)) * dtype.itemsize
    bits = np.random.default_rng(seed).integers(0, 256, count, np.uint8)
    if dtype == torch.bool:
        bits &= 1
    return torch.from_numpy(bits).view(dtype).reshape(shape)


def examples():
    tensors = {str(dtype): random_bits(dtype, (3, 5)) for dtype in DTYPES.values()}
    tensors |= {name: random_bits(torch.float32, (2,), 1) for name in NAMES}
    tensors["scalar"] = torch.tensor(7)
    tensors["no rows"] = torch.empty(0, 4)
    tensors["odd"] = random_bits(torch.bool, (3,))
    tensors["transposed"] = torch.arange(12.0).reshape(3, 4).T
    return tensors


def write(path, tensors, metadata=None):
    with open(path, "wb") as file:
        return write_tensors(
            file, [TensorStream.of(n, t) for n, t in tensors.items()], metadata or {"format": "pt"}
        )


def same_bits(left, right):
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (left, right)]
    return torch.equal(*bits)


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert same_bits(found[name], tensor), name


def read_by_hand(path):
    """{name: (dtype code, shape, bytes)} as the format's description says."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    header.pop("__metadata__")
    slices = {n: (e, rest[slice(*e["data_offsets"])]) for n, e in header.items()}
    return {n: (e["dtype"], e["shape"], part) for n, (e, part) in slices.items()}


def test_all_that_was_written_comes_back(tmp_path):
    write(tmp_path / "x", examples())
    file = SafetensorsFile(tmp_path / "x")
    assert_same({name: file.tensor(name) for name in file.places}, examples())
    assert_same({name: file.mapped(name) for name in file.places}, examples())
    assert file.metadata == {"format": "pt"}


def test_a_reader_by_the_description_finds_it(tmp_path):
    write(tmp_path / "x", examples())
    found = read_by_hand(tmp_path / "x")
    assert found.keys() == examples().keys()
    for name, tensor in examples().items():
        flat = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        assert found[name][1:] == (list(tensor.shape), flat.tobytes()), name
    assert found["torch.bfloat16"][0] == "BF16"
    assert found["scalar"][0] == "I64"


def test_the_formats_own_library_reads_and_writes_the_same(tmp_path):
    write(tmp_path / "x", examples())
    assert_same(safetensors.torch.load_file(tmp_path / "x"), examples())
    contiguous = {name: tensor.contiguous() for name, tensor in examples().items()}
    safetensors.torch.save_file(contiguous, tmp_path / "y")
    file = SafetensorsFile(tmp_path / "y")
    assert_same({name: file.tensor(name) for name in file.places}, examples())


def test_every_tensor_begins_where_it_is_aligned(tmp_path):
    write(tmp_path / "x", examples())
    for place in SafetensorsFile(tmp_path / "x").places.values():
        assert place.start % place.dtype.itemsize == 0


def test_a_tensor_that_is_not_aligned_is_read_nevertheless(tmp_path):
    header = {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
    }
    (tmp_path / "x").write_bytes(raw(header, b"\1" + struct.pack("<2f", 2, 3)))
    file = SafetensorsFile(tmp_path / "x")
    assert file.mapped("b").tolist() == file.tensor("b").tolist() == [2, 3]


def test_what_is_mapped_never_changes_the_file(tmp_path):
    write(tmp_path / "x", {"a": torch.ones(4)})
    before = (tmp_path / "x").read_bytes()
    SafetensorsFile(tmp_path / "x").mapped("a").zero_()
    assert (tmp_path / "x").read_bytes() == before


def test_digests_cover_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BLOCK_BYTES", 16)
    blocks = write(tmp_path / "x", examples())
    data = (tmp_path / "x").read_bytes()
    assert Sums.of_blocks(blocks).size == len(data)
    assert all(digest_of(data[b.start : b.start + b.num_bytes]) == b.digest for b in blocks)


def test_pieces_make_one_tensor(tmp_path):
    whole = torch.arange(20.0).reshape(10, 2)
    stream = TensorStream("a", torch.float32, (10, 2), lambda: iter(whole.split(3)))
    told = []
    with open(tmp_path / "x", "wb") as file:
        write_tensors(file, [stream], {}, told.append)
    assert torch.equal(SafetensorsFile(tmp_path / "x").tensor("a"), whole)
    assert sum(told) == stream.num_bytes == 80
    assert torch.equal(stream.tensor(), whole)


def test_what_was_not_promised_is_not_written():
    short = TensorStream("a", torch.float32, (3,), lambda: iter([torch.ones(2)]))
    with pytest.raises(CheckpointError, match="'a' has 2 elements"):
        write_tensors(io.BytesIO(), [short], {})
    other = TensorStream("a", torch.float32, (2,), lambda: iter([torch.ones(2).double()]))
    with pytest.raises(CheckpointError, match=r"'a' is torch.float64, not torch.float32"):
        write_tensors(io.BytesIO(), [other], {})
    for names in (["a", "a"], ["__metadata__"]):
        streams = [TensorStream.of(name, torch.ones(1)) for name in names]
        with pytest.raises(CheckpointError, match="cannot name one tensor more"):
            write_tensors(io.BytesIO(), streams, {})
    with pytest.raises(CheckpointError, match="cannot be written as UTF-8"):
        write_tensors(io.BytesIO(), [TensorStream.of("\ud800", torch.ones(1))], {})


def raw(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(**changes):
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


EIGHT = b"\0" * 8
DAMAGED = {
    "nothing": b"",
    "short length": b"\1\0",
    "length beyond the end": raw(entry(), EIGHT, 1 << 20),
    "huge length": raw(entry(), EIGHT, 1 << 62),
    "not JSON": raw(b"{]", EIGHT),
    "not UTF-8": raw(b'{"\xff":1}', EIGHT),
    "a list": raw([1], EIGHT),
    "no entry": raw({"a": 1}, EIGHT),
    "dtype": raw(entry(dtype="F33"), EIGHT),
    "negative shape": raw(entry(shape=[-1, -2]), EIGHT),
    "shape of floats": raw(entry(shape=[2.0]), EIGHT),
    "shape of truth": raw(entry(shape=[2, True]), EIGHT),
    "too large a shape": raw(entry(shape=[3]), EIGHT),
    "gap": raw(entry(data_offsets=[4, 12]), EIGHT * 2),
    "backwards": raw(entry(data_offsets=[8, 0]), EIGHT),
    "text as offset": raw(entry(data_offsets=["0", "8"]), EIGHT),
    "bytes left over": raw(entry(), EIGHT + b"\0"),
    "bytes missing": raw(entry(), EIGHT[1:]),
    "overlap": raw({**entry(), "b": entry()["a"]}, EIGHT),
    "name twice": raw(json.dumps(entry()).encode()[:-1] + b"," + json.dumps(entry()).encode()[1:]),
    "deep": raw(b"[" * 100_000, EIGHT),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damage_is_refused(tmp_path, damage):
    (tmp_path / "x").write_bytes(DAMAGED[damage])
    with pytest.raises(DataError, match="x is no whole safetensors file"):
        SafetensorsFile(tmp_path / "x")


def test_a_cut_is_refused_wherever_it_is(tmp_path):
    write(tmp_path / "x", {"a": torch.ones(3), "b": torch.zeros(2, dtype=torch.int8)})
    data = (tmp_path / "x").read_bytes()
    for size in range(len(data)):
        (tmp_path / "y").write_bytes(data[:size])
        with pytest.raises(DataError):
            SafetensorsFile(tmp_path / "y")


def test_a_flipped_bit_of_the_header_never_crashes(tmp_path):
    write(tmp_path / "x", {"a": torch.ones(3), "b": torch.zeros(2, dtype=torch.int8)})
    data = (tmp_path / "x").read_bytes()
    refused = 0
    for bit in range(8 * (len(data) - 14)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        (tmp_path / "y").write_bytes(flipped)
        try:
            file = SafetensorsFile(tmp_path / "y")
            assert [file.tensor(name).numel() for name in file.places]
        except DataError:
            refused += 1
    assert refused > 500


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match="none cannot be read: No such file"):
        SafetensorsFile(tmp_path / "none")
    write(tmp_path / "x", {"a": torch.ones(1)})
    with pytest.raises(DataError, match="has no tensor 'b'"):
        SafetensorsFile(tmp_path / "x").tensor("b")
    with pytest.raises(DataError, match="Is a directory"):
        SafetensorsFile(Path(tmp_path))
