"""Token files: what `prepare` writes, and 1-D integer .npy files.

Version 2: a header of 64 bytes, the tokens, sections that begin at multiples of 64 bytes, and a JSON index of these:

    {"sections": {"documents": [offset, bytes], "tokenizer/tokenizer.json": [offset, bytes], ...},
     "tokenizer": {"kind": "bytes", "files" or "other", "eos": id or null},
     "required": [names of sections that no reader may ignore]}

"tokenizer/..." are files: all of a tokenizer of files; of bytes those that a byte-level model keeps, a chat template.
"documents" are uint64: the first token of each document, in order. "loss_mask", which is required where it is there,
are uint8, one for each token: 1 where the token is learned, 0 where it is only read. Version 1 ends with the tokens.
"""

from __future__ import annotations

import io
import json
import os
import struct
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..errors import DataError, shown
from ..tokenizers import ByteTokenizer, FileTokenizer, StoredFiles, Tokenizer
from .file_array import DataFile, FileArray

MAGIC = b"xtokens\0"
# magic, version, bytes of a token, tokens, bytes of text, vocabulary; of version 2: where the index is, and its bytes
HEADER = struct.Struct("<8sIIQQI4xQQ")
HEADER_BYTES = 64
_LARGEST_INDEX = 1 << 24  # bytes
_LARGEST_TOKENIZER = 1 << 30  # bytes of one of its files
_KNOWN = {"loss_mask"}  # sections that must not be ignored, and that this version understands
_PIECE = 1 << 18  # documents that are checked at once
_NPY_HEADER = 1 << 16  # bytes; that of a 1-D array of integers has 128


def starts_with_magic(path: str) -> bool:
    """Whether the file is a token file."""
    return _head(DataFile(path), len(MAGIC)) == MAGIC


def _head(file: DataFile, size: int) -> bytes:
    head = bytearray(min(size, file.size))
    file.read_into(memoryview(head), 0)
    return bytes(head)


@dataclass
class TokenFile:
    """tokens [count], unread. documents: where each document begins, uint64, unread; None in older files and .npy.
    loss_mask: whether each token is learned, uint8 [count], unread; None: all are.
    text_bytes, vocab_size: 0 where they are not known. tokenizer: the one that made the tokens, or None.
    """

    tokens: FileArray
    text_bytes: int = 0
    vocab_size: int = 0
    documents: FileArray | None = None
    loss_mask: FileArray | None = None
    tokenizer: Tokenizer | None = None


def open_tokens(path: str | os.PathLike[str]) -> tuple[FileArray, int, int]:
    """Open a token file or a 1-D integer .npy file; return (tokens, bytes of text or 0, vocabulary size or 0).

    The tokens stay in the file. DataError when the file is missing, damaged, empty or something else.
    """
    found = open_token_file(path, with_tokenizer=False)
    return found.tokens, found.text_bytes, found.vocab_size


def open_token_file(path: str | os.PathLike[str], with_tokenizer: bool = True) -> TokenFile:
    """As open_tokens, with all that the file says of its tokens."""
    file = DataFile(path)
    if file.path.endswith(".npy"):
        return TokenFile(_npy(file))
    path, head = file.path, _head(file, HEADER_BYTES)
    if len(head) < HEADER_BYTES or not head.startswith(MAGIC):
        raise DataError(f"data: {path} is not a token file; write one with xtrain prepare")
    _, version, width, count, text_bytes, vocab, at, size = HEADER.unpack(head[: HEADER.size])
    if version not in (1, 2) or width not in (1, 2, 4):
        raise DataError(
            f"data: {path} must have version 1 or 2 and 1, 2 or 4 bytes per token, "
            f"got version {version} and {width} bytes"
        )
    _check_size(file, HEADER_BYTES, count, width, version == 1)
    found = TokenFile(FileArray(file, f"<u{width}", HEADER_BYTES, count), text_bytes, vocab)
    if version == 2:
        if at < HEADER_BYTES + count * width or at + size != file.size or size > _LARGEST_INDEX:
            raise DataError(
                f"data: {path} is damaged: its header says {at + size} bytes in all, the file has {file.size} bytes"
            )
        _read_index(found, file, _bytes(file, at, size), with_tokenizer)
    return found


def _parse_index(file: DataFile, text: bytes) -> tuple[list[str], dict[str, tuple[int, int]], str, int | None]:
    """Check the JSON index of a token file, whose form is above. Return (required sections that this version does not
    know, {section: (first byte, bytes)}, kind of the tokenizer, its end token or None).
    """
    try:
        index = json.loads(text)
        required, sections, stored = index["required"], index["sections"], index["tokenizer"]
        unknown = [str(name) for name in required if name not in _KNOWN]
        places = {name: (at, size) for name, (at, size) in sections.items()}
        kind, eos = str(stored["kind"]), stored["eos"]
        if not all(type(number) is int for place in places.values() for number in place):
            raise ValueError
        if any(at < HEADER_BYTES or size < 0 or at + size > file.size for at, size in places.values()):
            raise ValueError
        if sum(size for _, size in places.values()) > file.size:  # overlapping ones would be read many times
            raise ValueError
        if eos is not None and (type(eos) is not int or not 0 <= eos < 2**32):
            raise ValueError
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        raise DataError(f"data: {file.path} is damaged: its index cannot be read") from None
    return unknown, places, kind, eos


def _read_index(found: TokenFile, file: DataFile, text: bytes, with_tokenizer: bool) -> None:
    """Fill in what the index says: where documents begin, the loss mask and the tokenizer. DataError where the file
    holds a section that must be understood and is not, or is damaged.
    """
    unknown, places, kind, eos = _parse_index(file, text)
    if unknown:
        raise DataError(f"data: {file.path} has a section {shown(unknown[0])}, which this version cannot use")
    if "documents" in places:
        at, size = places["documents"]
        if size % 8:
            raise DataError(f"data: {file.path} is damaged: its documents must have 8 bytes each, got {size}")
        found.documents = FileArray(file, "<u8", at, size // 8)
        _check_order(found.documents, len(found.tokens))
    if "loss_mask" in places:
        at, size = places["loss_mask"]
        if size != len(found.tokens):
            raise DataError(
                f"data: {file.path} is damaged: its loss_mask must have a byte for each of {len(found.tokens)} tokens, "
                f"got {size}"
            )
        found.loss_mask = FileArray(file, np.uint8, at, size)
    if kind not in ("files", "bytes"):  # a tokenizer that has no files
        return
    files = {name.removeprefix("tokenizer/"): place for name, place in places.items() if name.startswith("tokenizer/")}
    if any(size > _LARGEST_TOKENIZER for _, size in files.values()):
        raise DataError(f"data: {file.path} is damaged: a file of its tokenizer is too large")
    if kind == "files" and "tokenizer.json" not in files:
        raise DataError(f"data: {file.path} is damaged: it has no tokenizer.json")
    if not with_tokenizer:
        return
    contents = {name: _bytes(file, *place) for name, place in files.items()}
    if kind == "bytes":
        found.tokenizer = ByteTokenizer(contents)
        return
    found.tokenizer = FileTokenizer(StoredFiles(Path(file.path), contents))
    found.tokenizer.eos = eos


def _check_order(documents: FileArray, count: int) -> None:
    """DataError where a document begins before the one that it follows, or behind the last token."""
    last = 0
    for start in range(0, len(documents), _PIECE):
        piece = documents[start : start + _PIECE]
        bad = np.flatnonzero((piece < np.concatenate([[np.uint64(last)], piece[:-1]])) | (piece > count))
        if len(bad):
            at = int(bad[0])
            raise DataError(
                f"data: {documents.file.path} is damaged: document {start + at} begins at token {int(piece[at])}, "
                f"which is before the one it follows or behind the last of {count}"
            )
        last = int(piece[-1])


def _bytes(file: DataFile, at: int, size: int) -> bytes:
    out = bytearray(size)
    file.read_into(memoryview(out), at)
    return bytes(out)


def write_index(
    stream: BinaryIO, documents: array[int] | None, tokenizer: Tokenizer | None, mask: bytes | bytearray = b""
) -> tuple[int, int]:
    """Write what follows the tokens of version 2: sections, and the JSON index of them. Return its place and size.

    documents, tokenizer: None where they are not known. mask: a byte for each token, or nothing where all are learned.
    """
    sections: dict[str, tuple[int, int]] = {}
    kind, files = "other", {}
    if isinstance(tokenizer, ByteTokenizer) and type(tokenizer) is ByteTokenizer:
        kind, files = "bytes", tokenizer.kept
    elif isinstance(tokenizer, FileTokenizer) and type(tokenizer) is FileTokenizer:
        kind, files = "files", tokenizer.files()
    parts: dict[str, bytes] = {}
    if documents is not None:
        parts["documents"] = np.frombuffer(documents, np.uint64).astype("<u8").tobytes()
    if mask:
        parts["loss_mask"] = bytes(mask)
    parts |= {f"tokenizer/{name}": data for name, data in files.items()}
    for name, data in parts.items():
        stream.write(b"\0" * (-stream.tell() % 64))
        sections[name] = stream.tell(), len(data)
        stream.write(data)
    eos = None if tokenizer is None else tokenizer.eos
    about = {"kind": kind, "eos": None if eos is None else int(eos)}
    text = json.dumps({"required": ["loss_mask"] if mask else [], "sections": sections, "tokenizer": about}).encode()
    at = stream.tell()
    stream.write(text)
    return at, len(text)


def _npy(file: DataFile) -> FileArray:
    """The 1-D array of integers in a .npy file, unread."""
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


def _check_size(file: DataFile, offset: int, count: int, width: int, whole: bool = True) -> None:
    """DataError where the file is too short for `count` tokens of `width` bytes from `offset` on, or has none. whole:
    nothing may follow the tokens.
    """
    expected = offset + count * width
    if file.size < expected or (whole and file.size != expected):
        raise DataError(
            f"data: {file.path} is damaged: its header says {count} tokens of {width} bytes, "
            f"the file has {file.size} bytes"
        )
    if count == 0:
        raise DataError(f"data: {file.path} is empty")
