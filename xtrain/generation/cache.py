"""Keys and values of the positions seen so far."""

from __future__ import annotations

from .. import _C
from .._C import Tensor


class KVCache:
    """Keys and values of the positions seen so far: two tensors [B, K, length, D] that fill up from the front.

    shape: (B, K, length, D). used: positions stored.
    """

    def __init__(self, shape: tuple[int, int, int, int], dtype: _C.dtype, device: _C.device) -> None:
        self.key = _C.empty(shape, dtype, device)
        self.value = _C.empty(shape, dtype, device)
        self.used = 0

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Stores key and value [B, K, S, D] behind the others; returns views of everything stored.

        ValueError when they do not fit; RuntimeError while recording, because gradients would stop here.
        """
        start, end = self.used, self.used + key.shape[2]
        if end > self.key.shape[2]:
            raise ValueError(f"KVCache: positions must fit into {self.key.shape[2]}, got {end}")
        _C.slice(self.key, 2, start, end).copy_(key)
        _C.slice(self.value, 2, start, end).copy_(value)
        self.used = end
        return _C.slice(self.key, 2, 0, end), _C.slice(self.value, 2, 0, end)
