"""The vocabulary of a GGUF file from a tokenizer.json: byte-level BPE, the form of GPT-2, Llama 3 and Qwen."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .._types import is_whole
from ..errors import DataError

MORE_ENDS = 2  # ends that a file has room for beside that of a document: of a turn, of a message
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # types of tokens
# The name of a way to cut text into words -> the expressions that tokenizer.json cuts by. llama.cpp knows ways by name.
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = {"qwen2": _LETTERS + r"\p{N}" + _REST, "llama-bpe": _LETTERS + r"\p{N}{1,3}" + _REST}


def _words_of(content: dict[str, Any]) -> str | None:
    """The name of the way in which this tokenizer.json cuts text into words; None for another."""
    cutter = content.get("pre_tokenizer") or {}
    steps = cutter.get("pretokenizers", []) if cutter.get("type") == "Sequence" else [cutter]
    kinds = [step.get("type") for step in steps]
    if kinds[-1:] != ["ByteLevel"] or steps[-1].get("add_prefix_space"):
        return None
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        pattern = (steps[0].get("pattern") or {}).get("Regex")
        return next((name for name, words in _WORDS.items() if words == pattern), None)
    return None


def find_begin(files: Mapping[str, bytes], config_id: Any = None) -> tuple[int | None, bool]:
    """The id of the token that begins a text, None where there is none, and whether the tokenizer puts it there.

    files: of the tokenizer. The token is that of tokenizer_config.json, else `config_id`, of the model's config.
    Whether it is put there says `add_bos_token` of tokenizer_config.json, else the post-processor of tokenizer.json.
    """
    content = json.loads(files["tokenizer.json"])
    settings = json.loads(files.get("tokenizer_config.json", b"{}"))
    token = settings.get("bos_token")
    token = token.get("content") if isinstance(token, dict) else token
    added = {one["content"]: one["id"] for one in content.get("added_tokens", [])}
    ids = {**((content.get("model") or {}).get("vocab") or {}), **added}
    begin = ids.get(token) if isinstance(token, str) else None
    if begin is None and is_whole(config_id):
        begin = config_id
    if begin is None:
        return None, False
    adds = settings.get("add_bos_token")
    return begin, adds if isinstance(adds, bool) else begin in _put_before(content.get("post_processor") or {})


def _put_before(processor: dict[str, Any]) -> list[int]:
    """The tokens that a post-processor puts before a text."""
    if processor.get("type") == "Sequence":
        return [one for step in processor.get("processors", []) for one in _put_before(step)]
    if processor.get("type") != "TemplateProcessing":
        return []
    first = (processor.get("single") or [{}])[0].get("SpecialToken") or {}
    return list((processor.get("special_tokens") or {}).get(first.get("id"), {}).get("ids", []))


def write_vocabulary(
    writer: Any,
    path: str,
    text: bytes,
    vocab_size: int,
    eos: int | None,
    begin: tuple[int | None, bool] = (None, False),
    more_ends: Sequence[int] = (),
) -> None:
    """Adds the tokens, their types and the merges of the tokenizer.json `text`.

    vocab_size: of the model; ids without a token get names of their own. eos: the id that ends a document. begin: what
    find_begin says. more_ends: other ids that end a sequence; the form has room for MORE_ENDS, the ends of a turn and
    of a message, at which llama.cpp stops, too. DataError, which names `path`, for a tokenizer of another form.
    """
    content = json.loads(text)
    model = content.get("model") or {}
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise DataError(f"{path}: the tokenizer must be byte-level BPE, got {model.get('type')!r}")
    words = _words_of(content)
    if words is None:
        known = ", ".join(["gpt-2", *_WORDS])
        raise DataError(f"{path}: pre_tokenizer must cut text as one of {known} does")
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]
    kinds = [UNUSED] * vocab_size
    for token, i in model["vocab"].items():
        if i < vocab_size:
            tokens[i], kinds[i] = token, NORMAL
    for added in content.get("added_tokens", []):
        i = added["id"]
        if i < vocab_size:
            tokens[i], kinds[i] = added["content"], CONTROL if added.get("special") else USER_DEFINED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    if not merges:
        raise DataError(f"{path}: merges must not be empty")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(words)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    if begin[0] is not None and begin[0] < vocab_size:
        writer.add_bos_token_id(begin[0])
    writer.add_add_bos_token(begin[1] and begin[0] is not None and begin[0] < vocab_size)
    if eos is not None:
        writer.add_eos_token_id(eos)
    more = more_ends[:MORE_ENDS]
    for add, end in zip((writer.add_eot_token_id, writer.add_eom_token_id)[: len(more)], more, strict=True):
        add(end)
