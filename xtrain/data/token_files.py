"""Token files: what `prepare` writes, and 1-D integer .npy files."""

from __future__ import annotations

import io
import os
import struct

import numpy as np

from ..errors import DataError
from .file_array import DataFile, FileArray

MAGIC = b"xtokens\0"
HEADER = struct.Struct("<8sIIQQI")
HEADER_BYTES = 64
_NPY_HEADER = 1 << 16  # bytes; that of a 1-D array of integers has 128


def starts_with_magic(path: str) -> bool:
    """Whether the file is a token file."""
    return _head(DataFile(path), len(MAGIC)) == MAGIC


def _head(file: DataFile, size: int) -> bytes:
    head = bytearray(min(size, file.size))
    file.read_into(memoryview(head), 0)
    return bytes(head)


def open_tokens(path: str | os.PathLike[str]) -> tuple[FileArray, int, int]:
    """Open a token file or a 1-D integer .npy file; return (tokens, bytes of text or 0, vocabulary size or 0).

    The tokens stay in the file. DataError when the file is missing, damaged, empty or something else.
    """
    file = DataFile(path)
    if file.path.endswith(".npy"):
        return _npy(file), 0, 0
    path, head = file.path, _head(file, HEADER_BYTES)
    if len(head) < HEADER_BYTES or not head.startswith(MAGIC):
        raise DataError(f"data: {path} is not a token file; write one with xtrain prepare")
    _, version, width, count, text_bytes, vocab = HEADER.unpack(head[: HEADER.size])
    if version != 1 or width not in (1, 2, 4):
        raise DataError(
            f"data: {path} must have version 1 and 1, 2 or 4 bytes per token, got version {version} and {width} bytes"
        )
    _check_size(file, HEADER_BYTES, count, width)
    return FileArray(file, f"<u{width}", HEADER_BYTES, count), text_bytes, vocab


def _npy(file: DataFile) -> FileArray:
    stream = io.BytesIO(_head(file, _NPY_HEADER))
    try:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(stream)
    except Exception:  # NumPy evaluates the header as Python, which fails in many ways
        raise DataError(f"data: {file.path} is not a .npy file of integers, or it is damaged") from None
    if len(shape) != 1 or dtype.kind not in "iu":
        raise DataError(f"data: {file.path} must hold a 1-D array of integers, got {len(shape)}-D {dtype}")
    _check_size(file, stream.tell(), shape[0], dtype.itemsize)
    return FileArray(file, dtype, stream.tell(), shape[0])


def _check_size(file: DataFile, offset: int, count: int, width: int) -> None:
    if file.size != offset + count * width:
        raise DataError(
            f"data: {file.path} is damaged: its header says {count} tokens of {width} bytes, "
            f"the file has {file.size} bytes"
        )
    if count == 0:
        raise DataError(f"data: {file.path} is empty")
