"""Text to token ids and back.

Raw bytes, or the tokenizer.json of a model directory (needs the package `tokenizers`).
"""

from __future__ import annotations

import copy
import json
import os
from typing import Any

from .._types import Tokenizer
from ..errors import DataError
from ..saving import DirectoryReader
from .byte_level import EOS_BYTE, KEPT, ByteTokenizer
from .chat import ChatTemplate, has_template
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
    "has_template",
    "load_tokenizer",
    "same_tokenizer",
    "train_tokenizer",
    "with_template",
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
    names = () if foreign else KEPT
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


def with_template(first: Tokenizer, *others: Tokenizer) -> Tokenizer:
    """Of tokenizers that make the same tokens the first with a chat template, and `first` where none has one. Documents
    end with the token of `first`.
    """
    found = next((one for one in (first, *others) if has_template(one.files())), first)
    if found.eos != first.eos:
        found = copy.copy(found)
        found.eos = first.eos
    return found


def _content(tokenizer: FileTokenizer) -> Any:
    """The tokenizer.json, however it was written."""
    return json.loads(tokenizer.files()["tokenizer.json"])
