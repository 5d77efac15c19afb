"""The tokenizer.json of a model directory (needs the package `tokenizers`)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError, shown
from ..saving import DirectoryReader
from ..saving.generation_config import NAME as GENERATION
from ..saving.generation_config import checked_ends, place_of_ends

_COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def package(what: object) -> Any:
    """The package `tokenizers`. DataError, which names what needs it, when it is missing."""
    try:
        return import_module("tokenizers")  # not `import`: checkers take this folder for it
    except ImportError:
        raise DataError(f"{what} needs the package tokenizers: pip install 'xtrain[hf]'") from None


class StoredFiles:
    """Tokenizer files {name: content} that were kept elsewhere, for FileTokenizer. directory: the name in messages."""

    def __init__(self, directory: Path, files: Mapping[str, bytes]) -> None:
        self.directory, self._files = directory, files

    def has(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str) -> bytes:
        return self._files[name]


class FileTokenizer:
    """The tokenizer.json of a model directory."""

    def __init__(self, reader: DirectoryReader | StoredFiles) -> None:
        path = reader.directory / "tokenizer.json"
        implementation = package(path).Tokenizer
        self._files = {name: reader.read(name) for name in _COPIED if reader.has(name)}
        self._path = path
        with self._clear_errors("read"):
            self._implementation = implementation.from_str(self._files["tokenizer.json"].decode("utf-8"))
        # Ids may have gaps: the largest counts.
        self.vocab_size: int = 1 + max(self._implementation.get_vocab().values(), default=-1)
        self.eos = _find_eos(reader)
        if self.eos is None and isinstance(token := _end_token(reader), str):
            self.eos = self._implementation.token_to_id(token)

    def encode(self, text: bytes) -> np.ndarray:
        """Return the ids of `text` as uint32. DataError for text that the tokenizer cannot encode."""
        return self.encode_batch([text])[0]

    def _encode(self, texts: list[str]) -> Any:
        return self._implementation.encode_batch(texts, add_special_tokens=False)

    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """As encode, of each text, on all processors."""
        with self._clear_errors("used"):
            plain = [text.decode("utf-8", errors="replace") for text in texts]
            found = self._encode(plain)
        return [np.asarray(encoding.ids, np.uint32) for encoding in found]

    def encode_with_places(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids uint32 [n], the characters of each in the text, int64 [n, 2]: from the first to behind the
        last).
        """
        with self._clear_errors("used"):
            found = self._encode([text])[0]
        return np.asarray(found.ids, np.uint32), np.asarray(found.offsets, np.int64).reshape(-1, 2)

    @property
    def name(self) -> str:
        """The file that it comes from, for messages."""
        return str(self._path)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`."""
        return self._implementation.decode([int(i) for i in ids], skip_special_tokens=False)

    @contextlib.contextmanager
    def _clear_errors(self, what: str) -> Iterator[None]:
        """What the package raises becomes a DataError: bare Exception, and for a panic a BaseException."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                raise DataError(f"{self._path} cannot be {what}: {shown(error, 300)}") from None
            raise

    def files(self) -> dict[str, bytes]:
        """Return the tokenizer files of the directory it came from, unchanged."""
        return dict(self._files)


def _find_eos(reader: DirectoryReader | StoredFiles) -> int | None:
    """The first of the model's ends, which ends a document; None where the directory names none."""
    name = place_of_ends(_values(reader, GENERATION) if reader.has(GENERATION) else None)
    ends = checked_ends(reader.directory / name, _values(reader, name).get("eos_token_id"), DataError)
    return ends[0] if ends else None


def _end_token(reader: DirectoryReader | StoredFiles) -> Any:
    """The text of the token that ends a document, as tokenizer_config.json has it."""
    token = _values(reader, "tokenizer_config.json").get("eos_token")
    return token.get("content") if isinstance(token, dict) else token


def is_bytes(reader: DirectoryReader) -> bool:
    """Whether tokenizer_config.json says that bytes are the tokens, as ByteTokenizer writes it."""
    return _values(reader, "tokenizer_config.json").get("xtrain") == "bytes"


def _values(reader: DirectoryReader | StoredFiles, name: str) -> dict[str, Any]:
    """The JSON object in a file; empty when there is none that can be read."""
    try:
        value = json.loads(reader.read(name)) if reader.has(name) else {}
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
