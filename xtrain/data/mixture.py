"""Several sources at once: their weights, which source a row comes from, and the batches of a run.

Row n of a run, counted over all batches, comes from a source that n and the weights decide. Each source draws its own
rows without replacement, epoch after epoch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from .. import _C
from .._C import Tensor
from ..errors import DataError, shown
from .loader import Loader
from .packing import PackedLoader

_WEIGHT = "a number greater than 0, at most 1e300"
_MOST = 1e300
_LONGEST = 40  # characters of a weight: a number of thousands of digits would cost as much in each row


def parse_sources(text: str) -> list[tuple[str, str]] | None:
    """The sources of `a.tokens:0.7,b.tokens:0.3` and their weights, as text; None where `text` is one source. A path
    that exists is one, whatever its name.

    DataError for a source without a weight or named twice, and a weight that is not in (0, 1e300].
    """
    parts = [part.strip().rpartition(":") for part in text.split(",")]
    weighted = any(colon and "/" not in weight for _, colon, weight in parts)
    if not weighted or os.path.exists(text):
        return None
    found: dict[str, tuple[str, str]] = {}
    for name, colon, weight in parts:
        if not name or not colon or "/" in weight:
            whole = name + colon + weight
            raise DataError(f"data: a source must be followed by : and its weight (a.tokens:0.7), got {shown(whole)}")
        name, weight = name.strip(), weight.strip()
        try:
            good = len(weight) <= _LONGEST and "_" not in weight and 0.0 < float(weight) <= _MOST
        except ValueError:
            good = False
        if not good:
            raise DataError(f"data: the weight of {name} must be {_WEIGHT}, got {shown(weight)}")
        place = name if name == "python" else os.path.realpath(name)
        if place in found:
            raise DataError(f"data: {name} must be named once, with the sum of its weights")
        found[place] = name, weight
    return list(found.values())


def sources_text(sources: Mapping[Any, Any]) -> str:
    """The text of {source: weight}, as parse_sources reads it. DataError for what it could not read."""
    if not sources:
        raise DataError("data: a table of sources must have one, got none")
    parts: list[str] = []
    for source, weight in sources.items():
        name = os.fspath(source) if isinstance(source, os.PathLike) else source
        if not isinstance(name, str) or "," in name:
            raise DataError(f"data: the name of a source must be text without a comma, got {shown(name)}")
        if isinstance(weight, Mapping):
            raise DataError(f"data: the weight of {name} must be a number, got a table; quote a name that has dots")
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight <= _MOST:
            raise DataError(f"data: the weight of {name} must be {_WEIGHT}, got {shown(weight)}")
        parts.append(f"{name}:{weight!r}")
    return ",".join(parts)


def shares_of(sources: Sequence[tuple[str, str]]) -> list[Fraction]:
    """The weights by their sum, exactly as they are written."""
    weights = [Fraction(weight) for _, weight in sources]
    return [weight / sum(weights) for weight in weights]


def labels_of(names: Sequence[str]) -> list[str]:
    """What metrics call sources: the last parts of their paths, or all of a path where these are not distinct."""
    last = [os.path.basename(os.path.normpath(name)) for name in names]
    return [short if last.count(short) == 1 else name for short, name in zip(last, names, strict=True)]


class Turns:
    """Which source each row comes from. rows: how many each has had.

    After n rows, source i of share s_i has had s_i n rows, and less than one more or fewer, whatever n: Tijdeman, "The
    chairman assignment problem", 1980. Of the sources that may have row n (s_i n - rows_i >= 1 / (2 k - 2), k sources)
    it goes to the one that has to have it soonest; then the difference is at most 1 - 1 / (2 k - 2). All numbers are
    whole: nothing is rounded, so that a run of any length has the same order everywhere.
    """

    def __init__(self, shares: Sequence[Fraction]) -> None:
        self._all = math.lcm(*(share.denominator for share in shares))
        self._parts = [int(share * self._all) for share in shares]  # s_i = parts_i / all
        self.rows = [0] * len(shares)

    def draw(self, count: int) -> np.ndarray:
        """The sources of the next rows, int64 [count]."""
        found = np.zeros(count, np.int64)
        d = max(2 * len(self._parts) - 2, 1)
        number = sum(self.rows)
        for place in range(count):
            number += 1
            best, best_left = -1, 0
            for i, part in enumerate(self._parts):
                due = d * (part * number - self._all * self.rows[i])
                left = (d - 1) * self._all - due  # by part: rows until it must have had another one
                if due >= self._all and (best < 0 or left * self._parts[best] < best_left * part):
                    best, best_left = i, left
            self.rows[best] += 1
            found[place] = best
        return found

    def shares(self) -> list[float]:
        """The share of each source."""
        return [part / self._all for part in self._parts]

    def reachable(self, rows: Sequence[int]) -> bool:
        """Whether the sources can have had these rows, whole numbers of at least 0."""
        number = sum(rows)
        pairs = zip(self._parts, rows, strict=True)
        return all(abs(part * number - self._all * row) < self._all for part, row in pairs)


class MixedLoader:
    """Endless batches of a mixture: rows of several loaders, all Loader or all PackedLoader, in the order of `Turns`.

    names: what metrics call the sources. The position is that of each loader and the rows that it has given, so it is
    right in any batch size and after any number of epochs of one of them.
    """

    def __init__(
        self, loaders: Sequence[Loader | PackedLoader], shares: Sequence[Fraction], names: Sequence[str]
    ) -> None:
        self.loaders, self.names = list(loaders), list(names)
        self.batch_size = self.loaders[0].batch_size
        self._turns = Turns(shares)
        self._tokens = [0] * len(self.loaders)  # places of rows that hold a token of a document
        self._filled = 0

    def next_batch(self) -> tuple[np.ndarray, ...]:
        """As of the loaders: (ids, targets), with `pack` (ids, targets, documents)."""
        sources = self._turns.draw(self.batch_size)
        batch: list[np.ndarray] = []
        self._filled = 0
        for i, loader in enumerate(self.loaders):
            mine = np.flatnonzero(sources == i)
            if not len(mine):
                continue
            rows = loader.rows(len(mine))
            batch = batch or [np.empty((self.batch_size, *part.shape[1:]), part.dtype) for part in rows]
            for whole, part in zip(batch, rows, strict=True):
                whole[mine] = part
            filled = loader.filled if isinstance(loader, PackedLoader) else rows[0].size
            self._tokens[i] += filled
            self._filled += filled
        return tuple(batch)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        """Yield batches as tensors on the CPU, without end."""
        while True:
            yield tuple(map(_C.from_numpy, self.next_batch()))

    @property
    def documents(self) -> int:
        """Documents of all sources."""
        return sum(loader.documents for loader in self.loaders if isinstance(loader, PackedLoader))

    def efficiency(self) -> float:
        """PackedLoader.efficiency, averaged over the rows of the mixture."""
        shares = self._turns.shares()
        packed = [loader for loader in self.loaders if isinstance(loader, PackedLoader)]
        return sum(share * loader.efficiency() for share, loader in zip(shares, packed, strict=True))

    def metrics(self) -> dict[str, float]:
        """What the loader adds to the metrics of a step: tokens and epochs of each source so far."""
        found: dict[str, float] = {}
        for name, tokens, loader in zip(self.names, self._tokens, self.loaders, strict=True):
            found[f"tokens/{name}"] = tokens
            found[f"epochs/{name}"] = round(loader.epochs, 4)
        if isinstance(self.loaders[0], PackedLoader):
            found["token_efficiency"] = round(self._filled / (self.batch_size * self.loaders[0].seq_len), 4)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the position as {"rows", "tokens", "sources"}, lists with an entry for each source."""
        sources = [loader.state_dict() for loader in self.loaders]
        return {"rows": list(self._turns.rows), "tokens": list(self._tokens), "sources": sources}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position of state_dict(). DataError, with the loader where it was, for one that a
        mixture of these weights never has, or that is outside the data of a source.
        """
        lists = [state.get(name) for name in ("rows", "tokens", "sources")] if isinstance(state, Mapping) else [None]
        if not all(isinstance(entries, (list, tuple)) for entries in lists):
            raise DataError(
                f"data: the position must have rows, tokens and sources, an entry for each source, got {shown(state)}"
            )
        rows, tokens, sources = list(state["rows"]), list(state["tokens"]), list(state["sources"])
        whole = all(type(number) is int and number >= 0 for number in [*rows, *tokens])
        if not whole or not len(rows) == len(tokens) == len(sources) == len(self.loaders):
            raise DataError(f"data: the position must be that of {len(self.loaders)} sources, got {shown(state)}")
        if not self._turns.reachable(rows):
            raise DataError(f"data: the position must be one of these weights, got {rows} rows of the sources")
        before = [loader.state_dict() for loader in self.loaders]
        try:
            for loader, source in zip(self.loaders, sources, strict=True):
                loader.load_state_dict(source)
        except BaseException:
            for loader, source in zip(self.loaders, before, strict=True):
                loader.load_state_dict(source)
            raise
        self._turns.rows, self._tokens = rows, tokens
