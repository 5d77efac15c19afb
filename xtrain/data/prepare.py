"""Writing token files."""

from __future__ import annotations

import os
import sysconfig
from array import array
from typing import BinaryIO

import numpy as np

from ..errors import DataError
from ..files import reason, write_file
from ..tokenizers import ByteTokenizer, Tokenizer
from .text import holds_text, is_text, text_files
from .token_files import HEADER, HEADER_BYTES, MAGIC, write_index


def _same_file(a: str, b: str) -> bool:
    try:
        return os.path.samefile(a, b)
    except OSError:  # a link to nothing
        return False


def prepare(source: str | os.PathLike[str], out: str | os.PathLike[str], tokenizer: Tokenizer | None = None) -> int:
    """Write the text of a file or folder (streamed, any size) as a token file and return the number of tokens.

    Each file is one document, followed by the tokenizer's end-of-document token. The token file also holds the place
    where each document begins, and the tokenizer, which models that are trained on it save. The file appears under its
    name when it is complete. DataError when it would replace a text it is made of.
    """
    source, out = os.fspath(source), os.fspath(out)
    tokenizer = tokenizer or ByteTokenizer()
    vocab = max(tokenizer.vocab_size, 1 + (tokenizer.eos or 0))
    width = 1 if vocab <= 1 << 8 else 2 if vocab <= 1 << 16 else 4
    if source == "python":  # ./python is a file or folder of that name
        source = sysconfig.get_paths()["stdlib"]
        files = [os.path.join(source, file) for file in text_files(source, ".py")]
    elif os.path.isdir(source):
        files = [os.path.join(source, file) for file in text_files(source)]
    elif os.path.exists(source):
        files = [source]
    else:
        raise DataError(f"data: {source} does not exist")
    if os.path.exists(out) and any(_same_file(file, out) and holds_text(file) for file in files):
        raise DataError(f"data: the tokens must go into another file than the text of {source}, got {out}")
    count = text_bytes = 0
    documents = array("Q")  # where each begins
    end = b"" if tokenizer.eos is None else np.asarray([tokenizer.eos], f"<u{width}").tobytes()

    def write(stream: BinaryIO) -> None:
        nonlocal count, text_bytes
        stream.write(b"\0" * HEADER_BYTES)
        for file in files:
            try:
                with open(file, "rb") as text:
                    data = text.read()
            except OSError as error:
                raise DataError(f"data: {file}: {reason(error)}") from None
            if not data or not is_text(data):
                continue
            documents.append(count)
            ids = tokenizer.encode(data).astype(f"<u{width}", copy=False)
            stream.write(ids.tobytes() + end)
            count += len(ids) + bool(end)
            text_bytes += len(data) + (1 if isinstance(tokenizer, ByteTokenizer) else 0)
        if not count:
            raise DataError(f"data: {source} holds no text files")
        index = write_index(stream, documents, tokenizer)
        stream.seek(0)
        stream.write(HEADER.pack(MAGIC, 2, width, count, text_bytes, vocab, *index))

    try:
        write_file(out, write)
    except OSError as error:
        raise DataError(f"data: {out} cannot be written: {reason(error)}") from None
    return count
