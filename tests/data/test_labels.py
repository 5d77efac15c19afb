"""Labels of supervised fine-tuning, token by token: from the line of a file to the targets of a batch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import xtrain as xt
from xtrain import data
from xtrain.cli import main
from xtrain.data import records, token_files
from xtrain.data.loader import IGNORED, Loader, Windows
from xtrain.data.token_files import HEADER, HEADER_BYTES, open_token_file
from xtrain.errors import ConfigError, DataError
from xtrain.tokenizers import ChatTemplate, find_tokenizer, train_tokenizer
from xtrain.train import Trainer

pytestmark = pytest.mark.on_cpu
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# The same, and a block that says what is learned: without the last line break.
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}{% else %}"
    "{{ message['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "the cat sat on the mat?"},
    {"role": "assistant", "content": "the cat sat."},
    {"role": "user", "content": "Zw\u00f6lf \u6f22\u5b57"},
    {"role": "assistant", "content": "\u00f6 the dog \u5b57 ran home"},
]


def jsonl(path: Path, *objects: object) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in objects))
    return path


def chat_directory(folder: Path, template: object = CHATML, jinja: str | None = None) -> Path:
    """A trained tokenizer with the special tokens of ChatML."""
    tokenizers = pytest.importorskip("tokenizers", reason="chat templates need a tokenizer.json")
    pytest.importorskip("jinja2", reason="chat templates need jinja2")
    folder.mkdir()
    files = train_tokenizer([b"the cat sat on the mat and the dog ran home. user assistant system " * 20], 300)
    reader = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    reader.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    (folder / "tokenizer.json").write_text(reader.to_str())
    settings = {**json.loads(files["tokenizer_config.json"]), "eos_token": "<|im_end|>"}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if jinja is not None:
        (folder / "chat_template.jinja").write_text(jinja)
    return folder


# ---- prompt and completion


def test_a_completion_is_learned_and_the_end(tmp_path) -> None:
    source = jsonl(tmp_path / "d.jsonl", {"text": "abc"}, {"prompt": "Q?", "completion": "Yes"}, {"text": "d"})
    assert data.prepare(source, tmp_path / "x.tokens") == 4 + 6 + 2
    found = open_token_file(tmp_path / "x.tokens")
    assert bytes(found.tokens[:]) == b"abc\0Q?Yes\0d\0"
    assert found.loss_mask[:].tolist() == [1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1]
    assert found.documents[:].tolist() == [0, 4, 10] and found.text_bytes == 0


def test_where_all_is_learned_there_is_no_mask(tmp_path) -> None:
    data.prepare(jsonl(tmp_path / "d.jsonl", {"text": "abc"}), tmp_path / "x.tokens")
    assert open_token_file(tmp_path / "x.tokens").loss_mask is None
    assert b"loss_mask" not in (tmp_path / "x.tokens").read_bytes()


def test_prompt_and_completion_are_encoded_for_themselves(tmp_path) -> None:
    """As generation sees them: it has the tokens of the prompt alone."""
    words = find_tokenizer(chat_directory(tmp_path / "t"))
    source = jsonl(tmp_path / "d.jsonl", {"prompt": "the ca", "completion": "t sat"})
    data.prepare(source, tmp_path / "x.tokens", words)
    found = open_token_file(tmp_path / "x.tokens")
    prompt, completion = words.encode(b"the ca").tolist(), words.encode(b"t sat").tolist()
    assert found.tokens[:].tolist() == [*prompt, *completion, words.eos]
    assert found.loss_mask[:].tolist() == [0] * len(prompt) + [1] * (len(completion) + 1)
    assert prompt + completion != words.encode(b"the cat sat").tolist()


# ---- messages


def expected(tokenizer, learned_newline: bool) -> tuple[list[int], list[int]]:
    """Tokens and mask of TALK, each part encoded alone: the special tokens keep the parts apart."""
    tokens: list[int] = []
    mask: list[int] = []
    for message in TALK:
        head = tokenizer.encode(f"<|im_start|>{message['role']}\n".encode()).tolist()
        body = tokenizer.encode(f"{message['content']}<|im_end|>".encode()).tolist()
        tail = tokenizer.encode(b"\n").tolist()
        said = int(message["role"] == "assistant")
        tokens += head + body + tail
        mask += [0] * len(head) + [said] * len(body) + [said * learned_newline] * len(tail)
    return tokens, mask


@pytest.mark.parametrize("template,newline", [(CHATML, True), (MARKED, False)])
def test_what_the_assistant_says_is_learned(tmp_path, template: str, newline: bool) -> None:
    words = find_tokenizer(chat_directory(tmp_path / "t", template))
    data.prepare(jsonl(tmp_path / "d.jsonl", {"messages": TALK}, {"text": "cat"}), tmp_path / "x.tokens", words)
    found = open_token_file(tmp_path / "x.tokens")
    tokens, mask = expected(words, newline)
    after = [*words.encode(b"cat").tolist(), words.eos]
    assert found.tokens[:].tolist() == tokens + after, "and no further end of the document"
    assert found.loss_mask[:].tolist() == mask + [1] * len(after)
    assert 0 < sum(mask) < len(mask)


@pytest.mark.parametrize(
    "template,jinja",
    [(None, CHATML), ("{{ 1 / 0 }}", CHATML), ([{"name": "tools", "template": "x"}, {"name": "default", "template": CHATML}], None)],
)  # fmt: skip
def test_places_of_a_template(tmp_path, template: object, jinja: str | None) -> None:
    found = ChatTemplate(find_tokenizer(chat_directory(tmp_path / "t", template, jinja)).files())
    assert found.render(TALK[:1]) == "<|im_start|>system\nBe short.<|im_end|>\n"
    assert found.render(TALK[:1], True).endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_a_template_has_what_transformers_gives_it() -> None:
    pytest.importorskip("jinja2", reason="needs jinja2 (pip install jinja2)")
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "{{ bos_token }}{% for m in messages %}{% if m.role == 'x' %}{% continue %}{% endif %}{{ m | tojson }}{% endfor %}{{ eos_token }}"}  # fmt: skip
    found = ChatTemplate({"tokenizer_config.json": json.dumps(config).encode()})
    assert found.render([{"role": "x"}, {"role": "\u00f6"}]) == '<s>{"role": "\u00f6"}</s>'
    marked = ChatTemplate({"chat_template.jinja": MARKED.encode()})
    assert marked.render(TALK) == ChatTemplate({"chat_template.jinja": CHATML.encode()}).render(TALK)


@pytest.mark.parametrize(
    "template,text",
    [
        ("a\n{% if true %}\n  b\n{% endif %}\nc", "a\n  b\nc"),  # the line break behind a block goes
        ("a\n    {% if true %}b{% endif %}", "a\nb"),  # and blanks before it
        ("{{ tools is none }} {{ documents is none }}", "True True"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{%- generation -%} x {%- endgeneration %}", "x"),
        ("{{ mask_token }}{{ pad_token }}", "<m><p>"),
        (b"\xff|", "\ufffd|"),
    ],
)
def test_a_template_is_rendered_as_transformers_does(template: str | bytes, text: str) -> None:
    """For spans, too, which are where the generation blocks are."""
    pytest.importorskip("jinja2", reason="needs jinja2 (pip install jinja2)")
    tokens = json.dumps({"mask_token": "<m>", "pad_token": {"content": "<p>"}}).encode()
    content = template if isinstance(template, bytes) else template.encode()
    found = ChatTemplate({"chat_template.jinja": content, "tokenizer_config.json": tokens})
    assert found.render(TALK) == text
    if b"generation" in content:
        assert found.spans(TALK) == ("x", [(0, 1)])
    else:
        marked = ChatTemplate(
            {"chat_template.jinja": content + b"{% generation %}{% endgeneration %}", "tokenizer_config.json": tokens}
        )
        assert marked.spans(TALK) == (text, [(len(text), len(text))])


REORDERS = "{{ messages | length }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
LAST = "{% for message in messages %}{{ message['content'] }}{% if loop.last %}.{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    "template,messages,words",
    [
        (CHATML, "hello", "messages must be a list of objects with a role, got 'hello'"),
        (CHATML, [], r"messages must be a list of objects with a role, got \[\]"),
        (CHATML, [{"content": "x"}], "messages must be a list of objects with a role"),
        (CHATML, [{"role": "user", "content": None}], "the chat template refuses them: "),
        (CHATML, [{"role": "user", "content": "\uf8f0"}], r"must not hold the characters U\+F8F0 and U\+F8F1"),
        (CHATML, [{"role": "user", "content": [{"text": "\uf8f1"}]}], r"must not hold the characters U\+F8F0"),
        (CHATML, [{"role": "user\uf8f0", "content": "x"}], r"must not hold the characters U\+F8F0"),
        ("{{ raise_exception('roles must alternate') }}", TALK, "the chat template refuses them: roles must alternate"),
        (REORDERS, TALK, "writes message 3 otherwise than add_generation_prompt announces it"),
        (LAST, TALK[1:3], "writes message 2 otherwise than add_generation_prompt announces it"),
        (LAST, [{"role": "assistant", "content": "a"}, TALK[1]], r"changes message 1 when others follow"),
    ],
)
def test_messages_that_cannot_be(tmp_path, template: str, messages: object, words: str) -> None:
    tokenizer = find_tokenizer(chat_directory(tmp_path / "t", template))
    source = jsonl(tmp_path / "d.jsonl", {"text": "a"}, {"messages": messages})
    with pytest.raises(DataError, match=rf"^data: \S+d\.jsonl, line 2: .*{words}"):
        data.prepare(source, tmp_path / "x.tokens", tokenizer)


def test_templates_that_cannot_be(tmp_path, monkeypatch) -> None:
    source = jsonl(tmp_path / "d.jsonl", {"messages": TALK})
    with pytest.raises(DataError, match="messages need a tokenizer with a chat template: --tokenizer DIR"):
        data.prepare(source, tmp_path / "x.tokens")
    for i, (template, words) in enumerate(
        ((None, "must have a chat template for messages, and has none"), ("{% if %}", "cannot be read: "))
    ):
        with pytest.raises(DataError, match=words):
            data.prepare(source, tmp_path / "x", find_tokenizer(chat_directory(tmp_path / f"t{i}", template)))
    for template in ("{{ " + "(" * 3000, "{{ " + "9" * 5000 + " }}", "{{ [" * 500):  # of Python's own, and not of Jinja
        with pytest.raises(DataError, match="^data: the chat template of the tokenizer cannot be read: ") as error:
            ChatTemplate({"chat_template.jinja": template.encode()})
        assert str(error.value).isprintable() and len(str(error.value)) < 300
    good = find_tokenizer(chat_directory(tmp_path / "good"))
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    with pytest.raises(DataError, match=r"messages need the package jinja2: pip install 'xtrain\[chat\]'"):
        data.prepare(source, tmp_path / "x.tokens", good)


# ---- which of them a line is


@pytest.mark.parametrize(
    "value,field,kind",
    [
        ({"text": "a", "id": 3}, None, "text"),
        ({"messages": [], "prompt": "x", "prompt_id": 1}, None, "messages"),
        ({"prompt": "a", "completion": "b"}, None, "prompt"),
        ({"text": None, "prompt": "a", "completion": "b"}, None, "prompt"),
        ({"text": "a", "prompt": "b", "completion": None}, None, "text"),
        ({"text": "a", "messages": []}, "messages", "messages"),
        ({"text": "a", "body": "b"}, "body", "body"),
        (
            {"text": "a", "messages": []},
            None,
            "must have text or messages, not both, got 'text, messages'; see --field",
        ),
        ({"prompt": "a"}, None, "must have text, messages, or prompt and completion, got 'prompt'; see --field"),
        ({"prompt": "a"}, "prompt", "must have the field prompt and completion, got 'prompt'; see --field"),
        ({"text": "a"}, "body", "must have the field 'body', got 'text'; see --field"),
        ({}, None, "must have text, messages, or prompt and completion, got 'nothing'"),
    ],
)
def test_what_a_line_is(value: dict, field: str | None, kind: str) -> None:
    try:
        found = records.kind_of(data.Document("place", value), field)
    except DataError as error:
        found = str(error).removeprefix("data: place ")
    assert found.startswith(kind)


def test_texts_for_a_tokenizer() -> None:
    for value, texts in (
        ({"text": "a"}, [b"a"]),
        ({"prompt": "a", "completion": "b"}, [b"a", b"b"]),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant"}]}, [b"a"]),
    ):
        assert list(data.texts_of(data.Document("place", value), None)) == texts
    assert list(data.texts_of(data.Document("place", b"raw"), None)) == [b"raw"]


# ---- from the mask to the targets


def test_targets_of_windows() -> None:
    """A target is left out where the mask of its own token is 0; segments without a mask learn everything."""
    tokens = [np.arange(13), np.arange(100, 109)]
    masks = [np.array([1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 0], np.uint8), None]
    windows = Windows(tokens, 4, masks=masks)
    indices = np.array([0, 1, 2, 3, 4])
    block = windows.gather(indices)
    x = IGNORED
    assert windows.targets(indices, block).tolist() == [
        [1, x, x, x], [5, 6, 7, 8], [9, 10, 11, x], [101, 102, 103, 104], [105, 106, 107, 108],
    ]  # fmt: skip
    assert block[0].tolist() == [0, 1, 2, 3, 4], "what is read is whole"
    short = Windows([np.arange(3), np.arange(13)], 4, masks=[np.zeros(3), masks[0]])
    assert short.targets(np.array([0]), short.gather(np.array([0]))).tolist() == [[1, x, x, x]]
    one = windows.gather(indices[:1])
    assert windows.targets(indices[:1], one).tolist() == [[1, x, x, x]]
    assert one.tolist() == [[0, 1, 2, 3, 4]], "also where a column of it would be dense as it is"
    ids, targets = Loader(tokens, 1, 4, masks=masks).next_batch()
    assert (ids != x).all()
    loader = Loader(tokens, 5, 4, masks=masks)
    ids, targets = loader.next_batch()
    assert targets.dtype == np.int64 and targets.flags.c_contiguous and (targets == IGNORED).sum() == 4
    assert ((targets == ids + 1) | (targets == IGNORED)).all()


def tuning_file(tmp_path: Path, name: str = "x.tokens", lines: int = 60) -> Path:
    values = [{"prompt": f"question {i}?", "completion": f"answer {i * 7}."} for i in range(lines)]
    data.prepare(jsonl(tmp_path / "d.jsonl", *values), tmp_path / name)
    return tmp_path / name


def test_a_file_is_cut_with_its_mask(tmp_path) -> None:
    corpus = data.open_data(tuning_file(tmp_path))
    for segment, mask in ((corpus.train[0], corpus.train_masks[0]), (corpus.val[0], corpus.val_masks[0])):
        text, kept = bytes(segment[:]), mask[:]
        assert len(text) == len(kept)
        # learned is what stands between a question mark and the zero byte, and that byte
        want, on = [], text[:1] not in b"question"
        for byte in text:
            want.append(int(on))
            on = byte == ord("?") or (on and byte != 0)
        assert kept.tolist() == want
    assert corpus.bytes_per_token is None
    block, targets = corpus.val_batch(16, 10**6)
    assert (block == corpus.val_windows(16, 10**6)).all() and 0 < (targets == IGNORED).sum() < targets.size


def test_masks_of_several_files(tmp_path) -> None:
    (tmp_path / "in").mkdir()
    tuning_file(tmp_path, "in/a.tokens")
    tuning_file(tmp_path, "in/val.tokens", 9)
    (tmp_path / "t.txt").write_text("text " * 50)
    data.prepare(tmp_path / "t.txt", tmp_path / "in" / "b.tokens")
    corpus = data.open_data(tmp_path / "in")
    assert [mask is None for mask in corpus.train_masks] == [False, True] and len(corpus.val_masks) == 1
    assert len(corpus.segments) == 5, "two masks are part of what a resumed run compares"
    loader = corpus.loader(8, 16)
    assert any((loader.next_batch()[1] == IGNORED).any() for _ in range(3))


def run(tmp_path: Path, **options) -> Trainer:
    given = dict(model="tiny", steps=2, seq_len=16, batch_size=4, eval_tokens=64, out=str(tmp_path / "run"), plot=False)
    return Trainer(given | {"sample.tokens": 0, "device": "cpu"} | options, quiet=True)


def test_a_run_counts_what_is_learned(tmp_path) -> None:
    """Loss and validation loss are means over the learned tokens; a changed mask is other data."""
    path = tuning_file(tmp_path)
    trainer = run(tmp_path, data=str(path), grad_accum=2)
    loader = data.open_data(path).loader(4, 16)
    ids, targets = loader.next_batch()
    with xt.no_grad():
        each = trainer.model.loss(xt.from_numpy(ids), xt.from_numpy(targets), reduction="none").numpy()
    learned = targets.reshape(-1) != IGNORED
    assert 0 < learned.sum() < learned.size and (each[~learned] == 0).all()
    values = trainer.evaluate()
    with xt.no_grad():
        ids = np.ascontiguousarray(trainer.val[:, :-1])
        rows = trainer.model.loss(xt.from_numpy(ids), xt.from_numpy(trainer.val_targets), reduction="none").numpy()
    kept = trainer.val_targets.reshape(-1) != IGNORED
    assert values == {"val_loss": pytest.approx(rows[kept].mean(), rel=1e-5)}
    assert trainer.train_step()["loss"] == pytest.approx(each[learned].mean(), rel=1e-5)
    trainer.run()
    content = bytearray(path.read_bytes())
    at, size = HEADER.unpack(content[: HEADER.size])[-2:]
    start, length = json.loads(content[at : at + size])["sections"]["loss_mask"]
    content[start : start + length] = b"\1" * length
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="now holds something else"):
        run(tmp_path, resume=str(tmp_path / "run"), out="", data=str(path))


def test_a_validation_part_that_learns_nothing(tmp_path) -> None:
    source = jsonl(tmp_path / "d.jsonl", {"text": "a" * 500}, {"prompt": "b" * 500, "completion": ""})
    data.prepare(source, tmp_path / "x.tokens")
    with pytest.raises(DataError, match="the validation part of .* holds no token that is learned"):
        data.open_data(tmp_path / "x.tokens", val_fraction=0.2).val_batch(16, 64)


# ---- damaged files


def test_places_in_a_token_file(tmp_path, monkeypatch) -> None:
    """Sections begin at multiples of 64 bytes; the index is behind the tokens; it and a tokenizer's files have limits."""
    pytest.importorskip("tokenizers", reason="needs tokenizers (pip install tokenizers)")
    (tmp_path / "t").mkdir()
    for name, content in train_tokenizer([b"a few words"], 260).items():
        (tmp_path / "t" / name).write_bytes(content)
    (tmp_path / "d.jsonl").write_text(json.dumps({"prompt": "a few", "completion": "words"}) + "\n")
    data.prepare(tmp_path / "d.jsonl", tmp_path / "a", find_tokenizer(tmp_path / "t"))
    good = (tmp_path / "a").read_bytes()
    fields = list(HEADER.unpack(good[: HEADER.size]))
    width, count, at, size = fields[2], fields[3], *fields[-2:]
    sections = json.loads(good[at:])["sections"]
    assert len(sections) > 3 and all(place % 64 == 0 for place, _ in sections.values())
    path = tmp_path / "a"
    fields[3] = (at - HEADER_BYTES) // width + 1  # tokens up to the first byte of the index
    assert fields[3] > count and HEADER_BYTES + fields[3] * width > at
    path.write_bytes(HEADER.pack(*fields) + good[HEADER.size :])
    with pytest.raises(DataError, match=rf"is damaged: its header says {len(good)} bytes in all"):
        open_token_file(path)
    path.write_bytes(good)
    largest = max(sizes for name, (_, sizes) in sections.items() if name.startswith("tokenizer/"))
    for name, limit, words in (
        ("_LARGEST_INDEX", size, "its header says"),
        ("_LARGEST_TOKENIZER", largest, "a file of its tokenizer is too large"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(token_files, name, limit)
            open_token_file(path)
            patch.setattr(token_files, name, limit - 1)
            with pytest.raises(DataError, match=f"is damaged: {words}"):
                open_token_file(path)
    path.write_bytes(good[:at] + good[at:].replace(b'"tokenizer/tokenizer.json"', b'"tokenizer/tokenizer.jso_"'))
    with pytest.raises(DataError, match="is damaged: it has no tokenizer.json$"):
        open_token_file(path, with_tokenizer=False)


def test_damaged_masks_and_documents(tmp_path, monkeypatch) -> None:
    good = tuning_file(tmp_path).read_bytes()
    fields = list(HEADER.unpack(good[: HEADER.size]))
    at = fields[-2]
    index = json.loads(good[at:])
    assert index["required"] == ["loss_mask"]
    start, length = index["sections"]["loss_mask"]
    index["sections"]["loss_mask"] = [start, length - 1]
    text = json.dumps(index).encode()
    (tmp_path / "a").write_bytes(HEADER.pack(*fields[:-1], len(text)) + good[HEADER.size : at] + text)
    with pytest.raises(
        DataError, match=rf"its loss_mask must have a byte for each of {length} tokens, got {length - 1}"
    ):
        open_token_file(tmp_path / "a")
    place, size = json.loads(good[at:])["sections"]["documents"]
    starts = np.frombuffer(good[place : place + size], "<u8")
    monkeypatch.setattr(token_files, "_PIECE", 8)  # so that pieces follow each other
    for changed, words in (
        ({5: 0}, r"document 5 begins at token 0, which is before the one it follows"),
        ({8: 1}, "document 8 begins at token 1"),
        ({59: length + 1}, rf"document 59 begins at token {length + 1}, .* or behind the last of {length}"),
        ({59: length}, None),
        ({7: int(starts[6])}, None),
    ):
        new = starts.copy()
        for which, value in changed.items():
            new[which] = value
        (tmp_path / "a").write_bytes(good[:place] + new.tobytes() + good[place + size :])
        if words is None:
            open_token_file(tmp_path / "a")
        else:
            with pytest.raises(DataError, match=f"is damaged: {words}"):
                open_token_file(tmp_path / "a")


def test_the_command(tmp_path, capsys) -> None:
    folder = chat_directory(tmp_path / "t")
    source = jsonl(tmp_path / "d.jsonl", {"messages": TALK, "text": "x"})
    out = str(tmp_path / "x.tokens")
    assert main(["prepare", str(source), out, "--tokenizer", str(folder)]) == 1
    assert "d.jsonl, line 1 must have text or messages, not both" in capsys.readouterr().err
    assert main(["prepare", str(source), out, "--tokenizer", str(folder), "--field", "messages"]) == 0
    assert open_token_file(out).loss_mask is not None
