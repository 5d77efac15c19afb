"""Rows packed with whole documents: which lie in a row, and the shuffled batches of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .. import _C
from .._C import Tensor
from .._types import as_int
from ..errors import DataError
from ..tensors.documents import bounds_of
from .file_array import Segment
from .loader import IGNORED, check_batch, check_masks, check_tokens, permute, position_of

CHUNK = 1024  # documents that are packed together; more waste less, and repeat more work after a resume


class Documents:
    """The documents of tokens [begin, end) of an array: starts, in order, says where each of the array begins, an array
    [documents] or None. What lies before the first start is a document, too.
    """

    def __init__(self, starts: Any | None, begin: int, end: int) -> None:
        self._starts, self._begin, self._end = starts, begin, end
        self._first = 0 if starts is None else _first_above(starts, begin)
        self._count = 1 if starts is None else _first_above(starts, end - 1) - self._first + 1

    def __len__(self) -> int:
        return self._count if self._end > self._begin else 0

    def bounds(self, first: int, last: int) -> np.ndarray:
        """Where documents first ... last - 1 begin, and where the last of them ends: int64 [last - first + 1], counted
        from `begin`.
        """
        inner: list[int] = []
        if self._starts is not None:
            from_, to = self._first + max(first, 1) - 1, self._first + min(last, self._count - 1)
            inner = [int(start) for start in self._starts[from_:to]] if to > from_ else []
        edges = ([self._begin] if first == 0 else []) + inner + ([self._end] if last == self._count else [])
        return np.asarray(edges, np.int64) - self._begin

    def rows(self, start: int, length: int) -> np.ndarray:
        """Of tokens start ... start + length - 1, counted from `begin`, the bounds int32 [2, length] as attention takes
        them: counted from `start`, and cut there and at the end.
        """
        edges = [0, length]
        if self._starts is not None:
            first = _first_above(self._starts, self._begin + start)
            last = _first_above(self._starts, self._begin + start + length - 1)
            inner = np.asarray(self._starts[first:last], np.int64) if last > first else np.zeros(0, np.int64)
            edges = [0, *(inner - self._begin - start).tolist(), length]
        return bounds_of(np.diff(edges))


def _first_above(starts: Any, token: int) -> int:
    """The number of starts at `token` or before it; starts are in order, and are read one by one."""
    low, high = 0, len(starts)
    while low < high:
        middle = (low + high) // 2
        if int(starts[middle : middle + 1][0]) <= token:
            low = middle + 1
        else:
            high = middle
    return low


def best_fit(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Bins of `room`, each a list of places in `sizes`: the largest first, each into the fullest bin that has room for
    it (best fit decreasing, Johnson 1974: at most 11/9 of the fewest bins, and 4). sizes: 1 to room.
    """
    bins: list[list[int]] = []
    open_: dict[int, list[int]] = {}  # room that is left -> bins
    lefts = 0  # bit r: some bin has r left
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        size = sizes[place]
        fitting = lefts >> size
        if fitting:
            left = size + (fitting & -fitting).bit_length() - 1
            number = open_[left].pop()
            if not open_[left]:
                lefts ^= 1 << left
        else:
            left, number = room, len(bins)
            bins.append([])
        bins[number].append(place)
        left -= size
        if left:
            open_.setdefault(left, []).append(number)
            lefts |= 1 << left
    return bins


class PackedLoader:
    """Endless batches of rows that hold whole documents, each document once per epoch.

    A document of L tokens takes L - 1 places of a row: each of its tokens is read but the last, which is only learned.
    One of more places than a row is cut: row after row reads on where the last one ended, as windows do, and sees
    nothing of the parts before; the rest shares its row with others. Documents of one token are left out.

    The documents of an epoch are drawn without replacement. CHUNK of them at a time are packed, best fit decreasing,
    and the rows of a chunk are drawn without replacement, too. So the order is a function of (seed, epoch), and the
    position is three numbers. segments, masks and errors: as of Loader. documents: for each segment where its documents
    lie.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        documents: Sequence[Documents],
        batch_size: int,
        seq_len: int,
        seed: int = 0,
        vocab_size: int | None = None,
        name: str = "data",
        masks: Sequence[Segment | None] | None = None,
    ) -> None:
        check_batch(batch_size, seq_len)
        check_masks(segments, masks, name)
        self._segments, self._documents = segments, documents
        self._masks = masks or [None] * len(segments)
        self._ends = np.cumsum([len(part) for part in documents], dtype=np.int64)
        self._vocab, self._name = vocab_size, name
        self.batch_size, self.seq_len, self.seed = batch_size, seq_len, as_int("data", "seed", seed)
        self.documents = int(self._ends[-1]) if len(documents) else 0
        self.chunks = -(-self.documents // CHUNK)
        self.epoch = self.chunk = self.row = 0
        self.filled = 0  # places of the last batch that hold a token of a document
        self._packed: tuple[tuple[int, int], list[list[tuple[int, int, int]]]] | None = None
        if not any(self._rows(0, chunk) for chunk in range(self.chunks)):
            raise DataError(f"data: {name} must have a document of at least 2 tokens, got {self.documents} documents")

    def _rows(self, epoch: int, chunk: int) -> list[list[tuple[int, int, int]]]:
        """The rows of a chunk, in the order of training: (segment, first token, places) of what each holds."""
        if self._packed is not None and self._packed[0] == (epoch, chunk):
            return self._packed[1]
        numbers = np.arange(chunk * CHUNK, min((chunk + 1) * CHUNK, self.documents))
        pieces: list[tuple[int, int, int]] = []
        for number in permute(numbers, self.documents, self.seed, epoch):
            part = int(np.searchsorted(self._ends, number, side="right"))
            place = int(number) - (int(self._ends[part - 1]) if part else 0)
            start, end = map(int, self._documents[part].bounds(place, place + 1))
            cuts = range(start, end - 1, self.seq_len)
            pieces.extend((part, cut, min(self.seq_len, end - 1 - cut)) for cut in cuts)
        bins = best_fit([places for _, _, places in pieces], self.seq_len)
        order = permute(np.arange(len(bins)), len(bins), self.seed + chunk + 1, epoch) if bins else []
        rows = [[pieces[place] for place in bins[number]] for number in order]
        self._packed = (epoch, chunk), rows
        return rows

    def _next_row(self) -> list[tuple[int, int, int]]:
        while self.row >= len(rows := self._rows(self.epoch, self.chunk)):
            self.chunk, self.row = self.chunk + 1, 0
            if self.chunk == self.chunks:
                self.epoch, self.chunk = self.epoch + 1, 0
        self.row += 1
        return rows[self.row - 1]

    def next_batch(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (ids, targets, documents): int64 [batch_size, seq_len] twice and int32 [batch_size, 2, seq_len], as
        attention takes them. Targets are the ids one position later in the document, and IGNORED where the masks say
        so. What is left of a row is zeros whose targets are IGNORED, in documents no longer than the row's longest, so
        that attention spends no more on a place there.
        """
        return self.rows(self.batch_size)

    def rows(self, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As next_batch, for the next `count` rows. The rows do not depend on how batches cut them."""
        ids = np.zeros((count, self.seq_len), np.int64)
        targets = np.full_like(ids, IGNORED)
        bounds = np.empty((count, 2, self.seq_len), np.int32)
        self.filled = 0
        for row in range(count):
            at, lengths = 0, []
            for part, start, places in self._next_row():
                tokens = np.asarray(self._segments[part][start : start + places + 1], np.int64)
                check_tokens(tokens, self._vocab, self._name, part, start)
                ids[row, at : at + places], targets[row, at : at + places] = tokens[:-1], tokens[1:]
                if (mask := self._masks[part]) is not None:
                    targets[row, at : at + places][mask[start + 1 : start + places + 1] == 0] = IGNORED
                lengths.append(places)
                at += places
            self.filled += at
            whole, rest = divmod(self.seq_len - at, max(lengths))
            bounds[row] = bounds_of([*lengths, *[max(lengths)] * whole, rest])
        return ids, targets, bounds

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield batches (ids, targets, documents) as tensors on the CPU, without end."""
        while True:
            ids, targets, bounds = self.next_batch()
            yield _C.from_numpy(ids), _C.from_numpy(targets), _C.from_numpy(bounds)

    def efficiency(self) -> float:
        """The share of the places of rows that hold a token of a document, over the chunk of documents under way."""
        rows = self._rows(self.epoch, self.chunk)
        return sum(places for row in rows for _, _, places in row) / max(len(rows) * self.seq_len, 1)

    @property
    def epochs(self) -> float:
        """Times that each document has been drawn, so far; of a chunk the part of its rows."""
        part = self.row / max(len(self._rows(self.epoch, self.chunk)), 1)
        return self.epoch + (self.chunk + part) / self.chunks

    def metrics(self) -> dict[str, float]:
        """What the loader adds to the metrics of a step: the share of the last batch's places that hold a token."""
        return {"token_efficiency": round(self.filled / (self.batch_size * self.seq_len), 4)}

    def state_dict(self) -> dict[str, int]:
        """Return the position as {"epoch", "chunk", "row"}."""
        return {"epoch": self.epoch, "chunk": self.chunk, "row": self.row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a position of state_dict(). DataError for another position, and for one outside the data."""
        epoch, chunk, row = position_of(state, "epoch", "chunk", "row")
        if epoch < 0 or not 0 <= chunk < self.chunks or not 0 <= row <= len(self._rows(epoch, chunk)):
            raise DataError(
                f"data: the position must be inside the data ({self.chunks} chunks of {CHUNK} documents), "
                f"got epoch {epoch}, chunk {chunk}, row {row}"
            )
        self.epoch, self.chunk, self.row = epoch, chunk, row
