"""Iterators over tokens and text, stop texts, the repetition penalty, and the command that talks."""

from __future__ import annotations

import io
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import xtrain as xt
from xtrain.generation import generate, generate_text, stream_text, stream_tokens
from xtrain.generation.draws import Penalty
from xtrain.generation.text import _Row
from xtrain.models import Qwen3, Qwen3Config
from xtrain.tokenizers import ByteTokenizer

pytestmark = pytest.mark.on_cpu

SIZES = dict(
    vocab_size=97, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    head_dim=8, initializer_range=0.5,
)  # fmt: skip


class Says(xt.nn.Module):
    """A model that continues every prompt with the bytes of a text, and then with its eos 0."""

    def __init__(self, text: bytes) -> None:
        super().__init__()
        self.weight = xt.nn.Parameter(xt.zeros((1,)))
        self.config, self.text, self.modes = SimpleNamespace(max_position_embeddings=500), text + b"\0", []

    def make_caches(self, batch: int, length: int) -> list:
        return []

    def forward(self, ids, positions, caches):
        self.modes.append((self.training, xt.is_grad_enabled()))
        logits = np.zeros((*ids.shape, 256), np.float32)
        start = 2 if positions is None else 2 + int(positions.numpy()[0]) - 1
        logits[:, -1, self.text[min(start - 2, len(self.text) - 1)]] = 50.0
        return xt.tensor(logits)


def said(text: str, **options) -> tuple[str, list[str]]:
    """Behind the prompt "> "; as a whole and in pieces."""
    arguments = (ByteTokenizer(), [62, 32], 100)
    whole = generate_text(Says(text.encode()), *arguments, temperature=0.0, **options)
    assert whole.startswith("> ")
    return whole[2:], list(stream_text(Says(text.encode()), *arguments, temperature=0.0, **options))


# ---- iterators


def test_an_error_ends_it() -> None:
    """As it ends a generator: caches of some layers have the step by then."""
    model = Qwen3(Qwen3Config(**{**SIZES, "num_hidden_layers": 2}))
    steps = stream_tokens(model, [1, 2], 9, temperature=0.0)
    next(steps)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        next(steps)
    hook.remove()
    assert list(steps) == []


def test_steps_are_made_when_they_are_asked_for() -> None:
    """In evaluation mode without recording; between two steps both are as before."""
    model = Says(b"abcdef")
    steps = stream_tokens(model, [62, 32], 100, temperature=0.0)
    assert model.modes == []
    assert [next(steps), next(steps)] == [[97], [98]] and model.modes == [(False, False)] * 2
    assert model.training and xt.is_grad_enabled()
    assert [token for (token,) in steps] == [99, 100, 101, 102, *[0] * 94]


def test_the_iterator_has_the_tokens_of_generate() -> None:
    model = Qwen3(Qwen3Config(**SIZES), dtype=xt.float64)
    ids = np.array([[1, 2, 3], [4, 5, 6]])
    for capture in (False, True):
        options = dict(seed=3, eos=list(range(0, 97, 11)), capture=capture, temperature=2.0)
        for count in (0, 1, 25):
            want = generate(model, ids, count, **options).numpy()[:, 3:]
            assert np.array_equal(np.array(list(stream_tokens(model, ids, count, **options))).reshape(-1, 2).T, want)


def test_arguments_are_checked_at_once() -> None:
    with pytest.raises(ValueError, match="generate: top_k must be"):
        stream_tokens(Says(b""), [1], 3, top_k=0)
    for stop in ("", None, 3, ["a", 1]):
        wrong = stop[1] if isinstance(stop, list) else stop
        with pytest.raises(ValueError, match=f"generate_text: stop must be texts that are not empty, got {wrong!r}"):
            stream_text(Says(b""), ByteTokenizer(), [1], 3, stop=stop)


# ---- text


def test_pieces_are_the_text() -> None:
    for text in ("hello", "Grüße, 世界 🌍!", ""):
        whole, pieces = said(text)
        assert whole == "".join(pieces) == text and all(pieces)
    assert said("héé")[1] == ["h", "é", "é"], "a letter is shown when all its bytes are there"


def test_a_whole_text_is_made_in_evaluation_mode() -> None:
    model = Says(b"abc")
    assert generate_text(model, ByteTokenizer(), [62, 32], 100, temperature=0.0) == "> abc"
    assert model.modes == [(False, False)] * 4 and model.training and xt.is_grad_enabled()


def test_bytes_that_are_no_letter_are_shown_at_last() -> None:
    model = Says(b"a\xff\xff\xff\xff\xff")
    pieces = list(stream_text(model, ByteTokenizer(), [62, 32], 100, temperature=0.0))
    assert "".join(pieces) == "a" + "\ufffd" * 5
    assert pieces == ["a", "\ufffd", "\ufffd", "\ufffd" * 3], "of a character at most three bytes are waited for"


def test_stop_texts() -> None:
    """The first that the continuation holds ends it and is not shown, nor any part of it; one in the prompt is none."""
    for stop, want in (
        ("lo w", "hel"), (["w", "lo w"], "hel"), (["zzz", "or", "wo"], "hello "), ("h", ""), ("world!", "hello world"), ("> ", "hello world"), ("ld", "hello wor"),
    ):  # fmt: skip
        whole, pieces = said("hello world", stop=stop)
        assert whole == "".join(pieces) == want, stop
    last = stream_text(Says(b"abcd"), ByteTokenizer(), [62, 32], 3, temperature=0.0, stop="cd")
    assert "".join(last) == "abc", "what begins as the stop text where the tokens end"
    assert said("aab", stop="ab")[1] == ["a"], "what begins as the stop text and goes on otherwise is shown"


# ---- the repetition penalty


def test_seen_tokens_are_less_likely() -> None:
    """Positive logits over the factor, negative ones times it, of the tokens of each row alone."""
    logits = xt.tensor(np.array([[2.0, -2.0, 1.0, 0.5], [2.0, -2.0, 1.0, 0.5]], np.float32))
    penalty = Penalty(2.0, np.array([[0, 1, 1], [3, 3, 3]]))
    assert penalty(logits).tolist() == [[1.0, -4.0, 1.0, 0.5], [2.0, -2.0, 1.0, 0.25]]
    penalty.see(xt.tensor([2, 0]))
    assert penalty(logits).tolist() == [[1.0, -4.0, 0.5, 0.5], [1.0, -2.0, 1.0, 0.25]]
    assert Penalty(1.0, np.array([[0]]))(logits) is logits
    assert penalty(logits.to(xt.bfloat16)).dtype is xt.float32, "not rounded again"
    assert penalty(logits.to(xt.float64)).dtype is xt.float64


def test_a_penalty_changes_what_is_generated() -> None:
    """The same with captured steps; with a large factor no token comes twice while others are left."""
    model = Qwen3(Qwen3Config(**SIZES), dtype=xt.float64)
    ids = np.array([[1, 2, 3], [4, 5, 6]])
    for factor in (1.3, 1e9):
        options = dict(temperature=0.0, repetition_penalty=factor, eos=())
        plain, captured = (generate(model, ids, 30, capture=c, **options).tolist() for c in (False, True))
        assert plain == captured != generate(model, ids, 30, temperature=0.0, eos=()).tolist()
    assert all(len(set(row)) == 33 for row in plain)
    text = generate_text(model, ByteTokenizer(), [1, 2, 3], 9, temperature=0.0, repetition_penalty=1e9)
    assert len(set(text)) == len(text), "of a text, too"
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="generate: repetition_penalty must be a number > 0"):
            generate(model, ids, 1, repetition_penalty=bad)


# ---- xtrain chat

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


class Chatty(ByteTokenizer):
    def files(self) -> dict[str, bytes]:
        return {"tokenizer_config.json": json.dumps({"chat_template": TEMPLATE}).encode()}


def chat(monkeypatch, capsys, lines: str, *options: str, room: int = 200) -> tuple[str, str, list[str]]:
    """What is printed, and the prompts that the model gets."""
    pytest.importorskip("jinja2", reason="needs jinja2 (pip install jinja2)")
    from xtrain.cli import chat as command

    prompts: list[str] = []

    class Listens(Says):
        def forward(self, ids, positions, caches):
            if positions is None:
                prompts.append(bytes(ids.numpy()[0].tolist()).decode())
                self.begin = ids.shape[1]
                return super().forward(ids, None, caches)
            return super().forward(ids, positions - self.begin + 2, caches)

    model = Listens(b"yes!")
    model.config.max_position_embeddings = room
    monkeypatch.setattr(command, "load_tokenizer", lambda path: Chatty())
    monkeypatch.setattr(command.saving, "load_model", lambda path: model)
    monkeypatch.setattr(command.rundir, "resolve_run_directory", lambda path, warn: path)
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert command.command(["DIR", "--temperature", "0", *options]) == 0
    out = capsys.readouterr()
    return out.out, out.err, prompts


def test_a_conversation(monkeypatch, capsys) -> None:
    """Each message has all that was said before it; empty lines are none; /new begins anew, with the system's message."""
    out, err, prompts = chat(monkeypatch, capsys, "one\n\ntwo\n/new\nthree\n", "--system", "be short")
    assert out == "yes!\n" * 3 and err == ""
    first = "<system>be short\n<user>one\n<assistant>"
    assert prompts == [first, f"{first}yes!\n<user>two\n<assistant>", "<system>be short\n<user>three\n<assistant>"]


def test_a_conversation_that_is_too_long(monkeypatch, capsys) -> None:
    """Is refused and told; the message is forgotten. An answer ends where the room does, without dropping context."""
    out, err, prompts = chat(monkeypatch, capsys, "x" * 40 + "\nabc\n", room=24)
    assert out == "yes\n" and "the conversation has 58 tokens, the model takes 24: /new begins anew" in err
    assert prompts == ["<user>abc\n<assistant>"]

    out, err, prompts = chat(monkeypatch, capsys, "x" * 40 + "\n", room=58)
    assert out == "" and prompts == [] and "has 58 tokens, the model takes 58" in err, "no room for an answer"


def test_each_answer_has_a_seed_of_its_own(monkeypatch, capsys) -> None:
    from xtrain.cli import chat as command

    seeds: list[int] = []

    def streams(*arguments, **options):
        seeds.append(options["seed"])
        return stream_text(*arguments, **options)

    monkeypatch.setattr(command, "stream_text", streams)
    chat(monkeypatch, capsys, "one\n\ntwo\n/new\nthree\n", "--seed", str(2**63 - 2))
    assert seeds == [2**63 - 2, 2**63 - 1, 0]


def test_answers_stop(monkeypatch, capsys) -> None:
    threads = xt.get_num_threads()
    for count, want in ((threads + 1, threads + 1), (0, threads + 1)):
        chat(monkeypatch, capsys, "one\n", "--threads", str(count))
        assert xt.get_num_threads() == want, "0 leaves them as they are"
    assert chat(monkeypatch, capsys, "one\n", "--stop", "s!")[0] == "ye\n"
    assert chat(monkeypatch, capsys, "one\n", "--max-tokens", "2")[0] == "ye\n"


class Decoder:
    """A tokenizer that gives a text for each list of ids."""

    eos, vocab_size = None, 256

    def __init__(self, texts: dict[tuple[int, ...], str]) -> None:
        self._texts = texts

    def decode(self, ids) -> str:
        return self._texts[tuple(ids)]


def test_all_bytes_of_a_character_are_held_back() -> None:
    """Also where a decoder writes a replacement for each of them."""
    texts = {
        (): "",
        (1,): "a\ufffd",
        (1, 2): "a\ufffd\ufffd",
        (1, 2, 3): "a\ufffd\ufffd\ufffd",
        (1, 2, 3, 4): "a\U0001f600",
    }
    row = _Row(Decoder(texts), [], ())
    pieces = []
    for token in (1, 2, 3, 4):
        row.ids.append(token)
        pieces.append(row.piece())
    assert pieces == ["a", "", "", "\U0001f600"] and row.rest() == ""


def test_what_was_shown_is_not_shown_again() -> None:
    """Where a token changes or shortens the text before it: nothing, until the text goes on from what was shown."""
    texts = {(): "", (1,): "ab", (1, 2): "a", (1, 2, 3): "xyz", (1, 2, 3, 4): "abcd"}
    row = _Row(Decoder(texts), [], ())
    pieces = []
    for token in (1, 2, 3, 4):
        row.ids.append(token)
        pieces.append(row.piece())
    assert pieces == ["ab", "", "", "cd"] and row.rest() == ""


def test_a_stop_text_where_the_continuation_reads_otherwise_alone() -> None:
    """A letter whose bytes the prompt begins: what is before the stop text follows the text of the prompt alone."""
    row = _Row(Decoder({(7,): "a\ufffd", (1, 2): "\ufffd!. More", (7, 1, 2): "aé!. More"}), [7], (".",))
    row.ids = [1, 2]
    assert row.piece() == "" and row.done and row.whole() == "a\ufffd\ufffd!"


def test_a_stop_text_behind_words() -> None:
    """What a decoder writes between the prompt and its continuation stays: here words have a blank between them."""
    row = _Row(Decoder({(7,): "say", (1, 2): "yes now.", (7, 1, 2): "say yes now."}), [7], (" now",))
    row.ids = [1, 2]
    assert row.piece() == "" and row.done and row.whole() == "say yes"


def test_ids_of_a_prompt_that_the_model_has_not() -> None:
    model = Qwen3(Qwen3Config(**SIZES))
    for ids, wrong in (([1, 97], 97), ([-1, 2], -1)):
        with pytest.raises(
            ValueError, match=rf"ids must be in \[0, 97\), the model's vocab_size, got {wrong}: the tok"
        ):
            generate_text(model, ByteTokenizer(), ids, 1)


def test_ends_of_the_tokenizer_and_of_the_model_end_a_text() -> None:
    class Ending(ByteTokenizer):
        eos = ord("w")

    for end, text in ((ord("d"), "hello "), (ord("o"), "hell"), ((0, ord("l")), "he")):
        model = Says(b"hello world")
        model.config.eos_token_id = end
        assert generate_text(model, Ending(), [62, 32], 100, temperature=0.0) == f"> {text}"
