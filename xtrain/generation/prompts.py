"""Prompts of a batch: token ids of one length, or of several."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import _C

_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


class Prompts:
    """Token ids that the rows of a batch begin with.

    tokens: int64 [B, S], each row at the right end, `pad` before it. starts: int64 [B], the column where each begins.
    one: whether a single row without a batch was given. device: of the ids.
    """

    def __init__(self, ids: Any, mask: Any = None, pad: int = 0) -> None:
        self.device: Any = ids.device if isinstance(ids, _C.Tensor) else "cpu"
        if isinstance(ids, (list, tuple)) and len({_length(row) for row in ids}) > 1:
            if mask is not None:
                lengths = [_length(row) or 0 for row in ids]
                raise ValueError(
                    f"generate: ids must have rows of one length with an attention_mask, got {lengths[:16]}"
                )
            self.tokens, self.starts = _of_rows(ids, pad)
            self.one = False
            return
        tokens = token_ids(ids)
        self.one = tokens.ndim == 1
        self.tokens = tokens.reshape(-1, tokens.shape[-1])
        self.starts = np.zeros(len(self.tokens), np.int64)
        if mask is not None:
            self._take_mask(mask, tokens.shape)

    @property
    def ragged(self) -> bool:
        """Whether lengths differ."""
        return bool((self.starts != self.starts[:1]).any())

    def without_pads(self) -> np.ndarray:
        """The tokens, with the first one of a row in the place of what is before it."""
        rows, width = len(self.tokens), self.tokens.shape[-1]
        first = self.tokens[np.arange(rows), self.starts][:, None]
        return np.where(np.arange(width) < self.starts[:, None], first, self.tokens)

    def _take_mask(self, mask: Any, shape: tuple[int, ...]) -> None:
        seen = mask.cpu().numpy() if isinstance(mask, _C.Tensor) else _array("attention_mask", mask)
        if seen.shape != shape:
            raise ValueError(f"generate: attention_mask must have the shape of ids {shape}, got {seen.shape}")
        if not np.isin(seen, (0, 1)).all():
            raise ValueError("generate: attention_mask must be 1 for tokens and 0 for padding, got other values")
        seen = seen.reshape(self.tokens.shape).astype(bool)
        rows, width = len(seen), shape[-1]
        counts, first = seen.sum(1), seen.argmax(1)
        for row in range(rows):
            if not counts[row] or not seen[row, first[row] : first[row] + counts[row]].all():
                text = "".join(map(str, seen[row].astype(int).tolist()))
                rule = "attention_mask must have the tokens of a row side by side, at least one"
                raise ValueError(f"generate: {rule}, got {text if width <= 64 else text[:64] + '...'} in row {row}")
        self.starts = (width - counts).astype(np.int64)
        moved = self.tokens.copy()
        for row, (count, at) in enumerate(zip(counts, first, strict=True)):
            pads = np.delete(self.tokens[row], np.s_[at : at + count])
            moved[row] = np.concatenate([pads, self.tokens[row, at : at + count]])
        self.tokens = moved


def _length(row: Any) -> int | None:
    """The number of tokens of a value that can be a row; None for a number, which cannot."""
    return len(row) if hasattr(row, "__len__") and getattr(row, "ndim", 1) else None


def _of_rows(ids: list[Any] | tuple[Any, ...], pad: int) -> tuple[np.ndarray, np.ndarray]:
    rows = []
    for number, row in enumerate(ids):
        if _length(row) == 0:
            raise ValueError(f"generate: ids must have at least one token in every row, got none in row {number}")
        tokens = token_ids(row)
        if tokens.ndim != 1:
            raise ValueError(f"generate: ids must be rows of token ids, got shape {tokens.shape} in row {number}")
        rows.append(tokens)
    width = max(map(len, rows))
    out = np.full((len(rows), width), pad, np.int64)
    for row, tokens in zip(out, rows, strict=True):
        row[width - len(tokens) :] = tokens
    return out, np.array([width - len(tokens) for tokens in rows], np.int64)


def _array(name: str, given: Any) -> np.ndarray:
    """What NumPy makes of a value. ValueError for lists in which some elements are lists, or of other lengths."""
    try:
        return np.asarray(given)
    except ValueError:
        raise ValueError(f"generate: {name} must be lists of one length, of numbers alone, got others") from None


def token_ids(ids: Any) -> np.ndarray:
    """ids, a tensor or what NumPy makes an array of, as an int64 array [S] or [B, S]."""
    if isinstance(ids, (str, bytes)):
        raise TypeError(f"generate: ids must be token ids, got {type(ids).__name__}: a tokenizer's encode makes them")
    ids = ids if isinstance(ids, _C.Tensor) else _array("ids", ids)
    if ids.ndim not in (1, 2) or ids.shape[-1] == 0:
        raise ValueError(f"generate: ids must have shape (S,) or (B, S) with S >= 1, got {tuple(ids.shape)}")
    if ids.dtype.name not in _INTEGERS:
        raise TypeError(f"generate: ids must have an integer dtype, got {ids.dtype.name}")
    if ids.dtype.name == "uint64" and (most := int(ids.max(initial=0))) >= 2**63:
        raise ValueError(f"generate: ids must be below 2^63, got {most}")
    return ids.to(_C.int64).cpu().numpy() if isinstance(ids, _C.Tensor) else ids.astype(np.int64)
