"""Rows that hold several documents: where each begins and ends, and what a query of attention sees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .. import _C
from .._types import Device
from ..errors import shown

_Tensor = _C.Tensor
_MOST_TOKENS = 2**31 - 1  # of a row: bounds are int32


def document_bounds(lengths: Sequence[Sequence[int]], *, device: Device = None) -> _Tensor:
    """For each row the lengths of its documents, in order -> int32 [B, 2, S]: for each token the first token of its
    document, and the one behind its last. What `documents` is in attention, and in the loss of a model.

    The shape does not depend on the documents, so a captured step takes other ones each time. Cumulative lengths (0, 3,
    8, as flash-attention's varlen functions take them) are the same as the lengths (3, 5). ValueError for a length
    below 1, rows of different sums or of more than 2**31 - 1 tokens, and no row; TypeError for what is not a sequence
    of integers.
    """
    if not isinstance(lengths, Iterable):
        raise TypeError(f"document_bounds: lengths must be a sequence of rows, got {type(lengths).__name__}")
    rows: list[np.ndarray] = []
    for row, given in enumerate(lengths):
        sizes = _integers(given)
        if sizes is None:
            raise TypeError(
                f"document_bounds: lengths of row {row} must be a sequence of integers, got {shown(given, 80)}"
            )
        if not sizes.size:
            raise ValueError(f"document_bounds: lengths of row {row} must hold at least one, got none")
        if sizes.min() < 1:
            raise ValueError(f"document_bounds: lengths of row {row} must be at least 1, got {sizes.min()}")
        total = sum(map(int, sizes))
        if total > _MOST_TOKENS:
            raise ValueError(f"document_bounds: lengths of row {row} must sum to at most 2**31 - 1, got {total}")
        rows.append(bounds_of(sizes))
    if not rows:
        raise ValueError("document_bounds: lengths must have a row, got none")
    for row, bounds in enumerate(rows):
        if bounds.shape != rows[0].shape:
            raise ValueError(
                f"document_bounds: lengths of row {row} must sum to {rows[0].shape[1]}, as those of row 0, got "
                f"{bounds.shape[1]}"
            )
    return _C.tensor(np.stack(rows), device=_C.get_default_device() if device is None else device)


def _integers(given: Any) -> np.ndarray | None:
    """A sequence of integers, perhaps of none, as an array; None for what is no such sequence."""
    try:
        sizes = np.asarray(given)
    except (TypeError, ValueError):  # sequences of several lengths
        return None
    if sizes.ndim != 1 or (sizes.size and sizes.dtype.kind not in "iu"):
        return None
    if not isinstance(given, np.ndarray) and any(isinstance(one, (bool, np.bool_)) for one in given):
        return None  # beside an integer NumPy takes it for one
    return sizes


def bounds_of(lengths: Any) -> np.ndarray:
    """The bounds int32 [2, S] of a row: documents of these lengths, one behind the other."""
    lengths = np.asarray(lengths, np.int64)
    ends = np.cumsum(lengths)
    return np.repeat(np.stack([ends - lengths, ends]), lengths, 1).astype(np.int32)


def check_bounds(op: str, documents: Any, batch: int, tokens: int, *, name: str, device: Any) -> None:
    """TypeError or ValueError where documents are no int32 [batch, 2, tokens] on the device of the argument `name`."""
    if not isinstance(documents, _Tensor):
        raise TypeError(f"{op}: documents must be a Tensor, got {type(documents).__name__}")
    if documents.dtype != _C.int32:
        raise TypeError(f"{op}: documents must have dtype int32, got {documents.dtype.name}")
    if tuple(documents.shape) != (batch, 2, tokens):
        raise ValueError(f"{op}: documents must have shape {(batch, 2, tokens)}, got {tuple(documents.shape)}")
    if documents.device != device:
        raise ValueError(f"{op}: documents must be on the device of {name}, {device}, got {documents.device}")


def check_rows(documents: _Tensor) -> None:
    """Checks documents of the shape of check_bounds before positions or composed attention read them: ValueError where
    they do not fill each row one behind the other, on a GPU at the next wait. It is not an op, so hooks are not called.
    In a capture an op must take the same documents, which keeps their memory for the replays.
    """
    _C.check_documents(documents)


def positions_in(documents: _Tensor) -> _Tensor:
    """The place of each token in its document: documents [B, 2, S] -> int64 [B * S]."""
    starts = _C.select(documents, 1, 0)
    places = _C.arange(0, documents.shape[2], 1, _C.int64, documents.device)
    return (places - _C.cast(starts, _C.int64)).reshape(-1)


def sees(
    queries: int,
    keys: int,
    is_causal: bool,
    documents: _Tensor | None,
    window: int | None,
    device: Any,
    first: int = 0,
    last: int | None = None,
) -> _Tensor:
    """Whether a query sees a key, bool [queries, keys], or [B, 1, queries, keys] with documents: the intervals of
    csrc/contract/attention.h. first, last: of queries [first, last) alone.
    """
    last = queries if last is None else last
    place = (_C.arange(first, last, 1, _C.int64, device) + (keys - queries)).unsqueeze(1)
    key = _C.arange(0, keys, 1, _C.int64, device)
    seen = (key <= place) if is_causal else (key >= 0).unsqueeze(0).expand(last - first, keys)
    if window is not None:
        seen = seen & (key > place - window)
    if documents is not None:
        starts, ends = (_C.select(documents, 1, i)[:, first:last].unsqueeze(1).unsqueeze(-1) for i in (0, 1))
        seen = seen & (key >= starts) & (key < ends)
    return seen
