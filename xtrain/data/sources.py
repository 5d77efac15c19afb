"""Opening data: one source, or a mixture of several."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from .._types import as_int
from ..errors import DataError
from ..tokenizers import Tokenizer, same_tokenizer, with_template
from .corpus import Corpus, holds_tokens, open_source
from .loader import IGNORED
from .mixture import MixedLoader, labels_of, parse_sources, shares_of, sources_text


def open_data(
    source: str | os.PathLike[str] | Mapping[Any, float] = "python",
    tokenizer: Tokenizer | None = None,
    val_fraction: float = 0.05,
) -> Corpus:
    """Open a data source (see the top of this folder), or several with weights: {"a.tokens": 0.7, "b.tokens": 0.3}, or
    the text "a.tokens:0.7,b.tokens:0.3"; a row of a batch comes from each as often as its weight says.

    tokenizer: of text; None takes that of a token file, and bytes for text. DataError when a source is missing,
    unreadable, empty or has nothing to split, and when a token file was made by another tokenizer. TypeError for a
    source that is no path, text or mapping. A UserWarning tells of a tokenizer without an end-of-document token, where
    a folder has several texts.
    """
    if not isinstance(source, (str, os.PathLike, Mapping)):
        raise TypeError(
            "data: source must be a path, text or a mapping from paths to weights, got "
            f"{type(source).__name__} (an array of token ids: numpy.save it as .npy)"
        )
    text = sources_text(source) if isinstance(source, Mapping) else os.fspath(source)
    sources = parse_sources(text)
    return _open_mixture(sources, tokenizer, val_fraction) if sources else open_source(text, tokenizer, val_fraction)


@dataclass
class Mixture(Corpus):
    """Several sources. What a Corpus holds are the lists of all sources, one behind the other; bytes_per_token is the
    mean over rows.
    """

    sources: list[Corpus] = field(default_factory=list)
    exact_shares: list[Fraction] = field(default_factory=list)

    @property
    def parts(self) -> list[Corpus]:
        """The sources."""
        return self.sources

    @property
    def shares(self) -> list[float]:
        """The part of the rows that comes from each source."""
        return [float(share) for share in self.exact_shares]

    def loader(self, batch_size: int, seq_len: int, seed: int = 0, vocab_size: int | None = None) -> MixedLoader:
        """Return the shuffled training batches. vocab_size: of the model; None is that of the data."""
        vocab = vocab_size or self.vocab_size
        return self._mixed([part.loader(batch_size, seq_len, s, vocab) for part, s in self._seeded(seed)])

    def packed_loader(self, batch_size: int, seq_len: int, seed: int = 0, vocab_size: int | None = None) -> MixedLoader:
        """As loader, with rows of whole documents (see PackedLoader); each row is of one source."""
        vocab = vocab_size or self.vocab_size
        return self._mixed([part.packed_loader(batch_size, seq_len, s, vocab) for part, s in self._seeded(seed)])

    def _mixed(self, loaders: Sequence[Any]) -> MixedLoader:
        return MixedLoader(loaders, self.exact_shares, labels_of([part.name for part in self.sources]))

    def _seeded(self, seed: int) -> list[tuple[Corpus, int]]:
        """Sources with seeds of their own: of two sources of one size, such as a text and its translation, the same
        rows would come at the same time otherwise.
        """
        seed = as_int("data", "seed", seed)
        return [(part, (seed + i * 0xD1B54A32D192ED03) % 2**63) for i, part in enumerate(self.sources)]

    def val_set(
        self, seq_len: int, tokens: int, vocab_size: int | None = None, documents: bool = False
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, list[int]]:
        """See Corpus.val_set. Each source has an equal part of the tokens: the loss of a rare one is as exact as any
        other. The rows of one whose validation part is short end with zeros that are not learned.
        """
        each = max(tokens // len(self.sources), 1)
        found = [part.val_set(seq_len, each, vocab_size or self.vocab_size, documents) for part in self.sources]
        rows = [len(block) for block, *_ in found]
        width = max(targets.shape[1] for _, targets, *_ in found)
        block = np.zeros((sum(rows), width + 1), np.int64)
        whole_targets = np.full((sum(rows), width), IGNORED, np.int64)
        bounds = np.zeros((sum(rows), 2, width), np.int32) if documents else None
        start = 0
        for ids, targets, own, (count,) in found:
            end, size = start + count, targets.shape[1]
            block[start:end, : size + 1], whole_targets[start:end, :size] = ids, targets
            if bounds is not None and own is not None:
                bounds[start:end, :, :size] = own
                bounds[start:end, 0, size:], bounds[start:end, 1, size:] = size, width
            start = end
        return block, whole_targets, bounds, rows

    def identity(self, known: Any = None) -> dict[str, Any]:
        """{"sources": [the identity of each]}."""
        stored = self._each(known)
        return {"sources": [part.identity(one) for part, one in zip(self.sources, stored, strict=True)]}

    def changed(self, stored: Any, now: dict[str, Any]) -> str | None:
        """The name of a source that is not what it was, or None."""
        places = zip(self.sources, self._each(stored), now["sources"], strict=True)
        return next((name for part, one, new in places if (name := part.changed(one, new)) is not None), None)

    def _each(self, stored: Any) -> list[Any]:
        """The identities of the sources in that of a mixture; None where it is another one's."""
        found = stored.get("sources") if isinstance(stored, dict) else None
        return found if isinstance(found, list) and len(found) == len(self.sources) else [None] * len(self.sources)


def _open_mixture(sources: list[tuple[str, str]], tokenizer: Tokenizer | None, val_fraction: float) -> Mixture:
    names = [name for name, _ in sources]
    opened = {name: open_source(name, tokenizer, val_fraction) for name in names if holds_tokens(name)}
    known = [part.tokenizer for part in opened.values() if part.tokenizer is not None]
    for name in names:
        if name not in opened:  # texts are encoded as the tokens are
            opened[name] = open_source(name, tokenizer or next(iter(known), None), val_fraction)
    parts = [opened[name] for name in names]
    _check_one_tokenizer(parts)
    made = [part.tokenizer for part in parts if part.tokenizer is not None]
    shares = shares_of(sources)
    bytes_of = [part.bytes_per_token for part in parts]
    mean = sum(float(share) * (size or 0.0) for share, size in zip(shares, bytes_of, strict=True))

    return Mixture(
        f"a mixture of {len(parts)} sources",
        [segment for part in parts for segment in part.train],
        [segment for part in parts for segment in part.val],
        mean if all(bytes_of) else None,
        max(part.vocab_size for part in parts),
        with_template(*made) if made else None,
        [mask for part in parts for mask in part.train_masks or [None] * len(part.train)],
        [mask for part in parts for mask in part.val_masks or [None] * len(part.val)],
        sources=parts,
        exact_shares=shares,
    )


def _check_one_tokenizer(parts: list[Corpus]) -> None:
    first = parts[0]
    for part in parts[1:]:
        if first.tokenizer is None or part.tokenizer is None:
            if first.tokenizer is not part.tokenizer:
                unknown, known = (first, part) if first.tokenizer is None else (part, first)
                raise DataError(
                    f"data: {unknown.name} does not say which tokenizer made it, and {known.name} has one; "
                    "give --tokenizer"
                )
        elif not same_tokenizer(first.tokenizer, part.tokenizer):
            raise DataError(f"data: {first.name} and {part.name} were made by different tokenizers")
