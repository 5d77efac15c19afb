"""Token files of version 2: they hold their tokenizer and where documents begin; the first version stays readable."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from runs import options

from xtrain import data
from xtrain.cli import main
from xtrain.data.token_files import HEADER, HEADER_BYTES, MAGIC, open_token_file
from xtrain.errors import ConfigError, DataError
from xtrain.tokenizers import ByteTokenizer, load_tokenizer
from xtrain.train import Trainer

pytest.importorskip("tokenizers", reason="needs tokenizers (pip install tokenizers)")
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "home"]


def tokenizer_directory(folder: Path, words: list[str] = WORDS, end: str | None = "<end>") -> Path:
    """A tokenizer of whole words in a model directory; its end of a document is named in tokenizer_config.json alone."""
    folder.mkdir()
    vocab = {word: i for i, word in enumerate([*words, "<unk>"])}
    added = [] if end is None else [dict(id=len(vocab), content=end, special=True, single_word=False, lstrip=False, rstrip=False, normalized=False)]  # fmt: skip
    content = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    return folder


def texts(folder: Path, documents: int = 8) -> Path:
    folder.mkdir()
    for i in range(documents):
        (folder / f"{i}.txt").write_text(" ".join(np.random.default_rng(i).choice(WORDS, 90 + i)))
    return folder


def test_documents_and_tokenizer_come_back(tmp_path) -> None:
    words = load_tokenizer(tokenizer_directory(tmp_path / "t"))
    count = data.prepare(texts(tmp_path / "in"), tmp_path / "x.tokens", words)
    found = open_token_file(tmp_path / "x.tokens")
    starts = found.documents[:].tolist()
    assert starts == [sum(91 + i for i in range(n)) for n in range(8)] and count == 8 * 91 + 28
    tokens = found.tokens[:]
    assert (tokens[np.array(starts[1:]) - 1] == words.eos).all() and tokens[-1] == words.eos == 11
    assert found.tokenizer.eos == 11 and found.tokenizer.files() == words.files()
    assert found.tokenizer.decode(tokens[:90]).split() == (tmp_path / "in" / "0.txt").read_text().split()
    opened = data.open_data(tmp_path / "x.tokens")
    assert opened.tokenizer.files() == words.files() and opened.vocab_size == 12


def test_ids_need_no_tokenizer(tmp_path, monkeypatch) -> None:
    """Without the package `tokenizers` the tokens of a file can still be read."""
    data.prepare(texts(tmp_path / "in"), tmp_path / "x.tokens", load_tokenizer(tokenizer_directory(tmp_path / "t")))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    tokens, _, vocab = data.open_tokens(tmp_path / "x.tokens")
    assert len(tokens) == 756 and vocab == 12
    with pytest.raises(DataError, match="needs the package tokenizers"):
        open_token_file(tmp_path / "x.tokens")


def test_bytes_are_their_own_tokenizer(tmp_path) -> None:
    data.prepare(texts(tmp_path / "in"), tmp_path / "x.tokens")
    found = open_token_file(tmp_path / "x.tokens")
    assert type(found.tokenizer) is ByteTokenizer and len(found.documents[:]) == 8
    assert (tmp_path / "x.tokens").stat().st_size < HEADER_BYTES + len(found.tokens) + 500


def test_the_first_version_is_read(tmp_path) -> None:
    head = struct.pack("<8sIIQQI", MAGIC, 1, 2, 5, 9, 300).ljust(HEADER_BYTES, b"\0")
    (tmp_path / "a.tokens").write_bytes(head + np.arange(5, dtype="<u2").tobytes())
    found = open_token_file(tmp_path / "a.tokens")
    assert (found.tokens[:].tolist(), found.text_bytes, found.vocab_size) == ([0, 1, 2, 3, 4], 9, 300)
    assert found.documents is None and found.tokenizer is None
    for wrong in (head + bytes(9), head + bytes(11)):
        (tmp_path / "a.tokens").write_bytes(wrong)
        with pytest.raises(DataError, match="is damaged: its header says 5 tokens of 2 bytes"):
            open_token_file(tmp_path / "a.tokens")


def test_the_end_of_a_document_is_kept(tmp_path) -> None:
    """It may come from config.json, which is no file of the tokenizer."""
    folder = tokenizer_directory(tmp_path / "t", end=None)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 4}))
    data.prepare(texts(tmp_path / "in"), tmp_path / "x.tokens", load_tokenizer(folder))
    assert open_token_file(tmp_path / "x.tokens").tokenizer.eos == 4


@pytest.mark.parametrize("end", [None, "<absent>"])
def test_documents_without_an_end_are_told(tmp_path, capsys, end: str | None) -> None:
    """Of a tokenizer that names none, or one that it does not have: nothing ends its documents."""
    folder = tokenizer_directory(tmp_path / "t", end=None)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    words = "^data: the tokenizer has no end of a document, so nothing is put between documents: name a token of its"
    with pytest.warns(UserWarning, match=f"{words} tokenizer.json as eos_token in tokenizer_config.json$"):
        data.prepare(texts(tmp_path / "in"), tmp_path / "x.tokens", load_tokenizer(folder))
    for tokenizer, told in ((folder, 1), (tokenizer_directory(tmp_path / "ends"), 0)):
        assert main(["prepare", str(tmp_path / "in"), str(tmp_path / "y"), "--tokenizer", str(tokenizer)]) == 0
        out, err = capsys.readouterr()
        assert out.endswith(" tokens\n") and err.count("xtrain: warning: data: the tokenizer has no end") == told


def test_a_run_on_documents_without_an_end_tells_so(tmp_path, capsys) -> None:
    """Where it joins texts of a folder itself; one text needs no end."""
    without, several, one = (
        tokenizer_directory(tmp_path / "t", end=None),
        texts(tmp_path / "in"),
        texts(tmp_path / "one", 1),
    )
    cases = ((several, without, 1), (one, without, 0), (several, tokenizer_directory(tmp_path / "ends"), 0))
    for i, (source, tokenizer, told) in enumerate(cases):
        Trainer(options(source, tmp_path / f"run{i}", tokenizer=str(tokenizer), seq_len=8, eval_tokens=8))
        out, err = capsys.readouterr()
        assert (out + err).count("warning: data: the tokenizer has no end of a document") == told, (source, out, err)
        values = ["train", "--dry-run", f"--data={source}", f"--out={tmp_path / 'dry'}", f"--tokenizer={tokenizer}"]
        assert main([*values, "--seq-len=8", "--eval-tokens=8"]) == 0
        assert capsys.readouterr().out.count("warning: data: the tokenizer has no end of a document") == told


def run(tmp_path: Path, **options) -> Trainer:
    given = dict(model="tiny", steps=2, seq_len=16, batch_size=2, eval_tokens=32, out=str(tmp_path / "run"))
    trainer = Trainer(given | {"sample.tokens": 0} | options, quiet=True)
    trainer.run()
    return trainer


def test_a_run_on_tokens_can_be_sampled(tmp_path, capsys) -> None:
    """prepare with a tokenizer, train on the tokens, sample: text of words comes back."""
    folder = tokenizer_directory(tmp_path / "t")
    assert main(["prepare", str(texts(tmp_path / "in")), str(tmp_path / "x.tokens"), "--tokenizer", str(folder)]) == 0
    assert run(tmp_path, data=str(tmp_path / "x.tokens")).corpus.vocab_size == 12
    capsys.readouterr()
    assert main(["sample", str(tmp_path / "run"), "--prompt", "the cat", "--max-tokens", "8"]) == 0
    said = capsys.readouterr().out.split()
    assert said[:2] == ["the", "cat"] and set(said) <= {*WORDS, "<unk>", "<end>"}
    resumed = Trainer({"resume": str(tmp_path / "run"), "steps": 4, "extend": True}, quiet=True)
    assert resumed.tokenizer.files() == load_tokenizer(folder).files()


def test_text_is_encoded_by_the_tokenizer_of_the_option(tmp_path) -> None:
    folder = tokenizer_directory(tmp_path / "t")
    trainer = run(tmp_path, data=str(texts(tmp_path / "in")), tokenizer=str(folder))
    assert trainer.corpus.vocab_size == 12 and trainer.corpus.train_tokens < 8 * 100
    with pytest.raises(DataError, match="in must be a directory with a tokenizer.json"):
        run(tmp_path, data=str(tmp_path / "in"), tokenizer=str(tmp_path / "in"), out=str(tmp_path / "other"))
    assert main(["prepare", str(tmp_path / "in"), str(tmp_path / "y"), "--tokenizer", str(tmp_path / "in")]) == 1


def test_sources_of_a_mixture_share_a_tokenizer(tmp_path, monkeypatch) -> None:
    """Texts are encoded by that of the token files beside them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text(" ".join(np.random.default_rng(0).choice(WORDS, 400)))
    for name, words in (("t", WORDS), ("u", WORDS[::-1])):
        found = load_tokenizer(tokenizer_directory(tmp_path / name, words))
        data.prepare("a.txt", f"{name}.tokens", found)
    opened = data.open_data("a.txt:1,t.tokens:1")
    assert opened.tokenizer is not None and opened.vocab_size == 12 and opened.parts[0].train_tokens == 380
    assert opened.parts[0].name == "a.txt" and [part.vocab_size for part in opened.parts] == [12, 12]
    with pytest.raises(DataError, match=r"^data: t\.tokens and u\.tokens were made by different tokenizers$"):
        data.open_data("t.tokens:1,u.tokens:1")
    np.save("n.npy", np.arange(1000))
    with pytest.raises(DataError, match=r"^data: n\.npy does not say which tokenizer made it, and t\.tokens has one"):
        data.open_data("t.tokens:1,n.npy:1")


def test_another_tokenizer_is_refused(tmp_path) -> None:
    first, second = tokenizer_directory(tmp_path / "t"), tokenizer_directory(tmp_path / "u", [*WORDS[::-1]])
    source = texts(tmp_path / "in")
    (tmp_path / "both").mkdir()
    for folder, name in ((first, "a.tokens"), (second, "b.tokens")):
        data.prepare(source, tmp_path / "both" / name, load_tokenizer(folder))
    with pytest.raises(DataError, match=r"b\.tokens and .*a\.tokens were made by different tokenizers"):
        data.open_data(tmp_path / "both")
    tokens = tmp_path / "both" / "a.tokens"
    for given in (load_tokenizer(second), ByteTokenizer()):
        with pytest.raises(DataError, match=r"a\.tokens was made by another tokenizer than that of the model"):
            data.open_data(tokens, given)
    assert data.open_data(tokens, load_tokenizer(first)).tokenizer is not None
    content = json.loads((first / "tokenizer.json").read_text())
    (first / "tokenizer.json").write_text(json.dumps(content, indent=4, sort_keys=True))  # the same, written otherwise
    assert data.open_data(tokens, load_tokenizer(first)).tokenizer is not None
    run(tmp_path, data=str(tokens))
    model = str(sorted((tmp_path / "run").glob("checkpoint-*"))[-1])
    with pytest.raises(ConfigError, match="tokenizer must be that of the model"):
        run(tmp_path, data=str(source), model=model, tokenizer=str(second), out=str(tmp_path / "other"))


def test_damaged_indexes(tmp_path) -> None:
    path = tmp_path / "x.tokens"
    data.prepare(texts(tmp_path / "in"), path, load_tokenizer(tokenizer_directory(tmp_path / "t")))
    good = path.read_bytes()
    fields = list(HEADER.unpack(good[: HEADER.size]))
    at, size = fields[-2:]
    index = json.loads(good[at:])

    def with_index(change) -> bytes:
        value = json.loads(good[at:])
        change(value)
        text = json.dumps(value).encode()
        return HEADER.pack(*fields[:-1], len(text)) + good[HEADER.size : at] + text

    def tokens_of(content: bytes):
        path.write_bytes(content)
        return open_token_file(path)

    assert tokens_of(with_index(lambda value: None)).tokenizer is not None
    assert tokens_of(with_index(lambda value: value["sections"].update({"later": [64, 8]}))).documents is not None
    for change, words in (
        (lambda v: v.update(required=["weights"]), "has a section 'weights', which this version cannot use"),
        (lambda v: v.update(required=[3, "weights"]), "has a section '3', which this version cannot use"),
        (lambda v: v.pop("sections"), "its index cannot be read"),
        (lambda v: v["sections"].update(documents=[64, 1 << 40]), "its index cannot be read"),
        (lambda v: v["sections"].update(documents=[0, 8]), "its index cannot be read"),
        (lambda v: v["sections"].update(documents=["x", None]), "its index cannot be read"),
        (lambda v: v["sections"].update(documents=[64.0, 8]), "its index cannot be read"),
        (lambda v: v["sections"].update(documents=[64, True]), "its index cannot be read"),
        (lambda v: v["sections"].update(documents=[64, 12]), "its documents must have 8 bytes each, got 12"),
        (lambda v: v["sections"].update({f"tokenizer/{i}": [64, 64] for i in range(10**4)}), "its index cannot be"),
        (lambda v: v["tokenizer"].update(eos=1.5), "its index cannot be read"),
        (lambda v: v["tokenizer"].update(eos=-1), "its index cannot be read"),
        (lambda v: v["tokenizer"].update(eos=True), "its index cannot be read"),
        (lambda v: v["tokenizer"].update(eos=1.5), "its index cannot be read"),
        (lambda v: v["sections"].pop("tokenizer/tokenizer.json"), "it has no tokenizer.json"),
    ):
        with pytest.raises(DataError, match=words):
            tokens_of(with_index(change))
    for content in (good[:-1], good + b"x", good[: at - 1], HEADER.pack(*fields[:-2], 3, size) + good[HEADER.size :]):
        with pytest.raises(DataError, match="is damaged: its header says"):
            tokens_of(content)
    assert index["required"] == []
