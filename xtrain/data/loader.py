"""Windows of segments, and the shuffled batches of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .. import _C
from .._C import Tensor
from .._types import as_int
from ..errors import DataError, shown
from .file_array import Segment

IGNORED = -100  # a target that no loss counts


def check_tokens(tokens: np.ndarray, vocab_size: int | None, name: str, part: int, start: int) -> None:
    """DataError where tokens, those from position `start` of a segment on, have an id outside the vocabulary."""
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or (vocab_size is not None and high >= vocab_size):
        bad = low if low < 0 else high
        position = start + int(np.flatnonzero(tokens == bad)[0])
        raise DataError(
            f"data: token ids of {name} must be in [0, {vocab_size}), got {bad} at position {position} of piece {part}"
        )


def check_size(name: str, size: int) -> None:
    """DataError for a size below 1, TypeError for one that is no integer."""
    if as_int("data", name, size) < 1:
        raise DataError(f"data: {name} must be at least 1, got {size}")


def check_batch(batch_size: int, seq_len: int) -> None:
    """DataError for a batch of nothing, and for one that cannot be held: gathered row by row, it would fill the memory
    for hours first.
    """
    check_size("batch_size", batch_size)
    check_size("seq_len", seq_len)
    try:
        np.empty((batch_size, seq_len + 1), np.int64)
    except (MemoryError, ValueError):
        raise DataError(
            f"data: a batch of {batch_size} x {seq_len} tokens (batch_size x seq_len) does not fit into memory"
        ) from None


def position_of(state: Any, *names: str) -> list[int]:
    """The whole numbers `names` of a position of state_dict(). DataError for what has others: another kind of loader's,
    or a damaged one.
    """
    try:
        return [as_int("data", name, state[name]) for name in names]
    except (KeyError, TypeError):
        entries = f"{', '.join(names[:-1])} and {names[-1]}"
        raise DataError(f"data: the position must have {entries}, whole numbers, got {shown(state)}") from None


def check_masks(segments: Sequence[Segment], masks: Sequence[Segment | None] | None, name: str) -> None:
    """DataError for masks of another number than the segments, or one of another length than its segment."""
    if not masks:
        return
    if len(masks) != len(segments):
        raise DataError(f"data: masks of {name} must be {len(segments)}, one a piece or None, got {len(masks)}")
    for place, (segment, mask) in enumerate(zip(segments, masks, strict=True)):
        if mask is not None and len(mask) != len(segment):
            raise DataError(
                f"data: the mask of piece {place} of {name} must have {len(segment)} entries, one a token, "
                f"got {len(mask)}"
            )


class Windows:
    """Every window of seq_len + 1 tokens that starts at a multiple of seq_len of its segment, an array [tokens].

    masks: for each segment an array [tokens] that is 0 where a token is no target, or None where every one is.
    DataError when there is no window, for a seq_len below 1 and for masks that do not fit.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        seq_len: int,
        name: str = "data",
        vocab_size: int | None = None,
        masks: Sequence[Segment | None] | None = None,
    ) -> None:
        check_size("seq_len", seq_len)
        check_masks(segments, masks, name)
        self.seq_len = seq_len
        self._name, self._vocab = name, vocab_size
        kept = [place for place, segment in enumerate(segments) if len(segment) > seq_len]
        self._kept, self._segments = kept, [segments[place] for place in kept]
        self._masks = [masks[place] if masks else None for place in kept]
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

    def _places(self, indices: np.ndarray) -> Iterator[tuple[int, int]]:
        """(number of the segment, first token in it) of each window."""
        which = np.searchsorted(self._ends, indices, side="right")
        for index, part in zip(indices, which, strict=True):
            yield int(part), (int(index) - (int(self._ends[part - 1]) if part else 0)) * self.seq_len

    def gather(self, indices: np.ndarray) -> np.ndarray:
        """Return windows `indices` as int64 [len(indices), seq_len + 1].

        DataError, with its position, for a token id outside the vocabulary.
        """
        out = np.empty((len(indices), self.seq_len + 1), np.int64)
        for row, (part, start) in enumerate(self._places(indices)):
            out[row] = self._segments[part][start : start + self.seq_len + 1]
            check_tokens(out[row], self._vocab, self._name, part, start)
        return out

    def documents(self, indices: np.ndarray, documents: Sequence[Any]) -> np.ndarray:
        """The bounds of the documents in windows `indices`, int32 [len(indices), 2, seq_len + 1]; documents: a
        packing.Documents for each segment.
        """
        kept = [documents[place] for place in self._kept]
        return np.stack([kept[part].rows(start, self.seq_len + 1) for part, start in self._places(indices)])

    def targets(self, indices: np.ndarray, block: np.ndarray) -> np.ndarray:
        """The targets in `block`, what `gather` returned for these windows, as int64 [len(indices), seq_len]: the
        tokens one position later, and IGNORED in the place of those that the masks leave out.
        """
        found = block[:, 1:].copy()  # of one row that is contiguous already, and would stay a view
        if any(mask is not None for mask in self._masks):
            for row, (part, start) in enumerate(self._places(indices)):
                if (mask := self._masks[part]) is not None:
                    found[row][mask[start + 1 : start + self.seq_len + 1] == 0] = IGNORED
        return found


class Loader:
    """Endless batches of training windows, shuffled without replacement: every window once per epoch.

    segments: arrays of token ids [tokens]; masks: as of Windows. The order is a function of (seed, epoch) that needs no
    memory, and the position is two numbers, so a checkpoint continues exactly. DataError when no segment has
    seq_len + 1 tokens, a size is below 1, a batch does not fit into memory, or a mask does not fit its segment.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        batch_size: int,
        seq_len: int,
        seed: int = 0,
        vocab_size: int | None = None,
        name: str = "data",
        masks: Sequence[Segment | None] | None = None,
    ) -> None:
        check_batch(batch_size, seq_len)
        self.windows = Windows(segments, seq_len, name, vocab_size, masks)
        self.batch_size, self.seed = batch_size, as_int("data", "seed", seed)
        self.epoch = 0
        self.index = 0  # windows of this epoch already used

    def next_batch(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids, targets), each int64 [batch_size, seq_len]; targets are the ids one position later, and IGNORED
        where the masks say so.
        """
        return self.rows(self.batch_size)

    def rows(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """As next_batch, for the next `count` rows, at least one. The rows do not depend on how batches cut them."""
        parts, wanted, total = [], count, len(self.windows)
        while wanted:
            take = min(wanted, total - self.index)
            parts.append(permute(np.arange(self.index, self.index + take), total, self.seed, self.epoch))
            self.index += take
            wanted -= take
            if self.index == total:
                self.epoch, self.index = self.epoch + 1, 0
        indices = np.concatenate(parts)
        block = self.windows.gather(indices)
        return np.ascontiguousarray(block[:, :-1]), self.windows.targets(indices, block)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches (ids, targets) as int64 tensors [batch_size, seq_len] on the CPU, without end."""
        while True:
            ids, targets = self.next_batch()
            yield _C.from_numpy(ids), _C.from_numpy(targets)

    @property
    def epochs(self) -> float:
        """Times that each window has been drawn, so far."""
        return self.epoch + self.index / len(self.windows)

    def metrics(self) -> dict[str, float]:
        """What the loader adds to the metrics of a step: nothing."""
        return {}

    def state_dict(self) -> dict[str, int]:
        """Return the position as {"epoch", "index"}."""
        return {"epoch": self.epoch, "index": self.index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a position of state_dict(). DataError for another position, and for one outside the data."""
        epoch, index = position_of(state, "epoch", "index")
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
