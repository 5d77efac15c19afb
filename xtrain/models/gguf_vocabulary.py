"""The vocabulary of a GGUF file from a tokenizer.json: byte-level BPE, the form of GPT-2, Llama 3 and Qwen."""

from __future__ import annotations

import json
from typing import Any

from ..errors import DataError

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


def write_vocabulary(writer: Any, path: str, text: bytes, vocab_size: int, eos: int | None) -> None:
    """Adds the tokens, their types and the merges of the tokenizer.json `text`.

    vocab_size: of the model; ids without a token get names of their own. eos: the id that ends a document. DataError,
    which names `path`, for a tokenizer of another form.
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
    writer.add_add_bos_token(False)
    if eos is not None:
        writer.add_eos_token_id(eos)
