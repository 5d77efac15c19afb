"""What files `prepare` reads: JSON lines, packed text, Parquet, .bin of nanoGPT; and what it says of broken ones."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import os
from pathlib import Path

import numpy as np
import pytest
from runs import python

from xtrain import data
from xtrain.cli import main
from xtrain.data import readers
from xtrain.data.token_files import open_token_file
from xtrain.errors import DataError
from xtrain.tokenizers import ByteTokenizer

pytestmark = pytest.mark.on_cpu
TEXTS = ["one", "zw\u00f6lf", "three\nlines\n"]


def lines(*texts: str, field: str = "text") -> bytes:
    return "".join(json.dumps({"id": 3, field: text}) + "\n" for text in texts).encode()


def documents_of(path: Path) -> list[bytes]:
    """The documents of a token file of bytes."""
    found = open_token_file(path)
    tokens = bytes(found.tokens[:])
    starts = [*found.documents[:].tolist(), len(tokens)]
    parts = [tokens[a:b] for a, b in itertools.pairwise(starts)]
    assert all(part.endswith(b"\0") for part in parts)
    return [part[:-1] for part in parts]


@pytest.mark.parametrize("name", ["d.jsonl", "d.jsonl.gz", "D.JSONL", "d.ndjson", "d.ndjson.gz"])
def test_a_line_is_a_document(tmp_path, name: str) -> None:
    content = b"\xef\xbb\xbf" + lines(TEXTS[0]) + b"  \n" + lines("") + lines(*TEXTS[1:]).rstrip(b"\n")
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    count = data.prepare(tmp_path / name, tmp_path / "x.tokens")
    assert documents_of(tmp_path / "x.tokens") == [text.encode() for text in TEXTS]
    assert count == sum(len(text.encode()) + 1 for text in TEXTS)


def test_the_field_of_the_text_has_a_name(tmp_path) -> None:
    (tmp_path / "d.jsonl").write_bytes(lines("some text", field="content"))
    data.prepare(tmp_path / "d.jsonl", tmp_path / "x.tokens", field="content")
    assert documents_of(tmp_path / "x.tokens") == [b"some text"]
    with pytest.raises(
        DataError,
        match=r"d\.jsonl, line 1 must have text, messages, or prompt and completion, got 'id, content'; see --field",
    ):
        data.prepare(tmp_path / "d.jsonl", tmp_path / "x.tokens")


def test_packed_text_is_one_document(tmp_path) -> None:
    for name in ("d.txt.gz", "dump.gz"):
        (tmp_path / name).write_bytes(gzip.compress(b"packed text"))
        data.prepare(tmp_path / name, tmp_path / "x.tokens")
        assert documents_of(tmp_path / "x.tokens") == [b"packed text"]
    (tmp_path / "d.tar.gz").write_bytes(gzip.compress(b"name" + bytes(508)))
    with pytest.raises(DataError, match=r"d\.tar\.gz must hold packed text, but it is binary$"):
        data.prepare(tmp_path / "d.tar.gz", tmp_path / "x.tokens")


def test_parquet(tmp_path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
    texts = [f"row {i}" for i in range(2500)]
    parquet.write_table(pyarrow.table({"n": range(2500), "text": texts}), tmp_path / "d.parquet", row_group_size=1100)
    data.prepare(tmp_path / "d.parquet", tmp_path / "x.tokens")
    assert documents_of(tmp_path / "x.tokens") == [text.encode() for text in texts]
    with pytest.raises(DataError, match=r"d\.parquet must have a column 'body', got 'n, text'$"):
        data.prepare(tmp_path / "d.parquet", tmp_path / "x.tokens", field="body")
    with pytest.raises(DataError, match=r"d\.parquet, row 1: n must be text, got a number$"):
        data.prepare(tmp_path / "d.parquet", tmp_path / "x.tokens", field="n")
    pair = pyarrow.table({"completion": ["b"], "prompt": ["a"], "text": ["c"]})
    parquet.write_table(pair, tmp_path / "p.parquet")
    data.prepare(tmp_path / "p.parquet", tmp_path / "x.tokens", field="prompt")  # the field means both columns
    assert documents_of(tmp_path / "x.tokens") == [b"ab"]
    (tmp_path / "e.parquet").write_bytes(b"PAR1 and nothing")
    with pytest.raises(DataError, match=r"e\.parquet cannot be read as Parquet: "):
        data.prepare(tmp_path / "e.parquet", tmp_path / "x.tokens")


def test_parquet_without_its_package(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    (tmp_path / "d.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"d\.parquet needs the package pyarrow: pip install 'xtrain\[data\]'$"):
        data.prepare(tmp_path / "d.parquet", tmp_path / "x.tokens")


@pytest.mark.parametrize(
    "line,what",
    [
        (b'{"text": "a" "b"}', r"is not valid JSON: Expecting ',' delimiter at column 14$"),
        (b'{"text": "cut', r"is not valid JSON: Unterminated string starting at column 10$"),
        (b'{"text": "\xff"}', r"is not UTF-8: invalid start byte at byte 11$"),
        (b'["text"]', r"must hold an object, got a list$"),
        (b'"text"', r"must hold an object, got a text$"),
        (b"7", r"must hold an object, got a number$"),
        (b'{"text": 7}', r": text must be text, got a number$"),
        (b'{"text": null}', r": text must be text, got null$"),
        (b'{"text": "\\ud800"}', r": text must be text, got one that is no Unicode$"),
        (b'{"Text": "a"}', r" must have text, messages, or prompt and completion, got 'Text'; see --field$"),
        (b"[" * 10**5, r"cannot be read: "),
        (b'{"text": ' + b"9" * 5000 + b"}", r"(cannot be read: |: text must be text, got a number)"),
    ],
)
def test_a_broken_line_is_named(tmp_path, line: bytes, what: str) -> None:
    """The file, the line, and what is wrong; and no token file is left."""
    (tmp_path / "d.jsonl").write_bytes(lines("a", "b") + b"\n" + line + b"\n" + lines("c"))
    with pytest.raises(DataError, match=r"^data: \S*d\.jsonl, line 4,? ?" + what):
        data.prepare(tmp_path / "d.jsonl", tmp_path / "x.tokens")
    assert not (tmp_path / "x.tokens").exists()


def test_a_line_has_a_limit(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(readers, "_LONGEST_LINE", len(lines("abc")))
    (tmp_path / "d.jsonl").write_bytes(lines("abc"))
    assert data.prepare(tmp_path / "d.jsonl", tmp_path / "x.tokens") == 4
    (tmp_path / "d.jsonl").write_bytes(lines("abcd"))
    with pytest.raises(DataError, match=r"d\.jsonl, line 1, must have at most 25 bytes$"):
        data.prepare(tmp_path / "d.jsonl", tmp_path / "x.tokens")


def test_a_damaged_packed_file(tmp_path) -> None:
    good = gzip.compress(lines(*TEXTS) * 50, mtime=0)
    for content, what in (
        (good[: len(good) // 2], "is cut off: its last packed block has no end"),
        (b"plain text\n", "is no gzip file, or it is damaged: Not a gzipped file"),
        (good[:40] + bytes(20) + good[60:], "is no gzip file, or it is damaged: "),
    ):
        (tmp_path / "d.jsonl.gz").write_bytes(content)
        with pytest.raises(DataError, match=rf"d\.jsonl\.gz {what}"):
            data.prepare(tmp_path / "d.jsonl.gz", tmp_path / "x.tokens")


def test_a_file_that_does_not_fit_into_memory() -> None:
    class Full(io.BytesIO):
        def read(self, *_) -> bytes:
            raise MemoryError

    with pytest.raises(DataError, match=r"^data: d\.txt\.gz does not fit into memory$"):
        readers._read(Full(), "d.txt.gz")


def test_a_date_that_python_has_not(tmp_path) -> None:
    """In the place of a text."""
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow (pip install pyarrow)")
    from pyarrow import parquet

    days = pyarrow.array([2**31 - 1], pyarrow.int32()).cast(pyarrow.date32())
    parquet.write_table(pyarrow.table({"text": days}), tmp_path / "d.parquet")
    with pytest.raises(DataError, match=r"d\.parquet cannot be read as Parquet: "):
        list(readers.read_documents(str(tmp_path / "d.parquet")))


@pytest.mark.parametrize("name", ["d.jsonl", "d.jsonl.gz", "d.txt.gz", "d.parquet", "d.txt", "d.bin"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path, name: str) -> None:
    """A pipe that nobody writes to is not waited for, and a device that has no end is not read."""
    path, code = (
        tmp_path / name,
        "import sys; from xtrain import data; data.prepare(sys.argv[1], sys.argv[2], token_bytes=%s)",
    )
    os.mkfifo(path)
    for _ in range(2):
        done = python("-c", code % (2 if name == "d.bin" else None), str(path), str(tmp_path / "out"), timeout=30)
        assert done.returncode == 1 and "it is not a regular file" in done.stderr.splitlines()[-1], done.stderr
        path.unlink()
        path.symlink_to("/dev/zero")


def test_a_folder_has_all_kinds(tmp_path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_bytes(b"plain")
    (tmp_path / "in" / "b.jsonl").write_bytes(lines("x", "y"))
    (tmp_path / "in" / "c.txt.gz").write_bytes(gzip.compress(b"packed"))
    (tmp_path / "in" / "d.bin").write_bytes(bytes(99))
    data.prepare(tmp_path / "in", tmp_path / "x.tokens")
    assert documents_of(tmp_path / "x.tokens") == [b"plain", b"x", b"y", b"packed"]
    with pytest.raises(DataError, match="must go into another file than the text"):
        data.prepare(tmp_path / "in", tmp_path / "in" / "c.txt.gz")


def test_training_wants_documents_prepared(tmp_path) -> None:
    """The bytes of JSON are not the text: nobody trains on them unawares."""
    assert all(map(readers.is_packed, ("a.JSONL.GZ", "b.Parquet", "c.txt.GZ"))) and not readers.is_packed("d.txt")
    (tmp_path / "d.jsonl").write_bytes(lines(*TEXTS) * 20)
    for source in (tmp_path / "d.jsonl", tmp_path):
        with pytest.raises(DataError, match=rf"d\.jsonl must be read first: xtrain prepare {source} data\.tokens"):
            data.open_data(source)


class Words:
    """A tokenizer of some ids."""

    def __init__(self, vocab_size: int = 300) -> None:
        self.vocab_size = vocab_size

    eos: int | None = None

    def encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, np.uint8)

    def decode(self, ids) -> str:
        return ""

    def files(self) -> dict[str, bytes]:
        return {}


def test_tokens_of_nanogpt(tmp_path) -> None:
    source, out = tmp_path / "train.bin", tmp_path / "x.tokens"
    ids = np.arange(5000, dtype="<u2") % 299
    source.write_bytes(ids.tobytes())
    assert data.prepare(source, out, token_bytes=2) == 5000
    found = open_token_file(out)
    assert (found.tokens[:] == ids).all() and found.vocab_size == 299 and found.documents is None
    assert found.tokenizer is None and data.open_data(out).bytes_per_token is None
    data.prepare(source, out, Words(), token_bytes=2)
    assert open_token_file(out).vocab_size == 300
    with pytest.raises(
        DataError, match=r"must be in \[0, 256\), the vocabulary of the tokenizer, got 256 at position 256"
    ):
        data.prepare(source, out, ByteTokenizer(), token_bytes=2)
    with pytest.raises(DataError, match="got 298 at position 298; are they of another width"):
        data.prepare(source, out, Words(298), token_bytes=2)
    (tmp_path / "link.tokens").symlink_to(source)
    for same in (source, tmp_path / "link.tokens"):
        with pytest.raises(DataError, match="must go into another file"):
            data.prepare(source, same, token_bytes=2)
    beyond = Words(298)
    beyond.eos = 298  # an end outside the vocabulary is one of the tokens
    data.prepare(source, out, beyond, token_bytes=2)
    assert open_token_file(out).vocab_size == 299
    (tmp_path / "bytes.BIN").write_bytes(b"raw bytes")
    data.prepare(tmp_path / "bytes.BIN", out, ByteTokenizer(), token_bytes=1)
    assert isinstance(open_token_file(out).tokenizer, ByteTokenizer)  # of the file: it made the tokens
    with pytest.raises(DataError, match=r"bytes\.BIN holds tokens, .* --token-bytes 2"):
        data.prepare(tmp_path / "bytes.BIN", out)
    with pytest.raises(DataError, match="token_bytes must be 1, 2 or 4, got 3"):
        data.prepare(source, out, token_bytes=3)
    source.write_bytes(ids.astype("<u4").tobytes())
    assert data.prepare(source, out, token_bytes=4) == 5000 and (open_token_file(out).tokens[:] == ids).all()
    source.write_bytes(ids.tobytes()[:-1])
    with pytest.raises(DataError, match=r"train\.bin must hold tokens of 2 bytes each, got 9999 bytes"):
        data.prepare(source, out, token_bytes=2)
    with pytest.raises(DataError, match=r"train\.bin holds tokens, .* --token-bytes 2 for a \.bin file of nanoGPT"):
        data.prepare(source, out)
    head = np.zeros(256, "<i4")
    head[:3] = 20240520, 1, 5000
    source.write_bytes(head.tobytes() + ids.tobytes())
    assert data.prepare(source, out, token_bytes=2) == 5000 and (open_token_file(out).tokens[:] == ids).all()
    with pytest.raises(
        DataError, match=r"a header of llm\.c that says 5000 tokens, which are 21024 bytes with 4 a token"
    ):
        data.prepare(source, out, token_bytes=4)
    head[2] = 70_000  # more than two bytes of the header say
    source.write_bytes(head.tobytes() + bytes(140_000))
    assert data.prepare(source, out, token_bytes=2) == 70_000


def test_the_command(tmp_path, capsys) -> None:
    (tmp_path / "d.jsonl").write_bytes(lines(*TEXTS, field="body"))
    out = str(tmp_path / "x.tokens")
    assert main(["tokenize", str(tmp_path / "d.jsonl"), out, "--field", "body"]) == 0
    assert capsys.readouterr().out == f"{out}: 24 tokens\n"
    assert main(["prepare", str(tmp_path / "d.jsonl"), out]) == 1
    assert "d.jsonl, line 1 must have text, messages" in capsys.readouterr().err
    (tmp_path / "t.bin").write_bytes(np.arange(100, dtype="<u2").tobytes())
    assert main(["prepare", str(tmp_path / "t.bin"), out, "--token-bytes", "3"]) == 2
    assert "--token-bytes must be 1, 2 or 4, got 3" in capsys.readouterr().err
    assert main(["prepare", str(tmp_path / "t.bin"), out, "--token-bytes", "2"]) == 0
    assert open_token_file(out).tokens[:].tolist() == list(range(100))
