"""Raw bytes as tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..errors import DataError

KEPT = ("tokenizer_config.json", "chat_template.jinja")  # files of a directory that a byte-level model keeps
EOS_BYTE = 0  # ends a document; text does not contain it


class ByteTokenizer:
    """Token id = byte value. Vocabulary 256; byte 0 separates documents. kept: files {name: content} of its directory,
    those of KEPT, which `files` returns as they are.
    """

    vocab_size = 256
    eos: int | None = EOS_BYTE
    name = "the byte-level tokenizer"  # in messages

    def __init__(self, kept: Mapping[str, bytes] | None = None) -> None:
        self.kept = {name: data for name, data in (kept or {}).items() if name in KEPT}

    def encode(self, text: bytes) -> np.ndarray:
        """Return the ids of `text` as uint8 [len(text)]."""
        return np.frombuffer(text, np.uint8)

    def encode_with_places(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """As FileTokenizer.encode_with_places; all bytes of a character have its place. DataError for a text that has
        half of a surrogate pair.
        """
        try:
            ids = self.encode(text.encode())
        except UnicodeEncodeError:
            raise DataError("its messages must be text, got one that is no Unicode") from None
        character = np.cumsum((ids & 0xC0) != 0x80) - 1  # bytes 10xxxxxx continue a character
        return ids, np.stack([character, character + 1], axis=1)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; bytes that are not UTF-8, and ids of a larger vocabulary, become U+FFFD."""
        return bytes(i if 0 <= i < 256 else 0xFF for i in map(int, ids)).decode("utf-8", errors="replace")

    def files(self) -> dict[str, bytes]:
        """Return the tokenizer files of a Hugging Face directory that encode exactly like this class, and those kept.

        They name no eos_token: it would be the stand-in of byte 0, U+0100, and that letter of a text would become the
        end of a document. generation_config.json has the id.
        """
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
        return {"tokenizer.json": _json(tokenizer), "tokenizer_config.json": _json(settings), **self.kept}


def _byte_alphabet() -> list[str]:
    """The printable character that byte-level tokenizers use for each byte (the table of GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    stand_in = {byte: chr(256 + position) for position, byte in enumerate(others)}
    return [stand_in.get(byte, chr(byte)) for byte in range(256)]


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode("utf-8")
