"""Documents in files: whole texts, JSON lines and Parquet, the first two also packed by gzip."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from ..errors import DataError, shown
from ..files import reason
from .file_array import DataFile, FileArray, open_regular
from .text import is_text

# What the objects of JSON lines and rows may be, and the keys of each.
KINDS = {"text": ("text",), "messages": ("messages",), "prompt": ("prompt", "completion")}
_LINES = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")
_SUFFIXES = (*_LINES, ".parquet", ".txt.gz")
_LONGEST_LINE = 1 << 30  # bytes
_LLM_C = 20240520  # the first int32 of a header of 1024 bytes, which the files of other trainers have


class Document(NamedTuple):
    """What one entry of a file holds. place: the file, and the line or row of it, for messages. content: a text, or the
    object of a JSON line or a row.
    """

    place: str
    content: bytes | dict[str, Any]


def is_packed(path: str) -> bool:
    """Whether a file has to be read by `read_documents`: its bytes are not the text that it holds."""
    return path.lower().endswith(_SUFFIXES)


def read_documents(path: str, field: str | None = None) -> Iterator[Document]:
    """The documents of a file: what its name promises, else one text, none for an empty or a binary file.

    field: the column of Parquet files that is wanted; None: every one of KINDS. DataError, which names the file and the
    line, for what cannot be read.
    """
    name = path.lower()
    if name.endswith(_LINES):
        yield from _lines(path)
    elif name.endswith(".parquet"):
        yield from _rows(path, field)
    else:
        with _opened(path) as stream:
            data = _read(stream, path)
        if name.endswith(".gz") and not is_text(data):
            raise DataError(f"data: {path} must hold packed text, but it is binary")
        if data and is_text(data):
            yield Document(path, data)


def text_bytes(text: Any, place: str, name: str) -> bytes:
    """A text as UTF-8. DataError for what is none."""
    if not isinstance(text, str):
        raise DataError(f"data: {place}: {name} must be text, got {_kind(text)}")
    try:
        return text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair: JSON may spell it
        raise DataError(f"data: {place}: {name} must be text, got one that is no Unicode") from None


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)


def _opened(path: str) -> BinaryIO | gzip.GzipFile:
    open_regular(path)  # a pipe would be waited for, and a device may have no end
    try:
        if path.lower().endswith(".gz"):
            return gzip.open(path, "rb")
        return open(path, "rb")
    except OSError as error:
        raise DataError(f"data: {path}: {reason(error)}") from None


def _read(stream: BinaryIO | gzip.GzipFile, path: str, line: bool = False) -> bytes:
    """The next line of a stream, or all of it. DataError when that fails."""
    try:
        return stream.readline(_LONGEST_LINE + 1) if line else stream.read()
    except EOFError:
        raise DataError(f"data: {path} is cut off: its last packed block has no end") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"data: {path} is no gzip file, or it is damaged: {error}") from None
    except OSError as error:
        raise DataError(f"data: {path}: {reason(error)}") from None
    except MemoryError:
        raise DataError(f"data: {path} does not fit into memory") from None


def _lines(path: str) -> Iterator[Document]:
    with _opened(path) as stream:
        number = 0
        while line := _read(stream, path, line=True):
            number += 1
            place = f"{path}, line {number},"
            if len(line) > _LONGEST_LINE:
                raise DataError(f"data: {place} must have at most {_LONGEST_LINE} bytes")
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            try:
                value = json.loads(line.rstrip(b"\r\n").decode("utf-8"))
            except json.JSONDecodeError as error:
                what = error.msg.removesuffix(" at")
                raise DataError(f"data: {place} is not valid JSON: {what} at column {error.colno}") from None
            except UnicodeDecodeError as error:
                raise DataError(f"data: {place} is not UTF-8: {error.reason} at byte {error.start + 1}") from None
            except (ValueError, RecursionError) as error:  # a number of thousands of digits; nested too deeply
                raise DataError(f"data: {place} cannot be read: {shown(error, 200)}") from None
            if not isinstance(value, dict):
                raise DataError(f"data: {place} must hold an object, got {_kind(value)}")
            yield Document(place.rstrip(","), value)


def _rows(path: str, field: str | None) -> Iterator[Document]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise DataError(f"data: {path} needs the package pyarrow: pip install 'xtrain[data]'") from None
    number = 0
    open_regular(path)
    try:
        with parquet.ParquetFile(path) as file:
            columns = list(file.schema_arrow.names)
            keys = [key for names in KINDS.values() for key in names] if field is None else KINDS.get(field, (field,))
            wanted = [name for name in columns if name in keys]
            if not wanted:
                rule = ", ".join(keys) if field is None else repr(field)
                raise DataError(f"data: {path} must have a column {rule}, got {shown(', '.join(columns), 200)}")
            for batch in file.iter_batches(batch_size=1024, columns=wanted):
                for row in batch.to_pylist():
                    number += 1
                    yield Document(f"{path}, row {number}", row)
    except (OSError, ValueError, OverflowError, pyarrow.ArrowException) as error:  # OverflowError: of a date
        if isinstance(error, DataError):
            raise
        raise DataError(f"data: {path} cannot be read as Parquet: {shown(error, 200)}") from None


def open_raw_tokens(path: str, width: int) -> FileArray:
    """The tokens of a .bin file of nanoGPT, unsigned little-endian numbers of `width` bytes, unread. A header of
    256 int32 is left out. DataError for a file that holds no whole number of them.
    """
    file = DataFile(path)
    head = bytearray(min(file.size, 1024))
    file.read_into(memoryview(head), 0)
    start = 0
    if len(head) == 1024 and int.from_bytes(head[:4], "little") == _LLM_C:
        start, count = 1024, int.from_bytes(head[8:12], "little")
        if file.size != start + count * width:
            raise DataError(
                f"data: {path} has a header of llm.c that says {count} tokens, which are {start + count * width} bytes "
                f"with {width} a token, and it has {file.size}"
            )
    if file.size == start:
        raise DataError(f"data: {path} is empty")
    if (file.size - start) % width:
        raise DataError(f"data: {path} must hold tokens of {width} bytes each, got {file.size} bytes")
    return FileArray(file, np.dtype(f"<u{width}"), start, (file.size - start) // width)
