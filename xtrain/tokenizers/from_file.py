"""The tokenizer.json of a model directory (needs the package `tokenizers`)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib import import_module
from typing import Any

import numpy as np

from ..errors import DataError
from ..saving import DirectoryReader

_COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


class FileTokenizer:
    """The tokenizer.json of a model directory."""

    def __init__(self, reader: DirectoryReader) -> None:
        path = reader.directory / "tokenizer.json"
        try:
            implementation = import_module("tokenizers").Tokenizer  # not `import`: checkers take this folder for it
        except ImportError:
            raise DataError(f"{path} needs the package tokenizers: pip install 'xtrain[hf]'") from None
        self._files = {name: reader.read(name) for name in _COPIED if reader.has(name)}
        try:
            self._implementation = implementation.from_str(self._files["tokenizer.json"].decode("utf-8"))
        except Exception as error:  # the package raises bare Exception
            raise DataError(f"{path} cannot be read: {error}") from None
        self.vocab_size: int = self._implementation.get_vocab_size()
        self.eos = _find_eos(reader)

    def encode(self, text: bytes) -> np.ndarray:
        """Return the ids of `text` as uint32."""
        encoding = self._implementation.encode(text.decode("utf-8", errors="replace"), add_special_tokens=False)
        return np.asarray(encoding.ids, np.uint32)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`."""
        return self._implementation.decode([int(i) for i in ids], skip_special_tokens=False)

    def files(self) -> dict[str, bytes]:
        """Return the tokenizer files of the directory it came from, unchanged."""
        return dict(self._files)


def _find_eos(reader: DirectoryReader) -> int | None:
    for name in ("generation_config.json", "config.json"):
        eos = _values(reader, name).get("eos_token_id")
        if isinstance(eos, list):
            eos = eos[0] if eos else None
        if isinstance(eos, int):
            return eos
    return None


def is_bytes(reader: DirectoryReader) -> bool:
    """Whether tokenizer_config.json says that bytes are the tokens, as ByteTokenizer writes it."""
    return _values(reader, "tokenizer_config.json").get("xtrain") == "bytes"


def _values(reader: DirectoryReader, name: str) -> dict[str, Any]:
    """The JSON object in a file; empty when there is none that can be read."""
    try:
        value = json.loads(reader.read(name)) if reader.has(name) else {}
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
