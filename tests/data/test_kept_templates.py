"""A model with a chat template keeps it in its checkpoints, whatever it trains on; messages in the template of a model
whose tokens are bytes.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import xtrain as xt
from xtrain import data, models
from xtrain.cli import main
from xtrain.data.token_files import HEADER, open_token_file
from xtrain.errors import DataError
from xtrain.tokenizers import (
    ByteTokenizer,
    ChatTemplate,
    FileTokenizer,
    StoredFiles,
    find_tokenizer,
    has_template,
    load_tokenizer,
    train_tokenizer,
    with_template,
)
from xtrain.tokenizers.byte_level import KEPT
from xtrain.train import Trainer

pytestmark = pytest.mark.on_cpu
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
WORDS = b"the cat sat on the mat and the dog ran home. " * 100
TALK = [
    {"role": "user", "content": "Zw\u00f6lf \u6f22\u5b57?"},
    {"role": "assistant", "content": "\u00f6 \U0001f408 \u5b57"},
]


def words_of(kind: str, **settings: object) -> dict[str, bytes]:
    """The files of a tokenizer, with `settings` in tokenizer_config.json."""
    if kind == "files":
        pytest.importorskip("tokenizers", reason="needs tokenizers (pip install tokenizers)")
    files = ByteTokenizer().files() if kind == "bytes" else train_tokenizer([WORDS], 280)
    config = json.loads(files["tokenizer_config.json"]) | settings
    return {**files, "tokenizer_config.json": json.dumps(config).encode()}


def directory(folder: Path, files: dict[str, bytes], weights: bool = False) -> Path:
    folder.mkdir()
    if weights:
        xt.manual_seed(3)
        sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, head_dim=16)
        config = models.Qwen3Config(vocab_size=288, num_key_value_heads=1, **sizes)
        models.Qwen3(config).save_pretrained(folder)
        (folder / "manifest.json").unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def source_of(kind: str, tmp_path: Path, plain: Path) -> str:
    """Data whose tokenizer, where it holds one, is that of `plain`."""
    (tmp_path / "a.txt").write_bytes(WORDS)
    if kind == "text":
        return str(tmp_path / "a.txt")
    (tmp_path / "many").mkdir()
    names = [str(tmp_path / "many" / f"{name}.tokens") for name in ("a", "b")]
    for name in names:
        data.prepare(str(tmp_path / "a.txt"), name, find_tokenizer(plain))
    return {"tokens": names[0], "folder": str(tmp_path / "many"), "mixture": f"{names[0]}:1,{names[1]}:2"}[kind]


def checkpoint_of(tmp_path: Path, **options: object) -> Path:
    small = {"steps": 1, "batch_size": 2, "seq_len": 16, "eval_tokens": 32, "sample.tokens": 0, "device": "cpu"}
    Trainer({"out": str(tmp_path / "run"), **small, **options}, quiet=True).run()
    return sorted((tmp_path / "run").glob("checkpoint-*"))[-1]


@pytest.mark.parametrize("place", KEPT)
@pytest.mark.parametrize("source", ["text", "tokens", "folder", "mixture", "option"])
@pytest.mark.parametrize("kind", ["bytes", "files"])
def test_checkpoints_keep_the_models_template(kind, source, place, tmp_path) -> None:
    """Also where the data, or the option `tokenizer`, hold the same tokenizer without one; a resumed run, too."""
    files = words_of(kind)
    plain = directory(tmp_path / "plain", files)
    if place == "chat_template.jinja":
        files = {**files, place: TEMPLATE.encode()}
    else:
        files = words_of(kind, chat_template=TEMPLATE)
    model = directory(tmp_path / "model", files, weights=True)
    options = {"data": source_of("text" if source == "option" else source, tmp_path, plain), "model": str(model)}
    if source == "option":
        options["tokenizer"] = str(plain)
    saved = checkpoint_of(tmp_path, **options)
    assert load_tokenizer(saved).files() == load_tokenizer(model).files()
    assert ChatTemplate(load_tokenizer(saved).files()).render(TALK).startswith("[user]Zw")
    resumed = Trainer({"resume": str(saved), "steps": 2, "extend": True}, quiet=True)
    assert resumed.tokenizer is not None and has_template(resumed.tokenizer.files())


def test_of_two_templates_the_datas_is_kept(tmp_path) -> None:
    """It is the one that the messages were written in. A model without a template gets it."""
    made = directory(tmp_path / "made", words_of("bytes", chat_template=TEMPLATE))
    (tmp_path / "d.jsonl").write_text(json.dumps({"messages": TALK}) + "\n" + json.dumps({"text": "a" * 900}))
    data.prepare(tmp_path / "d.jsonl", tmp_path / "x.tokens", find_tokenizer(made))
    for name, files in (("none", words_of("bytes")), ("other", words_of("bytes", chat_template="other"))):
        (tmp_path / name).mkdir()
        model = directory(tmp_path / name / "model", files, weights=True)
        saved = checkpoint_of(tmp_path / name, data=str(tmp_path / "x.tokens"), model=str(model))
        assert load_tokenizer(saved).files() == find_tokenizer(made).files()


def test_any_source_lends_its_template(tmp_path) -> None:
    """Whichever file of a folder, or source of a mixture, has it."""
    (tmp_path / "in.txt").write_bytes(WORDS)
    (tmp_path / "many").mkdir()
    names = [str(tmp_path / "many" / f"{name}.tokens") for name in ("a", "b")]
    made = ByteTokenizer({"chat_template.jinja": TEMPLATE.encode()})
    data.prepare(tmp_path / "in.txt", names[0])
    data.prepare(tmp_path / "in.txt", names[1], made)
    for source in (str(tmp_path / "many"), f"{names[0]}:1,{names[1]}:1"):
        found = data.open_data(source).tokenizer
        assert found is not None and found.files() == made.files()


def test_documents_end_with_the_token_of_the_first() -> None:
    """Whichever has the template; and the given tokenizers stay as they are."""
    files = words_of("files")
    first, second, third = (
        FileTokenizer(StoredFiles(Path("x"), words))
        for words in (files, {**files, "chat_template.jinja": b"2"}, {**files, "chat_template.jinja": b"3"})
    )
    first.eos, second.eos = 5, 7
    found = with_template(first, second, third)
    assert found.files()["chat_template.jinja"] == b"2" and found.eos == 5
    assert (first.eos, second.eos) == (5, 7) and with_template(first) is first
    assert with_template(second, first, third) is second


def test_messages_of_a_byte_level_model(tmp_path) -> None:
    """Every byte of what the assistant says is learned, and no other; the template is in the token file, and in the
    checkpoints of a new model that trains on it.
    """
    pytest.importorskip("jinja2", reason="chat templates need jinja2")
    made = directory(tmp_path / "made", words_of("bytes", chat_template=TEMPLATE))
    (tmp_path / "d.jsonl").write_text((json.dumps({"messages": TALK}) + "\n") * 20)
    for processes in ("1", "2"):
        out = str(tmp_path / f"{processes}.tokens")
        words = ["prepare", str(tmp_path / "d.jsonl"), out, "--tokenizer", str(made), "--processes", processes]
        assert main(words) == 0
    assert (tmp_path / "1.tokens").read_bytes() == (tmp_path / "2.tokens").read_bytes()
    found = open_token_file(tmp_path / "1.tokens")
    before, said = f"[user]{TALK[0]['content']}\n[assistant]".encode(), f"{TALK[1]['content']}\n".encode()
    assert bytes(found.tokens[:]) == (before + said) * 20
    assert found.loss_mask[:].tolist() == ([0] * len(before) + [1] * len(said)) * 20
    assert found.tokenizer.files() == find_tokenizer(made).files()
    saved = checkpoint_of(tmp_path, data=str(tmp_path / "1.tokens"), model="tiny")
    assert load_tokenizer(saved).files() == find_tokenizer(made).files()


def test_places_of_bytes() -> None:
    """All bytes of a character have its place."""
    text = "a\u00f6\u5b57\U0001f408b"
    ids, places = ByteTokenizer().encode_with_places(text)
    assert ids.dtype == np.uint8 and bytes(ids) == text.encode()
    assert places.tolist() == [[0, 1], *[[1, 2]] * 2, *[[2, 3]] * 3, *[[3, 4]] * 4, [4, 5]]
    assert ByteTokenizer().encode_with_places("")[1].shape == (0, 2)


def test_messages_that_are_no_unicode(tmp_path) -> None:
    pytest.importorskip("jinja2", reason="chat templates need jinja2")
    tokenizer = ByteTokenizer({"chat_template.jinja": TEMPLATE.encode()})
    (tmp_path / "d.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "\ud800"}]}))
    with pytest.raises(DataError, match=r"^data: \S+d\.jsonl, line 1: .*must be text, got one that is no Unicode$"):
        data.prepare(tmp_path / "d.jsonl", tmp_path / "x.tokens", tokenizer)


def test_a_token_file_names_no_other_files(tmp_path) -> None:
    """A model directory gets the files that a byte-level model keeps, whatever names a token file has in its index."""
    tokenizer = ByteTokenizer({"chat_template.jinja": b"x", "../evil": b"y"})
    assert "../evil" not in tokenizer.files()
    (tmp_path / "a.txt").write_text("text")
    data.prepare(tmp_path / "a.txt", tmp_path / "x.tokens", tokenizer)
    content = (tmp_path / "x.tokens").read_bytes()
    fields = list(HEADER.unpack(content[: HEADER.size]))
    index = json.loads(content[fields[-2] :])
    index["sections"]["tokenizer/../evil"] = index["sections"]["tokenizer/chat_template.jinja"]
    text = json.dumps(index).encode()
    (tmp_path / "x.tokens").write_bytes(HEADER.pack(*fields[:-1], len(text)) + content[HEADER.size : fields[-2]] + text)
    found = open_token_file(tmp_path / "x.tokens").tokenizer
    assert set(found.files()) == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


@pytest.mark.parametrize("settings", [b"[]", b'"x"', b"{", b"[" * 100_000, b'{"chat_template": 1}'])
def test_settings_that_are_none_hold_no_template(settings: bytes) -> None:
    """A tokenizer is taken as it comes: what cannot be read is no template."""
    assert not has_template({"tokenizer_config.json": settings})
    assert has_template({"tokenizer_config.json": settings, "chat_template.jinja": b"x"})
