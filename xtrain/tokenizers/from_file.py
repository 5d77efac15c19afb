"""The tokenizer.json of a model directory (needs the package `tokenizers`)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from importlib import import_module

import numpy as np

from ..errors import DataError

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

    def __init__(self, directory: str) -> None:
        path = os.path.join(directory, "tokenizer.json")
        try:
            implementation = import_module("tokenizers").Tokenizer  # not `import`: checkers take this folder for it
        except ImportError:
            raise DataError(f"{path} needs the package tokenizers: pip install 'xtrain[hf]'") from None
        try:
            self._implementation = implementation.from_file(path)
        except Exception as error:  # the package raises bare Exception
            raise DataError(f"{path} cannot be read: {error}") from None
        self._files: dict[str, bytes] = {}
        for name in _COPIED:
            if os.path.isfile(os.path.join(directory, name)):
                with open(os.path.join(directory, name), "rb") as stream:
                    self._files[name] = stream.read()
        self.vocab_size: int = self._implementation.get_vocab_size()
        self.eos = self._find_eos(directory)

    def _find_eos(self, directory: str) -> int | None:
        for name in ("generation_config.json", "config.json"):
            try:
                with open(os.path.join(directory, name), encoding="utf-8") as stream:
                    eos = json.load(stream).get("eos_token_id")
            except (OSError, ValueError, AttributeError):
                continue
            if isinstance(eos, list):
                eos = eos[0] if eos else None
            if isinstance(eos, int):
                return eos
        return None

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
