"""Token files: what `prepare` writes, and 1-D integer .npy files."""

from __future__ import annotations

import os
import struct

import numpy as np

from ..errors import DataError
from .text import read_error

MAGIC = b"xtokens\0"
HEADER = struct.Struct("<8sIIQQI")
HEADER_BYTES = 64


def starts_with_magic(path: str) -> bool:
    """Whether the file is a token file."""
    try:
        with open(path, "rb") as stream:
            return stream.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise read_error(path, error) from None


def open_tokens(path: str | os.PathLike[str]) -> tuple[np.ndarray, int, int]:
    """Memory-map a token file or a 1-D integer .npy file; return (tokens, bytes of text or 0, vocabulary size or 0).

    DataError when the file is missing, damaged, empty or something else.
    """
    path = os.fspath(path)
    try:
        if path.endswith(".npy"):
            array = np.load(path, mmap_mode="r", allow_pickle=False)
            if array.ndim != 1 or array.dtype.kind not in "iu":
                raise DataError(f"data: {path} must hold a 1-D array of integers, got {array.ndim}-D {array.dtype}")
            return array, 0, 0
        with open(path, "rb") as stream:
            head = stream.read(HEADER_BYTES)
        size = os.path.getsize(path)
    except OSError as error:
        raise read_error(path, error) from None
    except DataError:
        raise
    except (ValueError, EOFError):  # NumPy's own words speak of pickles
        raise DataError(f"data: {path} is not a .npy file of integers, or it is damaged") from None
    if len(head) < HEADER_BYTES or not head.startswith(MAGIC):
        raise DataError(f"data: {path} is not a token file; write one with xtrain prepare")
    _, version, width, count, text_bytes, vocab = HEADER.unpack(head[: HEADER.size])
    if version != 1 or width not in (1, 2, 4):
        raise DataError(
            f"data: {path} must have version 1 and 1, 2 or 4 bytes per token, got version {version} and {width} bytes"
        )
    if size != HEADER_BYTES + count * width:
        raise DataError(
            f"data: {path} is damaged: its header says {count} tokens of {width} bytes, the file has {size} bytes"
        )
    if count == 0:
        raise DataError(f"data: {path} is empty")
    return np.memmap(path, f"<u{width}", "r", HEADER_BYTES, (count,)), text_bytes, vocab
