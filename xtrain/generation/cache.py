"""Keys and values of the positions seen so far."""

from __future__ import annotations

from .. import _C
from .._C import Tensor


class KVCache:
    """Keys and values of the positions seen so far: two tensors [B, K, length, D] that fill up from the front.

    The first ones that are appended give K, D, dtype and device. used: positions stored. positions: None, or int64 [B]
    on that device, where `attend` stores instead; its caller counts them up, and `used` stands still.
    """

    def __init__(self, batch: int, length: int) -> None:
        self.batch, self.length = batch, length
        self.key: Tensor | None = None
        self.value: Tensor | None = None
        self.used = 0
        self.positions: Tensor | None = None

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Stores key and value [B, K, S, D] behind the others; returns views of everything stored.

        ValueError when they do not fit; RuntimeError while recording, because gradients would stop here.
        """
        start, end = self.used, self.used + key.shape[2]
        if end > self.length:
            raise ValueError(f"KVCache: positions must fit into {self.length}, got {end}")
        keys = self.key = self._room(key) if self.key is None else self.key
        values = self.value = self._room(value) if self.value is None else self.value
        new = _C.slice(keys, 2, start, end), _C.slice(values, 2, start, end)
        new[0].copy_(key)
        new[1].copy_(value)
        self.used = end
        return new if start == 0 else (_C.slice(keys, 2, 0, end), _C.slice(values, 2, 0, end))

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Stores key and value [B, K, S, D]; returns what queries [B, H, S, D] see of all that is stored, [B, H, S, D]:
        with a window, of the `window` positions that end at theirs. softcap: of the scores.

        With `positions`, S is 1 and all that a step needs is on the device: the same call serves each step of a graph.
        """
        if self.positions is not None and self.key is not None and self.value is not None:
            stored = self.key, self.value, self.positions
            return _C.cached_attention(query, key, value, *stored, scale, window=window, softcap=softcap)
        shared, options = query.shape[1] != key.shape[1], {"window": window, "softcap": softcap}
        return _C.scaled_dot_product_attention(query, *self.append(key, value), True, scale, shared, **options)

    def _room(self, first: Tensor) -> Tensor:
        return _C.empty((self.batch, first.shape[1], self.length, first.shape[3]), first.dtype, first.device)
