"""QK-clip: queries and keys of a head are scaled when its attention logits have grown too large."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _C
from .._C import Tensor
from ..autograd import no_grad
from ..nn.module import Module
from ..tensors.documents import sees

if TYPE_CHECKING:
    from .adamw import AdamW
    from .chained import ChainedOptimizer
    from .muon import Muon

_BLOCK = 1 << 24  # scores that are computed at once
_Place = tuple[Tensor, int, int]  # a parameter, its dimension that has the heads, and the first index of them there


@dataclass(frozen=True)
class AttentionHeads:
    """Where the queries and keys of a layer come from. query, key: of each parameter, heads x head_dim or kv_heads x
    head_dim indices of one dimension, from a first one on, make the queries or keys: head h from h head_dim on.
    """

    heads: int
    kv_heads: int
    head_dim: int
    query: Sequence[_Place]
    key: Sequence[_Place]


class QKClip:
    """QK-clip of MuonClip (Kimi K2, 2025): of a head whose largest logit m is above tau, g = tau / m,

        W_q *= sqrt(g), W_k *= sqrt(g)      where each head has keys of its own
        W_q *= g                            where several share them (grouped queries), which are left alone

    and biases with them, after the optimizer's step. m is the largest scale * q . k over a batch and all pairs that
    attention sees: the causal ones, inside the window and the document. Each head is scaled by itself.

        maxima = clip.measure(lambda: model(ids))     # before the step
        optimizer.step()
        clip.step(maxima)

    model: its attention layers say by `qk_heads` which parameters are theirs. optimizer: the float32 masters that it
    keeps of 16-bit parameters are scaled. ValueError for a model without such layers, for one that normalises queries
    and keys, whose logits the size of the weights does not change, for weights that are not trained, and for a tau that
    is no number greater than 0.
    """

    def __init__(self, model: Module, tau: float, optimizer: AdamW | Muon | ChainedOptimizer) -> None:
        if isinstance(tau, bool) or not isinstance(tau, (int, float)) or not 0.0 < tau < math.inf:
            raise ValueError(f"QKClip: tau must be a number greater than 0, got {tau!r}")
        found: list[Any] = [module for module in model.modules() if hasattr(module, "qk_heads")]
        self._layers: list[AttentionHeads] = [module.qk_heads() for module in found]
        if not self._layers:
            raise ValueError(f"QKClip: model must have layers with qk_heads, got {type(model).__name__}")
        for layer in self._layers:
            if not all(parameter.requires_grad for parameter, *_ in [*layer.query, *layer.key]):
                raise ValueError("QKClip: model must train the weights of queries and keys, got some that are frozen")
        self._tau, self._optimizer = float(tau), optimizer

    @no_grad()
    def measure(self, forward: Callable[[], Any]) -> list[list[float]]:
        """The largest logit of each head in each layer, in a call of `forward`, which calls the model, without dropout.
        RuntimeError when its layers do not call scaled_dot_product_attention once each.
        """
        found: list[Tensor] = []

        def see(op: Any, arguments: Mapping[str, Any], _outputs: Any) -> None:
            if op.__name__ == "scaled_dot_product_attention":
                names = ("query", "key", "is_causal", "scale", "documents", "window")
                found.append(logit_maxima(*(arguments[name] for name in names)))

        before = _C.set_call_hook(see, thread=True)
        try:
            forward()
        finally:
            _C.set_call_hook(before, thread=True)
        if [one.numel() for one in found] != [layer.heads for layer in self._layers]:
            raise RuntimeError(
                f"QKClip: each of {len(self._layers)} layers must call scaled_dot_product_attention once, "
                f"got {len(found)} calls"
            )
        numbers = iter(_C.cat(found).tolist())
        return [[next(numbers) for _ in range(layer.heads)] for layer in self._layers]

    def factors(self, maxima: Sequence[Sequence[float]]) -> dict[Tensor, Tensor]:
        """What each parameter of a head that is too large is multiplied by, float32 (float64 for float64), in a shape
        that spreads over it. A logit that is not finite scales nothing.
        """
        rows: dict[Tensor, tuple[int, np.ndarray]] = {}
        for layer, logits in zip(self._layers, maxima, strict=True):
            scale = np.array([self._tau / m if self._tau < m < math.inf else 1.0 for m in logits])
            if (scale == 1.0).all():
                continue
            alone = layer.heads == layer.kv_heads
            scale = np.repeat(np.sqrt(scale) if alone else scale, layer.head_dim)
            for parameter, dim, first in [*layer.query, *(layer.key if alone else [])]:
                _, row = rows.setdefault(parameter, (dim, np.ones(parameter.shape[dim])))
                row[first : first + len(scale)] = scale
        found: dict[Tensor, Tensor] = {}
        for parameter, (dim, row) in rows.items():
            wide = _C.float64 if parameter.dtype is _C.float64 else _C.float32
            shape = [len(row) if i == dim else 1 for i in range(parameter.ndim)]
            found[parameter] = _C.from_numpy(row).to(wide).to(parameter.device).reshape(shape)
        return found

    def count(self, maxima: Sequence[Sequence[float]]) -> int:
        """Heads that `step` scales."""
        return sum(self._tau < m < math.inf for logits in maxima for m in logits)

    @no_grad()
    def step(self, maxima: Sequence[Sequence[float]]) -> None:
        """Scale the weights of heads whose logit is above tau, with their masters."""
        for parameter, factor in self.factors(maxima).items():
            state = self._optimizer.state.get(parameter) or {}
            if "master" in state:
                parameter.copy_(state["master"].mul_(factor))
            else:
                parameter.mul_(factor)


def logit_maxima(
    query: Tensor, key: Tensor, is_causal: bool, scale: float | None, documents: Tensor | None, window: int | None
) -> Tensor:
    """The largest scale * q . k of each head, float32 [H], over all pairs that scaled_dot_product_attention sees with
    these arguments: query [B, H, S, D], key [B, K, T, D]. Products are of float32 values, in blocks of rows.
    """
    batch, heads, queries, dim = query.shape
    groups, keys = key.shape[1], key.shape[2]
    factor = 1.0 / math.sqrt(dim) if scale is None else scale
    size = max(_BLOCK // max(heads * keys, 1), 1)
    found: list[Tensor] = []
    tf32 = _C.tf32()
    _C.allow_tf32(False)
    try:
        for b in range(batch):
            own = None if documents is None else documents[b : b + 1]
            k = key[b].float().transpose(1, 2)
            for start in range(0, queries, size):
                end = min(start + size, queries)
                last = min(end + keys - queries, keys) if is_causal else keys
                q = query[b, :, start:end].float().reshape(groups, heads // groups * (end - start), dim)
                scores = (q @ k[:, :, :last]).reshape(heads, end - start, last) * factor
                seen = sees(queries, keys, is_causal, own, window, query.device, start, end)[..., :last]
                seen = seen.reshape(1, end - start, last)
                found.append(_C.where(seen, scores, -math.inf).reshape(heads, (end - start) * last).amax(1))
    finally:
        _C.allow_tf32(tf32)
    return _C.cat([one.reshape(1, heads) for one in found], 0).amax(0)
