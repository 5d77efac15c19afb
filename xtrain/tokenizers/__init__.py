"""Text to token ids and back.

Raw bytes, or the tokenizer.json of a model directory (needs the package `tokenizers`).
"""

from __future__ import annotations

import json
import os

from .._types import Tokenizer
from .byte_level import EOS_BYTE, ByteTokenizer
from .from_file import FileTokenizer

__all__ = ["EOS_BYTE", "ByteTokenizer", "FileTokenizer", "Tokenizer", "load_tokenizer"]


def load_tokenizer(directory: str | os.PathLike[str]) -> Tokenizer:
    """Return the tokenizer of a model directory; a directory without one is byte-level. DataError when its
    tokenizer.json cannot be read.
    """
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
