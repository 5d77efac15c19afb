"""Data: text or tokens on disk -> memory-mapped segments -> shuffled batches.

A *segment* is one 1-D array of token ids; training windows never cross segments. Sources (`open_data`):

    "python"         the .py files of the standard library (without installed packages), one document per file
    a text file      memory-mapped; one segment; its last part is for validation
    a folder         every text file below it, sorted by path, one document per file; whole files are for validation
    a token file     written by `prepare`, or a 1-D integer .npy file; memory-mapped; its last part is for validation
    a folder with *.tokens or *.npy files: one segment each; those named val* are for validation, else the last parts

Hidden files, installed packages and what runs have written are left out of a folder: a run inside its own data can be
resumed, and none trains on the records of another.

Text becomes tokens through the model's tokenizer; with bytes as tokens nothing is copied or cached.

A token file is: the 8 bytes "xtokens\\0"; uint32 version = 1; uint32 bytes per token = 1, 2 or 4; uint64 token count;
uint64 bytes of the original text (0: unknown); uint32 vocabulary size (0: unknown); zeros up to byte 64; then the
tokens, all little-endian unsigned.
"""

from __future__ import annotations

import hashlib
import os
import struct
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import DataError
from .files import reason, write_file
from .rundir import LOCK, WRITTEN
from .tokenizer import ByteTokenizer, Tokenizer

MAGIC = b"xtokens\0"
_HEADER = struct.Struct("<8sIIQQI")
_HEADER_BYTES = 64
MAX_FOLDER_BYTES = 2 << 30  # of text that is read into memory; more wants `prepare`
_SKIPPED = {"site-packages", "dist-packages", "__pycache__", ".git", "node_modules", ".venv"}


@dataclass
class Corpus:
    """What a source holds.

    `train` and `val` are lists of 1-D arrays of token ids; `bytes_per_token` turns nats per token into bits per byte.
    """

    name: str
    train: list[np.ndarray]
    val: list[np.ndarray]
    bytes_per_token: float | None
    vocab_size: int
    tokenizer: Tokenizer | None

    @property
    def train_tokens(self) -> int:
        """Tokens for training."""
        return sum(len(segment) for segment in self.train)

    @property
    def val_tokens(self) -> int:
        """Tokens for validation."""
        return sum(len(segment) for segment in self.val)

    def fingerprint(self) -> str:
        """A hash of the sizes and of 64 evenly spread pieces: tells whether a resumed run sees the same data."""
        digest = hashlib.sha256()
        for segment in [*self.train, *self.val]:
            digest.update(struct.pack("<Q", len(segment)))
            for start in np.linspace(0, max(len(segment) - 1024, 0), 64, dtype=np.int64):
                digest.update(np.asarray(segment[start : start + 1024], dtype="<i8").tobytes())
        return digest.hexdigest()

    def loader(self, batch_size: int, seq_len: int, seed: int = 0) -> Loader:
        """Return the shuffled training batches."""
        return Loader(self.train, batch_size, seq_len, seed, self.vocab_size, self.name)

    def val_windows(self, seq_len: int, tokens: int, vocab_size: int | None = None) -> np.ndarray:
        """Return the fixed validation subset as int64 [windows, seq_len + 1].

        Evenly spread windows of about `tokens` targets in all.
        """
        longest = max(map(len, self.val), default=0)  # a short validation part is evaluated in shorter sequences
        windows = Windows(self.val, min(seq_len, max(longest - 1, 1)), f"{self.name} (validation part)", vocab_size)
        count = min(max(tokens // seq_len, 1), len(windows))
        return windows.gather(np.arange(count, dtype=np.int64) * len(windows) // count)


def open_data(
    source: str | os.PathLike[str] = "python", tokenizer: Tokenizer | None = None, val_fraction: float = 0.05
) -> Corpus:
    """Open a data source (see the top of this file).

    Raises DataError when it is missing, unreadable, empty or has nothing to split.
    """
    source = os.fspath(source)
    tokenizer = tokenizer or ByteTokenizer()
    if source == "python":  # ./python is a file or folder of that name
        root = sysconfig.get_paths()["stdlib"]
        files = _files(root, suffix=".py")
        if not files:
            raise DataError(f"data: this Python has no source files in {root}; give a text file or folder with --data")
        return _from_folder("python", root, files, tokenizer, val_fraction)
    if os.path.isdir(source):
        files = _files(source)
        tokens = [file for file in files if file.endswith((".tokens", ".npy"))]
        if tokens:
            return _from_token_files(source, [os.path.join(source, file) for file in tokens], tokenizer, val_fraction)
        return _from_folder(source, source, files, tokenizer, val_fraction)
    if not os.path.exists(source):
        raise DataError(f"data: {source} does not exist; give 'python', a text file, a folder, or a token file")
    if source.endswith(".npy") or _starts_with_magic(source):
        return _from_token_files(source, [source], tokenizer, val_fraction)
    segment, size = _encode(_map_bytes(source), tokenizer)
    train, val = _split_segments([segment], val_fraction, source)
    return Corpus(source, train, val, size / len(segment), tokenizer.vocab_size, tokenizer)


# ---- text


def _files(root: str, suffix: str = "") -> list[str]:
    """Relative paths below `root`, sorted, without hidden files, installed packages and what runs have written."""
    found = []

    def refuse(error: OSError) -> None:
        raise _read_error(error.filename, error)

    for folder, folders, names in os.walk(root, onerror=refuse):
        if LOCK in names:
            folders[:], names = ([n for n in part if not WRITTEN.fullmatch(n)] for part in (folders, names))
        folders[:] = [name for name in folders if name not in _SKIPPED and not name.startswith(".")]
        for name in names:
            if name.endswith(suffix) and not name.startswith("."):
                found.append(os.path.relpath(os.path.join(folder, name), root))
    return sorted(path.replace(os.sep, "/") for path in found)


def _read_error(path: str, error: OSError) -> DataError:
    return DataError(f"data: {path} cannot be read: {error.strerror or error}")


def _map_bytes(path: str) -> np.ndarray:
    try:
        if not os.path.isfile(path):
            raise DataError(f"data: {path} must be a file or a folder")
        if os.path.getsize(path) == 0:
            raise DataError(f"data: {path} is empty")
        return np.memmap(path, np.uint8, "r")
    except OSError as error:
        raise _read_error(path, error) from None


def _encode(text: np.ndarray, tokenizer: Tokenizer) -> tuple[np.ndarray, int]:
    """Return (tokens, bytes of text). Bytes as tokens stay the memory map they are."""
    if isinstance(tokenizer, ByteTokenizer):
        return text, len(text)
    return tokenizer.encode(text.tobytes()), len(text)


def _is_text(data: bytes) -> bool:
    return b"\0" not in data[:8192]


def _holds_text(path: str) -> bool:
    """Whether `prepare` takes text from the file: not from an empty one, nor from tokens it has written before."""
    try:
        with open(path, "rb") as stream:
            head = stream.read(8192)
    except OSError as error:
        raise _read_error(path, error) from None
    return bool(head) and _is_text(head)


def _same_file(a: str, b: str) -> bool:
    try:
        return os.path.samefile(a, b)
    except OSError:  # a link to nothing
        return False


def _in_validation(path: str, fraction: float) -> bool:
    """Whether the file with this relative path is for validation.

    Decided by its name alone, so it never changes sides.
    """
    return (
        int.from_bytes(hashlib.sha256(path.encode("utf-8", "surrogateescape")).digest()[:8], "little")
        < fraction * 2.0**64
    )


def _from_folder(name: str, root: str, files: list[str], tokenizer: Tokenizer, fraction: float) -> Corpus:
    documents: dict[str, bytes] = {}
    total = 0
    for file in files:
        path = os.path.join(root, file)
        try:
            with open(path, "rb") as stream:
                data = stream.read()
        except OSError as error:
            raise _read_error(path, error) from None
        if data and _is_text(data):
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
        segment, size = _join(list(documents.values()), tokenizer)
        train, val = _split_segments([segment], fraction, root)
        return Corpus(name, train, val, size / len(segment), tokenizer.vocab_size, tokenizer)
    held_out = [file for file in documents if _in_validation(file, fraction)]
    if not held_out or len(held_out) == len(documents):  # few files: the smallest one, so that both sides have some
        held_out = [min(documents, key=lambda file: (len(documents[file]), file))]
    kept = set(held_out)
    train, train_bytes = _join([data for file, data in documents.items() if file not in kept], tokenizer)
    val, val_bytes = _join([documents[file] for file in held_out], tokenizer)
    return Corpus(
        name, [train], [val], (train_bytes + val_bytes) / (len(train) + len(val)), tokenizer.vocab_size, tokenizer
    )


def _join(documents: list[bytes], tokenizer: Tokenizer) -> tuple[np.ndarray, int]:
    """Return (tokens with an end-of-document token after each document, bytes of text)."""
    size = sum(map(len, documents))
    if isinstance(tokenizer, ByteTokenizer):
        ids = np.frombuffer(
            b"".join(part for data in documents for part in (data, bytes([tokenizer.eos or 0]))), np.uint8
        )
        return ids, len(ids)  # the separator counts as a byte of text
    end = np.asarray([] if tokenizer.eos is None else [tokenizer.eos], np.uint32)
    return np.concatenate([part for data in documents for part in (tokenizer.encode(data), end)]), size


def _split_segments(
    segments: list[np.ndarray], fraction: float, name: str
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    train, val = [], []
    for segment in segments:
        cut = len(segment) - max(int(len(segment) * fraction), 1)
        train.append(segment[:cut])
        val.append(segment[cut:])
    if not any(map(len, train)) or not any(map(len, val)):
        raise DataError(f"data: {name} is too short to be split into training and validation parts")
    return train, val


# ---- token files


def _starts_with_magic(path: str) -> bool:
    try:
        with open(path, "rb") as stream:
            return stream.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise _read_error(path, error) from None


def open_tokens(path: str | os.PathLike[str]) -> tuple[np.ndarray, int, int]:
    """Memory-map a token file or a 1-D integer .npy file; return (tokens, bytes of text or 0, vocabulary size or 0)."""
    path = os.fspath(path)
    try:
        if path.endswith(".npy"):
            array = np.load(path, mmap_mode="r", allow_pickle=False)
            if array.ndim != 1 or array.dtype.kind not in "iu":
                raise DataError(f"data: {path} must hold a 1-D array of integers, got {array.ndim}-D {array.dtype}")
            return array, 0, 0
        with open(path, "rb") as stream:
            head = stream.read(_HEADER_BYTES)
        size = os.path.getsize(path)
    except OSError as error:
        raise _read_error(path, error) from None
    except DataError:
        raise
    except (ValueError, EOFError):  # NumPy's own words speak of pickles
        raise DataError(f"data: {path} is not a .npy file of integers, or it is damaged") from None
    if len(head) < _HEADER_BYTES or not head.startswith(MAGIC):
        raise DataError(f"data: {path} is not a token file; write one with xtrain prepare")
    _, version, width, count, text_bytes, vocab = _HEADER.unpack(head[: _HEADER.size])
    if version != 1 or width not in (1, 2, 4):
        raise DataError(
            f"data: {path} must have version 1 and 1, 2 or 4 bytes per token, got version {version} and {width} bytes"
        )
    if size != _HEADER_BYTES + count * width:
        raise DataError(
            f"data: {path} is damaged: its header says {count} tokens of {width} bytes, the file has {size} bytes"
        )
    if count == 0:
        raise DataError(f"data: {path} is empty")
    return np.memmap(path, f"<u{width}", "r", _HEADER_BYTES, (count,)), text_bytes, vocab


def _from_token_files(name: str, paths: list[str], tokenizer: Tokenizer, fraction: float) -> Corpus:
    opened = [(os.path.basename(path), *open_tokens(path)) for path in paths]
    val = [tokens for file, tokens, _, _ in opened if file.startswith("val")]
    train = [tokens for file, tokens, _, _ in opened if not file.startswith("val")]
    if not val or not train:
        train, val = _split_segments([tokens for _, tokens, _, _ in opened], fraction, name)
    known = all(text for _, _, text, _ in opened)
    ratio = sum(text for _, _, text, _ in opened) / sum(len(tokens) for _, tokens, _, _ in opened) if known else None
    vocab = max(vocab for _, _, _, vocab in opened)
    if not vocab:  # unknown: one pass over the memory-mapped tokens
        vocab = 1 + max(
            int(segment[at : at + (1 << 24)].max())
            for _, segment, _, _ in opened
            for at in range(0, len(segment), 1 << 24)
        )
    return Corpus(name, train, val, ratio, vocab, tokenizer if tokenizer.vocab_size >= vocab else None)


def prepare(source: str | os.PathLike[str], out: str | os.PathLike[str], tokenizer: Tokenizer | None = None) -> int:
    """Write the text of a file or folder (streamed, any size) as a token file and return the number of tokens.

    Each file is one document, followed by the tokenizer's end-of-document token. The file appears under its name when
    it is complete. DataError when it would replace a text it is made of.
    """
    source, out = os.fspath(source), os.fspath(out)
    tokenizer = tokenizer or ByteTokenizer()
    width = 1 if tokenizer.vocab_size <= 1 << 8 else 2 if tokenizer.vocab_size <= 1 << 16 else 4
    if source == "python":  # ./python is a file or folder of that name
        source = sysconfig.get_paths()["stdlib"]
        files = [os.path.join(source, file) for file in _files(source, ".py")]
    elif os.path.isdir(source):
        files = [os.path.join(source, file) for file in _files(source)]
    elif os.path.exists(source):
        files = [source]
    else:
        raise DataError(f"data: {source} does not exist")
    if os.path.exists(out) and any(_same_file(file, out) and _holds_text(file) for file in files):
        raise DataError(f"data: the tokens must go into another file than the text of {source}, got {out}")
    count = text_bytes = 0
    end = b"" if tokenizer.eos is None else np.asarray([tokenizer.eos], f"<u{width}").tobytes()

    def write(temporary: str) -> None:
        nonlocal count, text_bytes
        with open(temporary, "wb") as stream:
            stream.write(b"\0" * _HEADER_BYTES)
            for file in files:
                try:
                    with open(file, "rb") as text:
                        data = text.read()
                except OSError as error:
                    raise DataError(f"data: {file}: {reason(error)}") from None
                if not data or not _is_text(data):
                    continue
                ids = tokenizer.encode(data).astype(f"<u{width}", copy=False)
                stream.write(ids.tobytes() + end)
                count += len(ids) + bool(end)
                text_bytes += len(data) + (1 if isinstance(tokenizer, ByteTokenizer) else 0)
            if not count:
                raise DataError(f"data: {source} holds no text files")
            stream.seek(0)
            stream.write(_HEADER.pack(MAGIC, 1, width, count, text_bytes, tokenizer.vocab_size))
            stream.flush()
            os.fsync(stream.fileno())

    try:
        write_file(out, write)
    except OSError as error:
        raise DataError(f"data: {out} cannot be written: {reason(error)}") from None
    return count


# ---- windows and batches


class Windows:
    """Every window of seq_len + 1 tokens that starts at a multiple of seq_len of its segment.

    Raises DataError when there is none.
    """

    def __init__(
        self, segments: list[np.ndarray], seq_len: int, name: str = "data", vocab_size: int | None = None
    ) -> None:
        self.seq_len = seq_len
        self._name, self._vocab = name, vocab_size
        self._segments = [segment for segment in segments if len(segment) > seq_len]
        counts = [(len(segment) - 1) // seq_len for segment in self._segments]
        self._ends = np.cumsum(counts, dtype=np.int64) if counts else np.zeros(0, np.int64)
        if not counts:
            longest = max(map(len, segments), default=0)
            raise DataError(
                f"data: {name} is too short: a sequence takes {seq_len + 1} tokens (seq_len + 1), "
                f"the longest piece has {longest}"
            )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def gather(self, indices: np.ndarray) -> np.ndarray:
        """Return windows `indices` as int64 [len(indices), seq_len + 1].

        A token id outside the vocabulary is an error with its position.
        """
        out = np.empty((len(indices), self.seq_len + 1), np.int64)
        which = np.searchsorted(self._ends, indices, side="right")
        for row, (index, part) in enumerate(zip(indices, which, strict=True)):
            start = (int(index) - (int(self._ends[part - 1]) if part else 0)) * self.seq_len
            out[row] = self._segments[part][start : start + self.seq_len + 1]
            low, high = int(out[row].min()), int(out[row].max())
            if low < 0 or (self._vocab is not None and high >= self._vocab):
                bad = low if low < 0 else high
                position = start + int(np.flatnonzero(out[row] == bad)[0])
                raise DataError(
                    f"data: token ids of {self._name} must be in [0, {self._vocab}), "
                    f"got {bad} at position {position} of piece {part}"
                )
        return out


class Loader:
    """Endless batches of training windows, shuffled without replacement: every window once per epoch.

    The order is a function of (seed, epoch) that needs no memory, and the position is two numbers, so a checkpoint
    continues exactly.
    """

    def __init__(
        self,
        segments: list[np.ndarray],
        batch_size: int,
        seq_len: int,
        seed: int = 0,
        vocab_size: int | None = None,
        name: str = "data",
    ) -> None:
        self.windows = Windows(segments, seq_len, name, vocab_size)
        self.batch_size, self.seed = batch_size, seed
        try:  # gathered window by window, a batch that cannot be held would fill the memory for hours first
            np.empty((batch_size, seq_len + 1), np.int64)
        except (MemoryError, ValueError):
            raise DataError(
                f"data: a batch of {batch_size} x {seq_len} tokens (batch_size x seq_len) does not fit into memory"
            ) from None
        self.epoch = 0
        self.index = 0  # windows of this epoch already used

    def next_batch(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids, targets), each int64 [batch_size, seq_len]; targets are the ids one position later."""
        parts, wanted, total = [], self.batch_size, len(self.windows)
        while wanted:
            take = min(wanted, total - self.index)
            parts.append(permute(np.arange(self.index, self.index + take), total, self.seed, self.epoch))
            self.index += take
            wanted -= take
            if self.index == total:
                self.epoch, self.index = self.epoch + 1, 0
        block = self.windows.gather(np.concatenate(parts))
        return np.ascontiguousarray(block[:, :-1]), np.ascontiguousarray(block[:, 1:])

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        """Yield batches as tensors, without end."""
        from . import _C

        while True:
            ids, targets = self.next_batch()
            yield _C.from_numpy(ids), _C.from_numpy(targets)

    def state_dict(self) -> dict[str, int]:
        """Return the position as {"epoch", "index"}."""
        return {"epoch": self.epoch, "index": self.index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a position of state_dict()."""
        epoch, index = state["epoch"], state["index"]
        if not 0 <= index < len(self.windows) or epoch < 0:
            raise DataError(
                f"data: the position must be inside the data ({len(self.windows)} windows), "
                f"got epoch {epoch}, window {index}"
            )
        self.epoch, self.index = epoch, index


def permute(indices: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
    """Map each of `indices` (in [0, count)) through a pseudo-random permutation of [0, count) chosen by (seed, epoch).

    A Feistel network of six rounds over the next even power of two, walked until it falls inside (Black & Rogaway,
    "Ciphers with arbitrary finite domains", 2002): no table, the same on every machine and NumPy version.
    """
    half = max((int(count - 1).bit_length() + 1) // 2, 1)
    mask = np.uint64((1 << half) - 1)
    keys = [_mix(np.uint64((seed + 0x9E3779B97F4A7C15 * (6 * epoch + turn + 1)) % 2**64)) for turn in range(6)]
    value = np.asarray(indices, np.uint64).copy()
    todo = np.ones(len(value), bool)
    while todo.any():
        left, right = value[todo] >> np.uint64(half), value[todo] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        value[todo] = (left << np.uint64(half)) | right
        todo = value >= np.uint64(count)
    return value.astype(np.int64)


def _mix(x: Any) -> Any:
    """The finaliser of SplitMix64: scatters the bits of a uint64."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
