"""Writing token files."""

from __future__ import annotations

import os
import sysconfig
import warnings
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from .._types import is_whole
from ..errors import DataError
from ..files import path_text, reason, write_file
from ..tokenizers import ByteTokenizer, Tokenizer
from .encoding import MOST, Kept, encode
from .readers import is_packed, open_raw_tokens, read_documents
from .text import NO_END, holds_text, text_files
from .token_files import HEADER, HEADER_BYTES, MAGIC, write_index

_SHOWN = 1000  # documents between two calls of `progress`
_PIECE = 1 << 22  # tokens that are copied at once


def _same_file(a: str, b: str) -> bool:
    try:
        return os.path.samefile(a, b)
    except OSError:  # a link to nothing
        return False


def prepare(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    tokenizer: Tokenizer | None = None,
    *,
    field: str | None = None,
    token_bytes: int = 0,
    progress: Callable[[int], object] = lambda tokens: None,
    processes: int = 1,
    resume: bool = False,
) -> int:
    """Write the text of a file or folder (streamed, any size) as a token file and return the number of tokens.

    Each text file is one document, and so is each line of .jsonl, each row of .parquet (needs pyarrow), and the text in
    a .gz. Of a line or row, `field` names the text, None takes `text`, `prompt` and `completion`, or `messages`: see
    records.py for what is learned of these. A document is followed by the tokenizer's end-of-document token, a
    conversation by what its template says. The token file also holds the place where each document begins, the loss
    mask, where not all tokens are learned, and the tokenizer, which models that are trained on it save. The file
    appears under its name when it is complete. A UserWarning tells of a tokenizer without an end-of-document token.
    progress: takes the tokens so far, now and then.

    processes: that encode; the bytes of the token file do not depend on it. With one, the package tokenizers uses all
    processors in threads; several also share what Python does, chat templates for example. (A script that asks for
    several guards its own work by `if __name__ == "__main__"`, as multiprocessing wants it.) resume: encoded text is
    kept in OUT.part until all is done, and the same call after an interruption encodes the rest; files, tokenizer and
    field must be those of then, else it begins anew.

    token_bytes: source is a .bin file of nanoGPT, whose tokens have so many bytes, 1, 2 or 4; `tokenizer`, if there is
    one, made them.

    DataError for what cannot be read, and when it would replace a text it is made of.
    """
    source, out = path_text("data: source", source), path_text("data: out", out)
    if tokenizer is not None and not hasattr(tokenizer, "vocab_size"):
        raise TypeError(f"data: tokenizer must be a Tokenizer or None, got {type(tokenizer).__name__}")
    if not (is_whole(processes) and 1 <= processes <= MOST):
        raise DataError(f"data: processes must be an integer in [1, {MOST}], got {processes!r}")
    if token_bytes:
        return _prepare_raw(source, out, tokenizer, token_bytes)
    tokenizer = tokenizer or ByteTokenizer()
    if tokenizer.eos is None:
        warnings.warn(NO_END, UserWarning, stacklevel=2)
    vocab = max(tokenizer.vocab_size, 1 + (tokenizer.eos or 0))
    width = 1 if vocab <= 1 << 8 else 2 if vocab <= 1 << 16 else 4
    files = source_files(source)
    if os.path.exists(out) and any(_same_file(file, out) and (is_packed(file) or holds_text(file)) for file in files):
        raise DataError(f"data: the tokens must go into another file than the text of {source}, got {out}")
    kept = Kept(Path(f"{out}.part"), files, tokenizer, field) if resume else None
    written = _Documents(width)

    def write(stream: BinaryIO) -> None:
        stream.write(b"\0" * HEADER_BYTES)  # the header is known last
        found = (document for file in files for document in read_documents(file, field))
        for batch in encode(found, tokenizer, field, processes, kept):
            for tokens, learned, size in batch:
                written.add(stream, tokens, learned, size)
                if len(written.begins) % _SHOWN == 0:
                    progress(written.count)
        if not written.count:
            none = "no document that is not empty" if files == [source] else "no text files, or empty ones alone"
            if files == [source] and os.path.getsize(source) and not (is_packed(source) or holds_text(source)):
                none = "no UTF-8 text: it has a zero byte, or begins as a binary format"
            raise DataError(f"data: {source} holds {none}")
        written.finish(stream, tokenizer, vocab)

    _write(out, write)
    if kept is not None:
        kept.remove()
    return written.count


class _Documents:
    """What is known of the documents that a token file holds so far. width: bytes of a token.

    count, text_bytes: tokens, and bytes of the text they were made of. begins: the place where each document begins.
    mask: 1 for each token that is learned, else 0; empty until there is one that is not.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.count = self.text_bytes = 0
        self.begins = array("Q")
        self.mask = bytearray()

    def add(self, stream: BinaryIO, tokens: np.ndarray, learned: np.ndarray | None, text_bytes: int) -> None:
        """Write the tokens of a document. learned: which of them are learned, None for all."""
        self.begins.append(self.count)
        ids = tokens.astype(f"<u{self.width}", copy=False)
        stream.write(ids.tobytes())
        if learned is not None:
            self.mask.extend(b"\1" * (self.count - len(self.mask)) + learned.astype(np.uint8).tobytes())
        self.count += len(ids)
        self.text_bytes += text_bytes

    def finish(self, stream: BinaryIO, tokenizer: Tokenizer, vocab: int) -> None:
        """Write what follows the tokens, and the header."""
        if self.mask:
            self.mask.extend(b"\1" * (self.count - len(self.mask)))
            self.text_bytes = 0  # of what is learned: not known
        index = write_index(stream, self.begins, tokenizer, self.mask)
        stream.seek(0)
        stream.write(HEADER.pack(MAGIC, 2, self.width, self.count, self.text_bytes, vocab, *index))


def _write(out: str, write: Callable[[BinaryIO], None]) -> None:
    try:
        write_file(out, write)
    except OSError as error:
        raise DataError(f"data: {out} cannot be written: {reason(error)}") from None


def source_files(source: str) -> list[str]:
    """The paths of the files of a source. DataError when it does not exist."""
    if source == "python":  # ./python is a file or folder of that name
        source = sysconfig.get_paths()["stdlib"]
        return [os.path.join(source, file) for file in text_files(source, ".py")]
    if os.path.isdir(source):
        return [os.path.join(source, file) for file in text_files(source)]
    if not os.path.exists(source):
        raise DataError(f"data: {source} does not exist")
    if source.lower().endswith(".bin"):
        raise DataError(
            f"data: {source} holds tokens, or something else that is no text: give the bytes of a token, "
            f"--token-bytes 2 for a .bin file of nanoGPT"
        )
    return [source]


def _prepare_raw(source: str, out: str, tokenizer: Tokenizer | None, width: int) -> int:
    """Write a .bin file as a token file. Where its documents begin is not known."""
    if width not in (1, 2, 4):
        raise DataError(f"data: token_bytes must be 1, 2 or 4, got {width}")
    tokens = open_raw_tokens(source, width)
    if _same_file(source, out):
        raise DataError(f"data: the tokens must go into another file than {source}, got {out}")
    known = 0 if tokenizer is None else max(tokenizer.vocab_size, 1 + (tokenizer.eos or 0))

    def write(stream: BinaryIO) -> None:
        stream.write(b"\0" * HEADER_BYTES)
        largest = 0
        for start in range(0, len(tokens), _PIECE):
            piece = tokens[start : start + _PIECE]
            largest = max(largest, int(piece.max()))
            if known and largest >= known:
                at = start + int(np.flatnonzero(piece >= known)[0])
                raise DataError(
                    f"data: token ids of {source} must be in [0, {known}), the vocabulary of the tokenizer, "
                    f"got {int(piece[at - start])} at position {at}; are they of another width than {width} bytes?"
                )
            stream.write(piece.tobytes())
        index = write_index(stream, None, tokenizer)
        stream.seek(0)
        stream.write(HEADER.pack(MAGIC, 2, width, len(tokens), 0, known or largest + 1, *index))

    _write(out, write)
    return len(tokens)
