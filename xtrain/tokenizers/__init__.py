"""Text to token ids and back.

Raw bytes, or the tokenizer.json of a model directory (needs the package `tokenizers`).
"""

from __future__ import annotations

import json
import os
from typing import Any

from .._types import Tokenizer
from ..errors import DataError
from ..saving import DirectoryReader
from .byte_level import EOS_BYTE, ByteTokenizer
from .chat import ChatTemplate
from .from_file import FileTokenizer, StoredFiles, is_bytes
from .training import END, train_tokenizer

__all__ = [
    "END",
    "EOS_BYTE",
    "ByteTokenizer",
    "ChatTemplate",
    "FileTokenizer",
    "StoredFiles",
    "Tokenizer",
    "find_tokenizer",
    "load_tokenizer",
    "same_tokenizer",
    "train_tokenizer",
]


def load_tokenizer(directory: str | os.PathLike[str]) -> Tokenizer:
    """Return the tokenizer of a model directory; a directory without one is byte-level. DataError when its
    tokenizer.json cannot be read, CheckpointError when a file is not what the directory's manifest says.
    """
    reader = DirectoryReader(directory)
    ours = is_bytes(reader)
    if reader.has("tokenizer.json") and not ours:
        return FileTokenizer(reader)
    # A tokenizer_config.json that is not ours belongs to a tokenizer that nobody reads here, as its template does.
    foreign = reader.has("tokenizer_config.json") and not ours
    names = () if foreign else ("tokenizer_config.json", "chat_template.jinja")
    return ByteTokenizer({name: reader.read(name) for name in names if reader.has(name)})


def find_tokenizer(directory: str | os.PathLike[str]) -> Tokenizer:
    """As load_tokenizer; DataError for a directory without a tokenizer.json."""
    if not DirectoryReader(directory).has("tokenizer.json"):
        raise DataError(f"{os.fspath(directory)} must be a directory with a tokenizer.json")
    return load_tokenizer(directory)


def same_tokenizer(a: Tokenizer, b: Tokenizer) -> bool:
    """Whether both make the same tokens: whether their tokenizer.json says the same."""
    if not (isinstance(a, FileTokenizer) and isinstance(b, FileTokenizer)):
        return type(a) is type(b)
    return _content(a) == _content(b)


def _content(tokenizer: FileTokenizer) -> Any:
    """The tokenizer.json, however it was written."""
    return json.loads(tokenizer.files()["tokenizer.json"])
