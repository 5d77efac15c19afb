"""Text to token ids and back.

Raw bytes, or the tokenizer.json of a model directory (needs the package `tokenizers`).
"""

from __future__ import annotations

import json
import os
from typing import Any, Protocol

import numpy as np

from .errors import DataError

EOS_BYTE = 0  # ends a document; text does not contain it
_COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


class Tokenizer(Protocol):
    """What data.py, train.py and cli.py need of a tokenizer."""

    vocab_size: int
    eos: int | None

    def encode(self, text: bytes) -> np.ndarray: ...
    def decode(self, ids: Any) -> str: ...
    def files(self) -> dict[str, bytes]: ...


class ByteTokenizer:
    """Token id = byte value. Vocabulary 256; byte 0 separates documents."""

    vocab_size = 256
    eos: int | None = EOS_BYTE

    def encode(self, text: bytes) -> np.ndarray:
        """Return the ids of `text` as uint8 [len(text)]."""
        return np.frombuffer(text, np.uint8)

    def decode(self, ids: Any) -> str:
        """Return the text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return bytes(int(i) for i in ids).decode("utf-8", errors="replace")

    def files(self) -> dict[str, bytes]:
        """Return the tokenizer files of a Hugging Face directory that encode exactly like this class."""
        vocab = {char: byte for byte, char in enumerate(_byte_alphabet())}
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        tokenizer = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": vocab,
                "merges": [],
            },
        }
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "xtrain": "bytes",
        }
        return {"tokenizer.json": _json(tokenizer), "tokenizer_config.json": _json(settings)}


class FileTokenizer:
    """The tokenizer.json of a model directory."""

    def __init__(self, directory: str) -> None:
        path = os.path.join(directory, "tokenizer.json")
        try:
            from tokenizers import Tokenizer as Implementation
        except ImportError:
            raise DataError(f"{path} needs the package tokenizers: pip install 'xtrain[hf]'") from None
        try:
            self._implementation = Implementation.from_file(path)
        except Exception as error:  # the package raises bare Exception
            raise DataError(f"{path} cannot be read: {error}") from None
        self._files = {}
        for name in _COPIED:
            if os.path.isfile(os.path.join(directory, name)):
                with open(os.path.join(directory, name), "rb") as stream:
                    self._files[name] = stream.read()
        self.vocab_size = self._implementation.get_vocab_size()
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

    def decode(self, ids: Any) -> str:
        """Return the text of `ids`."""
        return self._implementation.decode([int(i) for i in ids], skip_special_tokens=False)

    def files(self) -> dict[str, bytes]:
        """Return the tokenizer files of the directory it came from, unchanged."""
        return dict(self._files)


def load_tokenizer(directory: str | os.PathLike[str]) -> Tokenizer:
    """Return the tokenizer of a model directory; a directory without one is byte-level."""
    directory = os.fspath(directory)
    path = os.path.join(directory, "tokenizer.json")
    if not os.path.isfile(path):
        return ByteTokenizer()
    try:
        with open(os.path.join(directory, "tokenizer_config.json"), encoding="utf-8") as stream:
            if json.load(stream).get("xtrain") == "bytes":
                return ByteTokenizer()
    except (OSError, ValueError, AttributeError):
        pass
    return FileTokenizer(directory)


def _byte_alphabet() -> list[str]:
    """The printable character that byte-level tokenizers use for each byte (the table of GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    stand_in = {byte: chr(256 + position) for position, byte in enumerate(others)}
    return [stand_in.get(byte, chr(byte)) for byte in range(256)]


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode("utf-8")
