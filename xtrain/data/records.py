"""Documents -> tokens, and which of them are learned: the labels of supervised fine-tuning.

text                 every token, and the end of the document
prompt, completion   the tokens of the completion, and the end of the document; both are encoded for themselves
messages             what the assistant says, see tokenizers.ChatTemplate; the template says how it ends
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ..errors import DataError, shown
from ..tokenizers import ByteTokenizer, ChatTemplate, FileTokenizer, Tokenizer, has_template
from .readers import KINDS, Document, text_bytes

_BATCH, _BATCH_BYTES = 1024, 1 << 24  # texts, and bytes of them, that are encoded at once


class Encoded(NamedTuple):
    """tokens: ids [n], the end of the document among them. learned: bool [n], or None where all are. text: bytes of the
    text of the tokens; the separator of ByteTokenizer counts as one.
    """

    tokens: np.ndarray
    learned: np.ndarray | None
    text: int


def batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """The documents in lists that are encoded at once: as many, or as many bytes of text, as fit. Where they are cut
    depends on the documents alone.
    """
    waiting: list[Document] = []
    size = 0
    for document in documents:
        waiting.append(document)
        size += _size(document.content)
        if len(waiting) == _BATCH or size >= _BATCH_BYTES:
            yield waiting
            waiting, size = [], 0
    if waiting:
        yield waiting


def _size(content: Any) -> int:
    """Characters or bytes of the texts in a document."""
    if isinstance(content, dict):
        return sum(map(_size, content.values()))
    if isinstance(content, list):  # of messages
        return sum(map(_size, content))
    return len(content) if isinstance(content, (bytes, str)) else 0


class Encoder:
    """Encodes documents with a tokenizer. field: the key that holds the text, or "messages"; None: what is there."""

    def __init__(self, tokenizer: Tokenizer, field: str | None = None) -> None:
        self._tokenizer, self._field = tokenizer, field
        end = [] if tokenizer.eos is None else [tokenizer.eos]
        self._end = np.asarray(end, np.uint32)

    def encode(self, documents: Iterable[Document]) -> Iterator[Encoded]:
        """Each document that is not empty, in order. Many texts are encoded at once, where the tokenizer can."""
        for batch in batches(documents):
            yield from self.encode_batch(batch)

    def encode_batch(self, documents: Iterable[Document]) -> list[Encoded]:
        """As encode, for documents that are all in memory."""
        found: list[Encoded] = []
        waiting: list[bytes] = []
        for document in documents:
            text = self._text(document)
            if text is None:
                found += self._encode_texts(waiting)
                waiting = []
                found.append(self._encode_record(document))
            elif text:
                waiting.append(text)
        found += self._encode_texts(waiting)
        return found

    def _encode_texts(self, texts: list[bytes]) -> Iterator[Encoded]:
        tokenizer = self._tokenizer
        batch = tokenizer.encode_batch(texts) if isinstance(tokenizer, FileTokenizer) else map(tokenizer.encode, texts)
        for text, ids in zip(texts, batch, strict=True):
            separator = 1 if isinstance(tokenizer, ByteTokenizer) else 0
            yield Encoded(np.concatenate([ids, self._end]), None, len(text) + separator)

    def _text(self, document: Document) -> bytes | None:
        """The text of a document; None for one whose tokens are not all learned."""
        place, content = document
        if isinstance(content, bytes):
            return content
        kind = kind_of(document, self._field)
        return text_bytes(content[kind], place, kind) if kind not in ("messages", "prompt") else None

    def _encode_record(self, document: Document) -> Encoded:
        content: Any = document.content
        if kind_of(document, self._field) == "messages":
            return self._encode_messages(document.place, content["messages"])
        prompt, completion = (
            self._tokenizer.encode(text_bytes(content[name], document.place, name)) for name in ("prompt", "completion")
        )
        tokens = np.concatenate([prompt, completion, self._end])
        return Encoded(tokens, np.arange(len(tokens)) >= len(prompt), 0)

    @cached_property
    def _template(self) -> ChatTemplate:
        tokenizer = self._tokenizer
        plain = isinstance(tokenizer, ByteTokenizer) and not has_template(tokenizer.kept)
        if plain or not isinstance(tokenizer, (ByteTokenizer, FileTokenizer)):
            raise DataError("data: messages need a tokenizer with a chat template: --tokenizer DIR")
        return ChatTemplate(tokenizer.files(), tokenizer.name)

    def _encode_messages(self, place: str, messages: Any) -> Encoded:
        template, tokenizer = self._template, self._tokenizer
        assert isinstance(tokenizer, (ByteTokenizer, FileTokenizer))
        good = isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)
        if not good or not all(isinstance(message.get("role"), str) for message in messages):
            raise DataError(f"data: {place}: messages must be a list of objects with a role, got {shown(messages)}")
        try:
            text, spans = template.spans(messages)
            tokens, places = tokenizer.encode_with_places(text)
        except DataError as error:
            raise DataError(f"data: {place}: {str(error).removeprefix('data: ')}") from None
        learned = np.zeros(len(tokens), bool)
        for start, end in spans:
            learned |= (places[:, 0] < end) & (places[:, 1] > start)
        return Encoded(tokens, learned, 0)


def kind_of(document: Document, field: str | None) -> str:
    """What an object is: the key of its text, "messages", or "prompt" for prompt and completion. DataError where that
    is not there, or not clear.
    """
    place, content = document
    assert isinstance(content, dict)
    shape = shown(", ".join(content) or "nothing", 200)
    if field is not None:
        if not set(KINDS.get(field, (field,))) <= set(content):
            wanted = " and ".join(KINDS.get(field, (repr(field),)))
            raise DataError(f"data: {place} must have the field {wanted}, got {shape}; see --field")
        return field
    found = [kind for kind, names in KINDS.items() if set(names) <= set(content)]
    if len(found) > 1:  # a row of Parquet has null in the columns that it does not use
        found = [kind for kind in found if all(content[name] is not None for name in KINDS[kind])]
    if len(found) == 1:
        return found[0]
    rule = f"{' or '.join(found)}, not both" if found else "text, messages, or prompt and completion"
    raise DataError(f"data: {place} must have {rule}, got {shape}; see --field")


def texts_of(document: Document, field: str | None) -> Iterator[bytes]:
    """The texts in a document, for training a tokenizer: those of messages are their contents."""
    place, content = document
    if isinstance(content, bytes):
        yield content
        return
    kind = kind_of(document, field)
    if kind == "prompt":
        yield from (text_bytes(content[name], place, name) for name in ("prompt", "completion"))
    elif kind == "messages":
        for message in content["messages"] if isinstance(content["messages"], list) else []:
            if isinstance(message, dict) and isinstance(message.get("content"), str):
                yield text_bytes(message["content"], place, "content")
    else:
        yield text_bytes(content[kind], place, kind)
