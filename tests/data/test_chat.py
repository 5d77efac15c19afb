"""`xtrain chat` and `xtrain sample` on a real directory: a tokenizer of the package, a chat template and a model."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from runs import HANGS

import xtrain as xt
from xtrain import models
from xtrain.cli import main
from xtrain.tokenizers import ByteTokenizer, load_tokenizer

tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers (pip install tokenizers)")
pytest.importorskip("jinja2", reason="needs jinja2 (pip install jinja2)")
pytestmark = pytest.mark.on_cpu
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = b"how are you today? be short. a model of language says what comes next, and again what comes next. " * 20


@pytest.fixture(scope="module")
def words() -> dict[str, bytes]:
    """The files of a tokenizer with the two special tokens of the template."""
    from xtrain.tokenizers import train_tokenizer

    files = train_tokenizer([TEXT], 290)
    made = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    settings = json.loads(files["tokenizer_config.json"]) | {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    return {**files, "tokenizer.json": made.to_str().encode(), "tokenizer_config.json": json.dumps(settings).encode()}


def save(path: Path, words: dict[str, bytes], vocab_size: int) -> tokenizers.Tokenizer:
    """A model directory as from elsewhere: it has no manifest."""
    xt.manual_seed(3)
    sizes = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    config = models.Qwen3Config(vocab_size=vocab_size, **sizes, head_dim=8, initializer_range=0.4)
    models.Qwen3(config).save_pretrained(path)
    for name in ("manifest.json", "generation_config.json"):
        (path / name).unlink()
    for name, content in words.items():
        (path / name).write_bytes(content)
    return tokenizers.Tokenizer.from_str(words["tokenizer.json"].decode())


def chatml(*said: str) -> str:
    """A conversation by the template's rules, up to the next answer."""
    roles = ["system", *["user", "assistant"] * len(said)]
    turns = (f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in zip(roles, said))
    return "".join(turns) + "<|im_start|>assistant\n"


def talk(path: Path, lines: str, *options: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "xtrain", "chat", str(path), "--temperature", "0", *options]
    return subprocess.run(words, input=lines, capture_output=True, text=True, timeout=HANGS, check=False)


def test_a_conversation_in_a_terminal(tmp_path, words) -> None:
    """Answers are what the model continues the template's text with, up to an end: of the tokenizer, or of a list in
    generation_config.json. Each has all before it; /new keeps the system's message alone.
    """
    reader = save(tmp_path / "m", words, 1 + max(json.loads(words["tokenizer.json"])["model"]["vocab"].values()) + 2)
    model, end = models.load(tmp_path / "m"), reader.token_to_id("<|im_end|>")

    def answer(*said: str) -> tuple[str, list[int]]:
        ids = reader.encode(chatml(*said), add_special_tokens=False).ids
        new = model.generate(ids, 12, temperature=0.0, eos=ends).tolist()[len(ids) :]
        return reader.decode([token for token in new if token not in ends], skip_special_tokens=False), new

    ends: list[int] = [end]
    free = answer("be short", "how are you?")[1]
    assert len(set(free)) > 4
    ends = [end, free[4]]
    (tmp_path / "m" / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    first, new = answer("be short", "how are you?")
    assert new[-1] == free[4] and len(new) <= 5, "the list ends it"
    second, _ = answer("be short", "how are you?", first, "and today?")
    done = talk(
        tmp_path / "m", "how are you?\n\nand today?\n/new\nhow are you?\n", "--system", "be short", "--max-tokens", "12"
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout == f"{first}\n{second}\n{first}\n"


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
@pytest.mark.parametrize("own", [True, False], ids=["saved by xtrain", "weights alone"])
def test_a_byte_level_model_has_a_template(place, own, tmp_path) -> None:
    """As any other, and it stays with the tokenizer, so that checkpoints have it. Files of another tokenizer are none."""
    words = ByteTokenizer().files() if own else {}
    if place == "chat_template.jinja":
        words[place] = TEMPLATE.encode()
    else:
        settings = json.loads(words.get(place, b"{}")) | {"chat_template": TEMPLATE}
        words[place] = json.dumps(settings).encode()
    save(tmp_path / "m", {**ByteTokenizer().files(), **words}, 256)
    if not own:
        for name in {"tokenizer.json", "tokenizer_config.json"} - words.keys():
            (tmp_path / "m" / name).unlink()
        (tmp_path / "m" / "tokenizer.json").unlink(missing_ok=True)
    if not own and place == "tokenizer_config.json":
        (tmp_path / "m" / "chat_template.jinja").write_text(TEMPLATE)
    done = talk(tmp_path / "m", "how are you?\n", "--max-tokens", "12")
    if not own and place == "tokenizer_config.json":  # of a tokenizer that is not read
        assert done.returncode == 1 and "must have a chat template for messages" in done.stderr, done.stderr
        assert load_tokenizer(tmp_path / "m").files() == ByteTokenizer().files()
        return
    ids = ByteTokenizer().encode(chatml("", "how are you?").split("\n", 2)[2].encode())
    new = models.load(tmp_path / "m").generate(ids, 12, temperature=0.0, eos=0).tolist()[len(ids) :]
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert done.stdout == ByteTokenizer().decode([byte for byte in new if byte]) + "\n"
    assert load_tokenizer(tmp_path / "m").files() == {**ByteTokenizer().files(), **words}


@pytest.mark.parametrize("template", ["", "{% if false %}{{ messages }}{% endif %}"], ids=["empty", "writes nothing"])
def test_a_template_that_writes_nothing(template, tmp_path) -> None:
    """Is told by the name of the model; a command without a message has asked for nothing."""
    save(tmp_path / "m", {**ByteTokenizer().files(), "chat_template.jinja": template.encode()}, 256)
    done = talk(tmp_path / "m", "how are you?\n")
    told = f"xtrain: error: data: the chat template of {tmp_path / 'm'} writes nothing for these messages\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", told)
    done = talk(tmp_path / "m", "")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_message_may_be_any_bytes_and_the_input_closed(tmp_path, words, monkeypatch) -> None:
    """Bytes that are no UTF-8, in a message and in --system, are what they are in a text file."""
    size = 1 + max(json.loads(words["tokenizer.json"])["model"]["vocab"].values()) + 2
    names = save(tmp_path / "m", words, size)
    ids = load_tokenizer(tmp_path / "m").encode(chatml("\udcff", "a\udcfe\0b").encode("utf-8", "surrogateescape"))
    end = names.token_to_id("<|im_end|>")
    new = models.load(tmp_path / "m").generate(ids, 12, temperature=0.0, eos=end).tolist()[len(ids) :]
    said = names.decode([token for token in new if token != end], skip_special_tokens=False)
    command = [sys.executable, "-m", "xtrain", "chat", str(tmp_path / "m"), "--temperature", "0", "--max-tokens", "12"]
    for strict in ("strict", "surrogateescape"):
        done = subprocess.run(
            [*map(os.fsencode, command), b"--system", b"\xff"], input=b"a\xfe\0b\n", capture_output=True,
            timeout=HANGS, check=False, env={**os.environ, "PYTHONIOENCODING": f"utf-8:{strict}"},
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, b""), done.stderr
        assert done.stdout.decode() == said + "\n"
    closed = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", *command], capture_output=True, timeout=HANGS, check=False
    )
    assert (closed.returncode, closed.stdout, closed.stderr) == (0, b"", b""), closed
    read = io.TextIOWrapper(io.BytesIO(b"a line of another command\n"))
    read.readline()  # an input that has been read keeps its encoding
    monkeypatch.setattr(sys, "stdin", read)
    assert main(command[3:]) == 0


def test_a_tokenizer_with_more_ids_than_the_model(tmp_path, words, capsys) -> None:
    """Is told in one sentence, before anything is asked; a text that does without them goes on."""
    save(tmp_path / "m", words, 280)
    ids = 1 + tokenizers.Tokenizer.from_str(words["tokenizer.json"].decode()).token_to_id("<|im_end|>")
    told = (
        f"xtrain: warning: the tokenizer has {ids} ids, the model's vocab_size is 280: the model cannot take ids from "
        "280 on\n"
    )
    assert main(["sample", str(tmp_path / "m"), "--prompt", "q", "--max-tokens", "3"]) == 0
    assert capsys.readouterr().err == told
    done = talk(tmp_path / "m", "", "--max-tokens", "3")
    assert done.returncode == 0 and done.stderr == told
    done = talk(tmp_path / "m", "how are you?\n")
    assert done.returncode == 1 and "ids must be in [0, 280)" in done.stderr and "Traceback" not in done.stderr
    save(tmp_path / "n", words, ids)
    assert main(["sample", str(tmp_path / "n"), "--prompt", "q", "--max-tokens", "3"]) == 0
    assert capsys.readouterr().err == ""
