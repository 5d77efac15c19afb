"""Text to token ids and back.

Raw bytes, or the tokenizer.json of a model directory (needs the package `tokenizers`).
"""

from __future__ import annotations

import os

from .._types import Tokenizer
from ..saving import DirectoryReader
from .byte_level import EOS_BYTE, ByteTokenizer
from .from_file import FileTokenizer, is_bytes

__all__ = ["EOS_BYTE", "ByteTokenizer", "FileTokenizer", "Tokenizer", "load_tokenizer"]


def load_tokenizer(directory: str | os.PathLike[str]) -> Tokenizer:
    """Return the tokenizer of a model directory; a directory without one is byte-level. DataError when its
    tokenizer.json cannot be read, CheckpointError when a file is not what the directory's manifest says.
    """
    reader = DirectoryReader(directory)
    if not reader.has("tokenizer.json") or is_bytes(reader):
        return ByteTokenizer()
    return FileTokenizer(reader)
