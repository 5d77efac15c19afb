"""Opening a data source: segments of tokens for training and validation."""

from __future__ import annotations

import hashlib
import os
import sysconfig
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import DataError
from ..tokenizers import ByteTokenizer, Tokenizer, same_tokenizer, with_template
from .file_array import FileArray, Segment, part
from .identity import identity, same_data
from .loader import IGNORED, Loader, Windows
from .packing import Documents, PackedLoader
from .readers import is_packed
from .text import NO_END, bytes_of, is_text, read_error, text_files
from .token_files import TokenFile, open_token_file, starts_with_magic

MAX_FOLDER_BYTES = 2 << 30  # of text that is read into memory; more wants `prepare`


@dataclass
class Corpus:
    """What a source holds.

    `train` and `val` are lists of 1-D arrays of token ids, in memory or in a file; `bytes_per_token` turns nats per
    token into bits per byte. train_masks, val_masks: for each of them an array [tokens] that is 0 where a token is not
    learned, or None; None in place of the lists: all are learned. train_documents, val_documents: where the documents
    of each lie; None: each is one document.
    """

    name: str
    train: list[Segment]
    val: list[Segment]
    bytes_per_token: float | None
    vocab_size: int
    tokenizer: Tokenizer | None
    train_masks: list[Segment | None] | None = None
    val_masks: list[Segment | None] | None = None
    train_documents: list[Documents] | None = None
    val_documents: list[Documents] | None = None

    @property
    def train_tokens(self) -> int:
        """Tokens for training."""
        return sum(len(segment) for segment in self.train)

    @property
    def val_tokens(self) -> int:
        """Tokens for validation."""
        return sum(len(segment) for segment in self.val)

    @property
    def segments(self) -> list[Segment]:
        """The segments for training, then those for validation, then their masks."""
        masks = [mask for mask in [*(self.train_masks or []), *(self.val_masks or [])] if mask is not None]
        return [*self.train, *self.val, *masks]

    def loader(self, batch_size: int, seq_len: int, seed: int = 0, vocab_size: int | None = None) -> Loader:
        """Return the shuffled training batches. vocab_size: of the model; None is that of the data."""
        vocab = vocab_size or self.vocab_size
        return Loader(self.train, batch_size, seq_len, seed, vocab, self.name, self.train_masks)

    def packed_loader(
        self, batch_size: int, seq_len: int, seed: int = 0, vocab_size: int | None = None
    ) -> PackedLoader:
        """Return the shuffled training batches in rows of whole documents (see PackedLoader)."""
        parts, vocab = _documents(self.train, self.train_documents), vocab_size or self.vocab_size
        return PackedLoader(self.train, parts, batch_size, seq_len, seed, vocab, self.name, self.train_masks)

    def val_windows(self, seq_len: int, tokens: int, vocab_size: int | None = None) -> np.ndarray:
        """Return the fixed validation subset as int64 [windows, seq_len + 1].

        Evenly spread windows of about `tokens` targets in all.
        """
        return self.val_batch(seq_len, tokens, vocab_size)[0]

    def val_batch(self, seq_len: int, tokens: int, vocab_size: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return val_windows and their targets, int64 [windows, seq_len]: the ids one position later, and IGNORED where
        a token is not learned.
        """
        return self.val_set(seq_len, tokens, vocab_size)[:2]

    def val_documents_batch(
        self, seq_len: int, tokens: int, vocab_size: int | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The same, and the bounds of the documents in each window, int32 [windows, 2, seq_len]; the target of the last
        token of a document is IGNORED.
        """
        block, targets, bounds, _ = self.val_set(seq_len, tokens, vocab_size, documents=True)
        assert bounds is not None
        return block, targets, bounds

    def val_set(
        self, seq_len: int, tokens: int, vocab_size: int | None = None, documents: bool = False
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, list[int]]:
        """Return (windows, targets, bounds, rows). windows, targets: of val_batch. bounds: with `documents`, those of
        val_documents_batch, else None. rows: how many of the windows are of each source. vocab_size: as of loader.
        """
        longest = max(map(len, self.val), default=0)  # a short validation part is evaluated in shorter sequences
        length, vocab = min(seq_len, max(longest - 1, 1)), vocab_size or self.vocab_size
        windows = Windows(self.val, length, f"{self.name} (validation part)", vocab, self.val_masks)
        count = min(max(tokens // seq_len, 1), len(windows))
        indices = np.arange(count, dtype=np.int64) * len(windows) // count
        block = windows.gather(indices)
        targets, bounds = windows.targets(indices, block), None
        if documents:
            bounds = windows.documents(indices, _documents(self.val, self.val_documents))
            targets[bounds[:, 0, 1:] == np.arange(1, windows.seq_len + 1)] = IGNORED  # the first token of another one
            bounds = np.minimum(bounds[:, :, :-1], windows.seq_len)
        if (targets == IGNORED).all():
            raise DataError(f"data: the validation part of {self.name} holds no token that is learned")
        return block, targets, bounds, [count]

    @property
    def parts(self) -> list[Corpus]:
        """The sources of a mixture; of other data itself."""
        return [self]

    @property
    def shares(self) -> list[float]:
        """The part of the rows that comes from each of `parts`."""
        return [1.0]

    def identity(self, known: Any = None) -> dict[str, Any]:
        """What a checkpoint stores to recognise this data; see data.identity.identity."""
        return identity(self.segments, known)

    def changed(self, stored: Any, now: dict[str, Any]) -> str | None:
        """The name of a source that is not what it was, or None. stored, now: identities, of a checkpoint and this."""
        return None if same_data(stored, self.segments, now) else self.name


def _documents(segments: list[Segment], known: list[Documents] | None) -> list[Documents]:
    return known or [Documents(None, 0, len(segment)) for segment in segments]


def holds_tokens(source: str) -> bool:
    """Whether a source is a token file or a folder with one."""
    if source == "python" or not os.path.exists(source):
        return False
    if os.path.isdir(source):
        return any(file.endswith((".tokens", ".npy")) for file in text_files(source))
    return source.endswith(".npy") or starts_with_magic(source)


def open_source(source: str, tokenizer: Tokenizer | None, val_fraction: float) -> Corpus:
    """open_data for one source."""
    given, tokenizer = tokenizer, tokenizer or ByteTokenizer()
    if source == "python":  # ./python is a file or folder of that name
        root = sysconfig.get_paths()["stdlib"]
        files = text_files(root, suffix=".py")
        if not files:
            raise DataError(f"data: this Python has no source files in {root}; give a text file or folder with --data")
        return _from_folder("python", root, files, tokenizer, val_fraction)
    if os.path.isdir(source):
        files = text_files(source)
        tokens = [file for file in files if file.endswith((".tokens", ".npy"))]
        if tokens:
            return _from_token_files(source, [os.path.join(source, file) for file in tokens], given, val_fraction)
        return _from_folder(source, source, files, tokenizer, val_fraction)
    if not os.path.exists(source):
        several = ", or several with weights (a.tokens:0.7,b.tokens:0.3)" if "," in source else ""
        raise DataError(
            f"data: {source} does not exist; give 'python', a text file, a folder, or a token file{several}"
        )
    if source.endswith(".npy") or starts_with_magic(source):
        return _from_token_files(source, [source], given, val_fraction)
    text = bytes_of(source)
    if is_packed(source) and is_text(text[:8192].tobytes()):
        raise _packed(source, source)
    if not is_text(text[:8192].tobytes()):
        raise DataError(
            f"data: {source} must be text, a token file or .npy, but it is binary; write its text, or its token ids as "
            f"a 1-D .npy file, and see xtrain prepare"
        )
    segment, size = _encode(text, tokenizer)
    train, val = _split_segments([segment], val_fraction, source)
    return Corpus(source, train, val, size / len(segment), tokenizer.vocab_size, tokenizer)


def _packed(path: str, source: str) -> DataError:
    return DataError(f"data: {path} must be read first: xtrain prepare {source} data.tokens writes its documents")


def _encode(text: FileArray, tokenizer: Tokenizer) -> tuple[Segment, int]:
    """Return (tokens, bytes of text). Bytes as tokens stay in the file."""
    if isinstance(tokenizer, ByteTokenizer):
        return text, len(text)
    return tokenizer.encode(text[:].tobytes()), len(text)


def _in_validation(path: str, fraction: float) -> bool:
    """Whether the file with this relative path is for validation.

    Decided by its name alone, so it never changes sides.
    """
    return (
        int.from_bytes(hashlib.sha256(path.encode("utf-8", "surrogateescape")).digest()[:8], "little")
        < fraction * 2.0**64
    )


def _from_folder(name: str, root: str, files: list[str], tokenizer: Tokenizer, fraction: float) -> Corpus:
    """A corpus of the text files of a folder, read into memory; a file is either for training or for validation."""
    documents: dict[str, bytes] = {}
    total = 0
    for file in files:
        path = os.path.join(root, file)
        if is_packed(file):
            raise _packed(path, root)
        try:
            with open(path, "rb") as stream:
                data = stream.read()
        except OSError as error:
            raise read_error(path, error) from None
        if data and is_text(data):
            documents[file] = data
            total += len(data)
        if total > MAX_FOLDER_BYTES:
            raise DataError(
                f"data: {root} holds more than {MAX_FOLDER_BYTES >> 30} GiB of text; "
                f"write a token file first: xtrain prepare {root} data.tokens"
            )
    if not documents:
        raise DataError(f"data: {root} holds no text files")
    if len(documents) == 1:
        segment, size, _ = _join(list(documents.values()), tokenizer)
        train, val = _split_segments([segment], fraction, root)
        return Corpus(name, train, val, size / len(segment), tokenizer.vocab_size, tokenizer)
    held_out = [file for file in documents if _in_validation(file, fraction)]
    if not held_out or len(held_out) == len(documents):  # few files: the smallest one, so that both sides have some
        held_out = [min(documents, key=lambda file: (len(documents[file]), file))]
    kept = set(held_out)
    if tokenizer.eos is None and not isinstance(tokenizer, ByteTokenizer):
        warnings.warn(NO_END, UserWarning, stacklevel=4)  # at the call of open_data
    train, train_bytes, starts = _join([data for file, data in documents.items() if file not in kept], tokenizer)
    val, val_bytes, val_starts = _join([documents[file] for file in held_out], tokenizer)
    return Corpus(
        name, [train], [val], (train_bytes + val_bytes) / (len(train) + len(val)), tokenizer.vocab_size, tokenizer,
        train_documents=[Documents(starts, 0, len(train))], val_documents=[Documents(val_starts, 0, len(val))],
    )  # fmt: skip


def _join(documents: list[bytes], tokenizer: Tokenizer) -> tuple[np.ndarray, int, np.ndarray]:
    """Return (tokens with an end-of-document token after each document, bytes of text, where each document begins)."""
    size = sum(map(len, documents))
    if isinstance(tokenizer, ByteTokenizer):
        ids = np.frombuffer(
            b"".join(part for data in documents for part in (data, bytes([tokenizer.eos or 0]))), np.uint8
        )
        lengths = [len(data) + 1 for data in documents]
        return ids, len(ids), np.cumsum([0, *lengths[:-1]])  # the separator counts as a byte of text
    end = np.asarray([] if tokenizer.eos is None else [tokenizer.eos], np.uint32)
    parts = [np.concatenate([tokenizer.encode(data), end]) for data in documents]
    return np.concatenate(parts), size, np.cumsum([0, *map(len, parts[:-1])])


def _split_segments(segments: Sequence[Segment], fraction: float, name: str) -> tuple[list[Segment], list[Segment]]:
    """Cut each segment: its last `fraction`, at least one token, is for validation. DataError where a side is empty."""
    train: list[Segment] = []
    val: list[Segment] = []
    for segment in segments:
        cut = len(segment) - max(int(len(segment) * fraction), 1)
        train.append(part(segment, 0, cut))
        val.append(part(segment, cut, len(segment)))
    if not any(map(len, train)) or not any(map(len, val)):
        raise DataError(f"data: {name} is too short to be split into training and validation parts")
    return train, val


@dataclass(frozen=True)
class _Part:
    """A run of tokens of a token file, with the documents in it; mask: 0 where a token is not learned, or None."""

    tokens: Segment
    documents: Documents
    mask: Segment | None


def _part_of(file: TokenFile, begin: int, end: int) -> _Part:
    """Tokens [begin, end) of a file, unread."""
    mask = None if file.loss_mask is None else file.loss_mask.part(begin, end)
    return _Part(part(file.tokens, begin, end), Documents(file.documents, begin, end), mask)


def _from_token_files(name: str, paths: list[str], given: Tokenizer | None, fraction: float) -> Corpus:
    """A corpus of token files. Files named val* are for validation; where there are none, or no others, the end of each
    file is. given: the tokenizer of the model.
    """
    files = [open_token_file(path) for path in paths]
    own = _common_tokenizer(paths, files, given)
    held_out = [os.path.basename(path).startswith("val") for path in paths]
    if any(held_out) and not all(held_out):
        parts = [(_part_of(file, 0, len(file.tokens)), side) for file, side in zip(files, held_out, strict=True)]
        train, val = ([one for one, side in parts if side == wanted] for wanted in (False, True))
    else:
        cuts = [len(begin) for begin in _split_segments([file.tokens for file in files], fraction, name)[0]]
        train = [_part_of(file, 0, cut) for file, cut in zip(files, cuts, strict=True)]
        val = [_part_of(file, cut, len(file.tokens)) for file, cut in zip(files, cuts, strict=True)]
    known = all(file.text_bytes for file in files)
    text_bytes, count = sum(file.text_bytes for file in files), sum(len(file.tokens) for file in files)
    vocab = _vocabulary(files)
    tokenizer = with_template(own, given or own) if own is not None else given or ByteTokenizer()
    fits = own is not None or tokenizer.vocab_size >= vocab
    masked = any(file.loss_mask is not None for file in files)
    return Corpus(
        name,
        [one.tokens for one in train],
        [one.tokens for one in val],
        text_bytes / count if known else None,
        vocab,
        tokenizer if fits else None,
        [one.mask for one in train] if masked else None,
        [one.mask for one in val] if masked else None,
        [one.documents for one in train],
        [one.documents for one in val],
    )


def _common_tokenizer(paths: list[str], files: list[TokenFile], given: Tokenizer | None) -> Tokenizer | None:
    """The tokenizer that the files hold, one with a chat template where there is one; None where they hold none.
    DataError where two differ, or one is not that of the model.
    """
    own = [(path, file.tokenizer) for path, file in zip(paths, files, strict=True) if file.tokenizer is not None]
    for path, tokenizer in own:
        if given is not None and not same_tokenizer(tokenizer, given):
            raise DataError(f"data: {path} was made by another tokenizer than that of the model")
        if not same_tokenizer(tokenizer, own[0][1]):
            raise DataError(f"data: {path} and {own[0][0]} were made by different tokenizers")
    return with_template(*(tokenizer for _, tokenizer in own)) if own else None


def _vocabulary(files: list[TokenFile]) -> int:
    """The largest vocabulary of the files; where none tells, 1 + the largest token, which reads all tokens."""
    vocab = max(file.vocab_size for file in files)
    if not vocab:
        vocab = 1 + max(
            int(file.tokens[at : at + (1 << 24)].max()) for file in files for at in range(0, len(file.tokens), 1 << 24)
        )
    return vocab
