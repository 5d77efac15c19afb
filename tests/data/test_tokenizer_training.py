"""`xtrain tokenizer train`: byte-level BPE that encodes any text and comes back, here and in `tokenizers`."""

from __future__ import annotations

import errno
import json
import os
from typing import Any

import numpy as np
import pytest

from xtrain import data
from xtrain.cli import main
from xtrain.data.token_files import open_token_file
from xtrain.errors import ConfigError, DataError
from xtrain.files import write_file
from xtrain.tokenizers import find_tokenizer, train_tokenizer

pytestmark = pytest.mark.on_cpu
tokenizers = pytest.importorskip("tokenizers", reason="training a tokenizer needs tokenizers")
TEXT = "the cat sat on the mat, and the dog sat on the cat; then they ran home.\n" * 40


def test_it_encodes_any_text(tmp_path, capsys) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"body": line}) + "\n" for line in TEXT.splitlines()))
    folder = str(tmp_path / "t")
    given = ["tokenizer", "train", str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl"), "--field", "body"]
    assert main([*given, "--vocab", "280", "--out", folder]) == 0
    assert capsys.readouterr().out == f"{folder}: 280 tokens\n"
    made = find_tokenizer(folder)
    assert (made.vocab_size, made.eos) == (280, 0) and made.decode([0]) == "<|endoftext|>"
    for text in (TEXT, "Zw\u00f6lf \u6f22\u5b57 \U0001f600\t\r\n  x"):
        assert made.decode(made.encode(text.encode())) == text
    assert len(made.encode(TEXT.encode())) < len(TEXT) / 2
    assert main(["prepare", str(tmp_path / "a.txt"), str(tmp_path / "x.tokens"), "--tokenizer", folder]) == 0
    found = open_token_file(tmp_path / "x.tokens")
    assert found.tokens[:].tolist() == [*made.encode(TEXT.encode()).tolist(), 0] and found.tokenizer.eos == 0
    reader = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
    assert reader.encode(TEXT).ids == made.encode(TEXT.encode()).tolist()
    capsys.readouterr()
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "tokenizer.json").symlink_to(tmp_path / "nothing")
    assert main([*given, "--vocab", "300", "--out", str(tmp_path / "link")]) == 2
    assert "--out must be a folder without a tokenizer.json" in capsys.readouterr().err
    (tmp_path / "c.txt").write_text("zzz zzz zzz zzz zzz zzz zzz zzz\n" * 20)  # the second file alone
    also = ["tokenizer", "train", str(tmp_path / "a.txt"), str(tmp_path / "c.txt"), "--eos", "<end>"]
    assert main([*also, "--vocab", "400", "--out", str(tmp_path / "u")]) == 0
    capsys.readouterr()
    other = find_tokenizer(tmp_path / "u")
    assert other.decode([0]) == "<end>" and other.eos == 0 and len(other.encode(b" zzz")) == 1
    assert main([*given, "--vocab", "300", "--out", folder]) == 2
    assert f"--out must be a folder without a tokenizer.json, got {folder}" in capsys.readouterr().err


def test_the_same_texts_make_the_same_tokenizer() -> None:
    assert train_tokenizer([TEXT.encode()], 300) == train_tokenizer([TEXT.encode()], 300)


def test_a_batch_is_its_texts(tmp_path) -> None:
    for name, content in train_tokenizer([TEXT.encode()], 300).items():
        (tmp_path / name).write_bytes(content)
    made = find_tokenizer(tmp_path)
    made.files().clear()
    assert sorted(made.files()) == ["tokenizer.json", "tokenizer_config.json"], "a copy"
    ids, places = made.encode_with_places("")
    assert ids.shape == (0,) and places.shape == (0, 2) and places.dtype == np.int64
    texts = [line.encode() for line in TEXT.splitlines()[:5]] + [b"", b"\xff\xfe"]
    for text, ids in zip(texts, made.encode_batch(texts), strict=True):
        assert ids.dtype == made.encode(text).dtype and ids.tolist() == made.encode(text).tolist()
    (tmp_path / "in").mkdir()
    for i, text in enumerate(texts):
        (tmp_path / "in" / f"{i}.txt").write_bytes(text)
    data.prepare(tmp_path / "in", tmp_path / "x.tokens", made)
    found = open_token_file(tmp_path / "x.tokens")
    assert found.tokens[:].tolist() == [i for text in texts if text for i in [*made.encode(text).tolist(), 0]]


def test_what_cannot_be_trained(tmp_path, capsys, monkeypatch) -> None:
    with pytest.raises(ConfigError, match="vocab must be at least 257, .* got 256"):
        train_tokenizer([b"text"], 256)
    for much in (2**24 + 1, 10**20):  # the package would end the process, or raise an OverflowError
        with pytest.raises(ConfigError, match=f"^vocab must be at most 16,777,216, got {much:,}$"):
            train_tokenizer([b"text"], much)
    smallest = json.loads(train_tokenizer([b"text \xff"], 257)["tokenizer.json"])  # enough; texts need be no UTF-8
    assert len(smallest["model"]["vocab"]) == 257 and smallest["model"]["vocab"]["<|endoftext|>"] == 0
    with pytest.raises(ConfigError, match="eos must not be empty"):
        train_tokenizer([b"text"], 300, "")
    with pytest.raises(DataError, match="there is no text to train a tokenizer on"):
        train_tokenizer([], 300)
    (tmp_path / "a.txt").write_text("few words")
    for given, words in (
        ([], "tokenizer needs to know what to do: xtrain tokenizer train"),
        (["make"], "xtrain tokenizer train, got 'make'"),
        (["train", "--vocab", "300"], "expected arguments, got none; usage: xtrain tokenizer train FILES"),
        (["train", str(tmp_path / "a.txt")], "--vocab needs a value: the number of tokens"),
    ):
        assert main(["tokenizer", *given]) == 2
        assert words in capsys.readouterr().err
    assert main(["tokenizer", "train", str(tmp_path / "a.txt"), "--vocab", "900", "--out", str(tmp_path / "t")]) == 0
    assert "tokens; the texts give no more, 900 were asked for" in capsys.readouterr().out
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(DataError, match="^tokenizer train needs the package tokenizers: pip install"):
        train_tokenizer([b"text"], 300)


@pytest.mark.parametrize("full", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizer_is_written_whole_or_not_at_all(full: str, tmp_path, capsys, monkeypatch) -> None:
    """What a full disk leaves would be refused by the next call, which wants a folder without a tokenizer.json."""
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "there").mkdir()

    def write(path, *rest: Any) -> None:
        if path.name == full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write_file(path, *rest)

    monkeypatch.setattr("xtrain.cli.tokenizer.write_file", write)
    for name in ("new", "there"):
        out = tmp_path / name
        assert main(["tokenizer", "train", str(tmp_path / "a.txt"), "--vocab", "300", "--out", str(out)]) == 1
        said = f"xtrain: error: tokenizer train: {out / full} cannot be written: No space left on device\n"
        assert capsys.readouterr().err == said
        assert out.exists() == (name == "there") and not (out.exists() and list(out.iterdir()))
    place = tmp_path / "a.txt"
    assert main(["tokenizer", "train", str(place), "--vocab", "300", "--out", str(place)]) == 1
    assert f"tokenizer train: {place} cannot be written: File exists" in capsys.readouterr().err
    assert place.read_text() == TEXT
