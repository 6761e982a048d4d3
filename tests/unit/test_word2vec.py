"""word2vec's formats: the tool's own files are read, what is written a plain reader understands."""

import io

import numpy as np
import pytest

from mpifleet.errors import ConfigError, DataError
from mpifleet.portable import word2vec_file as module
from mpifleet.portable.sources import TableSource
from mpifleet.portable.vectors import export_vectors, read_vectors
from mpifleet.portable.word2vec_file import VectorFile, read_words, write_vectors

WORDS = ["the", "of", "Zürich", "日本", "a_b", "</s>", "x"]
DIM = 5


def rows(count=7, dtype=np.float32, seed=0):
    """Any finite bits: blanks and newlines among the bytes, tiny and huge numbers."""
    generator = np.random.default_rng(seed)
    bits = generator.integers(0, 256, (count, DIM * np.dtype(dtype).itemsize), np.uint8)
    values = bits.view(dtype).copy()
    values[~np.isfinite(values)] = -0.0
    values[:, 0] = np.frombuffer(b"  \n " * (np.dtype(dtype).itemsize // 4), dtype)[0]
    return values


def table(values, name="emb", **options):
    shape = (*values.shape, values.dtype.name)
    return TableSource(name, *shape, lambda keys: values[keys].copy(), **options)


def vocabulary(path, words=WORDS, counts=False):
    lines = [f"{word} {9 - at}" if counts else word for at, word in enumerate(words)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


# -- an oracle: the formats as they are described, byte by byte ----------------------------------


def plain_read(path, binary):
    """{word: row} the slow way."""
    with open(path, "rb") as file:
        count, dim = map(int, file.readline().split())
        found = {}
        for _ in range(count):
            if binary:
                word = b""
                while (byte := file.read(1)) != b" ":
                    word += byte.replace(b"\n", b"")
                row = np.frombuffer(file.read(4 * dim), "<f4")
            else:
                word, *numbers = file.readline().rstrip().split(b" ")
                row = np.array([float(number) for number in numbers])
            found[word.decode()] = row
        assert file.read() in (b"", b"\n")
    return found


def plain_text(words, values, end="\n"):
    """As the original tool writes it: a blank after every number."""
    lines = [
        f"{word} " + "".join(f"{float(v)!r} " for v in row)
        for word, row in zip(words, values, strict=True)
    ]
    return f"{len(words)} {values.shape[1]}\n" + "".join(line + end for line in lines)


def plain_binary(words, values, end=b"\n"):
    records = [
        w.encode() + b" " + row.astype("<f4").tobytes() + end
        for w, row in zip(words, values, strict=True)
    ]
    return f"{len(words)} {values.shape[1]}\n".encode() + b"".join(records)


@pytest.fixture(params=[1, 100, 1 << 24], ids="pieces of {}".format)
def piece_bytes(request, monkeypatch):
    monkeypatch.setattr(module, "READ_BYTES", request.param)
    monkeypatch.setattr(module, "_LINES_AT_ONCE_BYTES", request.param)
    monkeypatch.setattr(module, "_VALUES_AT_ONCE", request.param)


def bits_of(values):
    return values.view(f"u{values.itemsize}").tolist()


# -- out -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("binary", [False, True])
def test_a_plain_reader_finds_every_bit(tmp_path, piece_bytes, binary):
    values = rows()
    path, vocab = tmp_path / "vectors", vocabulary(tmp_path / "words")
    assert export_vectors(path, table(values), binary, vocab) == len(WORDS)
    found = plain_read(path, binary)
    assert list(found) == WORDS
    again = np.array(list(found.values())).astype(np.float32)
    assert bits_of(again) == bits_of(values)


def test_text_holds_float64_whole(tmp_path):
    values = rows(dtype=np.float64)
    export_vectors(tmp_path / "v", table(values), False)
    found = plain_read(tmp_path / "v", False)
    assert list(found) == [str(key) for key in range(len(WORDS))]
    assert bits_of(np.array(list(found.values()))) == bits_of(values)
    with pytest.raises(ConfigError, match="rows are float64, the binary format has float32"):
        export_vectors(tmp_path / "v", table(values), True)
    assert list(tmp_path.iterdir()) == [tmp_path / "v"], "the earlier file stays, nothing else"
    assert plain_read(tmp_path / "v", False).keys() == found.keys()


def test_only_rows_with_a_word_are_written(tmp_path):
    vocab = vocabulary(tmp_path / "words", counts=True)
    values = rows(20)
    assert export_vectors(tmp_path / "v", table(values), True, vocab) == len(WORDS)
    assert bits_of(plain_read(tmp_path / "v", True)["x"]) == bits_of(values[6])
    with pytest.raises(ConfigError, match=r"has 7 words, table 'emb' has 3 rows"):
        export_vectors(tmp_path / "v", table(rows(3)), True, vocab)


@pytest.mark.parametrize("word", [b"", b"a b", b"a\n", b"\tb"])
def test_what_cannot_be_a_word_is_refused(word):
    with pytest.raises(ConfigError, match="cannot be a word"):
        write_vectors(io.BytesIO(), True, 2, DIM, [([b"a", word], rows(2))])


def test_an_empty_table_has_an_empty_file(tmp_path):
    for binary in (False, True):
        assert export_vectors(tmp_path / "v", table(rows(0)), binary) == 0
        assert (tmp_path / "v").read_bytes() == b"0 5\n"
        with VectorFile(tmp_path / "v", binary) as file:
            assert list(file.blocks()) == []


# -- in ------------------------------------------------------------------------------------------


def read_all(path, binary):
    with VectorFile(path, binary) as file:
        blocks = list(file.blocks())
    words = [word.decode() for block, _ in blocks for word in block]
    return words, np.concatenate([values for _, values in blocks]).astype(np.float32)


@pytest.mark.parametrize("end", [b"\n", b""], ids=["newline", "none"])
def test_binary_files_of_others_are_read(tmp_path, piece_bytes, end):
    (tmp_path / "v").write_bytes(plain_binary(WORDS, rows(), end))
    words, values = read_all(tmp_path / "v", True)
    assert (words, bits_of(values)) == (WORDS, bits_of(rows()))


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["unix", "dos"])
def test_text_files_of_others_are_read(tmp_path, piece_bytes, end):
    text = plain_text(WORDS, rows(), end).rstrip() + "\n\n\n"
    (tmp_path / "v").write_text(text, encoding="utf-8", newline="")
    words, values = read_all(tmp_path / "v", False)
    assert (words, bits_of(values)) == (WORDS, bits_of(rows()))


@pytest.mark.parametrize("binary", [False, True])
def test_a_table_comes_back(tmp_path, piece_bytes, binary):
    values, vocab = rows(20), vocabulary(tmp_path / "words")
    for words in (None, vocab):
        export_vectors(tmp_path / "v", table(values), binary, words)
        found = read_vectors(tmp_path / "v", binary, 20, DIM, "float32", words)
        count = 20 if words is None else len(WORDS)
        assert found.is_taken.tolist() == [True] * count + [False] * (20 - count)
        assert bits_of(found.rows[:count]) == bits_of(values[:count])
        assert found.report.text() == f"{count} rows taken"


def test_the_words_say_which_row(tmp_path):
    vocab = vocabulary(tmp_path / "words")
    order = ["x", "other", "of", "the", "of"]
    (tmp_path / "v").write_text(plain_text(order, rows(5)), encoding="utf-8")
    found = read_vectors(tmp_path / "v", False, 9, DIM, "float32", vocab)
    assert np.flatnonzero(found.is_taken).tolist() == [0, 1, 6]
    assert bits_of(found.rows[[6, 1, 0]]) == bits_of(rows(5)[[0, 2, 3]]), "the first `of` counts"
    assert found.report.text() == (
        "3 rows taken; 4 words not found ('Zürich', '日本', 'a_b', '</s>'); "
        "1 words of the file not wanted; 1 repeated words left out"
    )


def test_without_a_vocabulary_words_are_keys(tmp_path):
    words = ["3", "9", "-1", "007", "0", "+2", "1e1", "99999999999999999999", "²"]
    words += ["00", "1\0", "2" + 20 * "0"]
    (tmp_path / "v").write_bytes(plain_binary(words, rows(len(words))))
    found = read_vectors(tmp_path / "v", True, 5, DIM, "float64")
    assert np.flatnonzero(found.is_taken).tolist() == [0, 3]
    assert found.report.unknown == len(words) - 2
    assert found.report.first_missing == ("1", "2", "4")
    assert found.rows[3].tolist() == rows(len(words))[0].tolist()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1 must be two numbers"),
        ("7\n", "line 1 must be two numbers"),
        ("1 0\n", "line 1 must be two numbers"),
        ("-1 2\n", "line 1 must be two numbers"),
        ("2 2\na 1 2\nb 1\n", r"line 3 has 2 parts, not a word and 2 numbers"),
        ("2 2\na 1 2\nb 1 2 3\n", r"line 3 has 4 parts"),
        ("2 2\na 1 2\nb 1 x\n", "line 3 holds what is no number"),
        ("2 2\na 1 2\nb 1 \xe9\n", "line 3 holds what is no number"),
        ("2 2\na 1 2\n", "has 1 words, its first line says 2"),
        ("1 2\na 1 2\nb 1 2\n", "has more words, its first line says 1"),
        ("2 2\na 1 2\n\nb 1 2\n", r"line 3 has 0 parts"),
    ],
)
def test_broken_text_is_named(tmp_path, text, message):
    (tmp_path / "v").write_text(text, encoding="latin-1")
    with pytest.raises(DataError, match=message):
        read_all(tmp_path / "v", False)


def test_a_cut_binary_file_is_refused_wherever_it_is(tmp_path):
    data = plain_binary(WORDS, rows(), b"")
    for size in range(len(data)):
        (tmp_path / "v").write_bytes(data[:size])
        with pytest.raises(DataError, match=r"line 1 must|ends inside word"):
            read_all(tmp_path / "v", True)
    (tmp_path / "v").write_bytes(data + b"x")
    with pytest.raises(DataError, match="goes on after its 7 words"):
        read_all(tmp_path / "v", True)


def test_text_is_not_taken_for_binary(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "READ_BYTES", 64)
    (tmp_path / "v").write_text("900 2\n" + "word\n" * 20_000)
    with pytest.raises(DataError, match="word 1 has no end; is the file binary"):
        read_all(tmp_path / "v", True)


def test_a_broken_vocabulary_is_named(tmp_path):
    path = tmp_path / "words"
    path.write_text("a\n\nb\n")
    with pytest.raises(DataError, match="line 2 has no word"):
        read_words(path)
    path.write_text("a 3\nb\na 1\n")
    with pytest.raises(DataError, match="line 3 has 'a' a second time"):
        read_words(path)
    with pytest.raises(DataError, match="none cannot be read"):
        read_words(tmp_path / "none")
    path.write_text("a\nb\nc\n")
    (tmp_path / "v").write_bytes(plain_binary(WORDS, rows()))
    with pytest.raises(ConfigError, match="has 3 words, the table has 2 rows"):
        read_vectors(tmp_path / "v", True, 2, DIM, "float32", path)
    with pytest.raises(DataError, match="vectors of 5 elements, the table rows of 4"):
        read_vectors(tmp_path / "v", True, 3, 4, "float32", path)
