"""Text files: which ones a folder has, and what is in them."""

from __future__ import annotations

import os

import numpy as np

from ..errors import DataError
from ..saving.places import LOCK, WRITTEN
from .file_array import DataFile, FileArray

NO_END = (  # of a UserWarning
    "data: the tokenizer has no end of a document, so nothing is put between documents: "
    "name a token of its tokenizer.json as eos_token in tokenizer_config.json"
)
_SKIPPED = {"site-packages", "dist-packages", "__pycache__", ".git", "node_modules", ".venv"}


def text_files(root: str, suffix: str = "") -> list[str]:
    """Relative paths below `root`, sorted, without hidden files, installed packages and what runs have written."""
    found = []

    def refuse(error: OSError) -> None:
        raise read_error(error.filename, error)

    for folder, folders, names in os.walk(root, onerror=refuse):
        if LOCK in names:
            folders[:], names = ([n for n in part if not WRITTEN.fullmatch(n)] for part in (folders, names))
        folders[:] = [name for name in folders if name not in _SKIPPED and not name.startswith(".")]
        for name in names:
            path = os.path.join(folder, name)
            special = os.path.exists(path) and not os.path.isfile(path)  # a FIFO, a socket
            if name.endswith(suffix) and not name.startswith(".") and not special:
                found.append(os.path.relpath(path, root))
    return sorted(path.replace(os.sep, "/") for path in found)


def read_error(path: str, error: OSError) -> DataError:
    """The DataError for a file that cannot be read."""
    return DataError(f"data: {path} cannot be read: {error.strerror or error}")


def bytes_of(path: str) -> FileArray:
    """The bytes of a file: uint8 [size]. DataError when it is none, is empty or cannot be read."""
    file = DataFile(path)
    if file.size == 0:
        raise DataError(f"data: {path} is empty")
    return FileArray(file, np.uint8, 0, file.size)


_BINARY = (  # what files begin with
    b"\x1f\x8b",  # gzip
    b"PAR1",  # Parquet
    b"PK\x03\x04",  # zip
    b"\x28\xb5\x2f\xfd",  # Zstandard
    b"\xfd7zXZ",  # xz
    b"BZh",  # bzip2
    b"\x89PNG",
    b"\x80\x02",  # pickle, protocol 2
    b"\x80\x04",  # and 4
)


def is_text(data: bytes) -> bool:
    """Whether there is no zero byte at the start, nor that of a packed file, a picture, a Parquet file or a pickle."""
    return b"\0" not in data[:8192] and not data.startswith(_BINARY)


def holds_text(path: str) -> bool:
    """Whether `prepare` takes text from the file: not from an empty one, nor from tokens it has written before."""
    try:
        with open(path, "rb") as stream:
            head = stream.read(8192)
    except OSError as error:
        raise read_error(path, error) from None
    return bool(head) and is_text(head)
