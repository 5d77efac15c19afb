"""What every model is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import nn
from .._C import Tensor


class LanguageModel(nn.Module):
    """A model as training, saving and sampling use it. Letters: B batch, S sequence, V vocabulary.

    config: made by the architecture's config class. forward(ids, positions=None, caches=None): ids [B, S] -> logits
    [B, S, V]. loss(ids, targets, ignore_index=-100, reduction="mean"): cross entropy in nats. make_caches(batch,
    length): empty caches of `length` positions, one per layer, for forward. recompute: one of registry.RECOMPUTE,
    what training computes again in backward; an architecture without it keeps everything.
    """

    config: Any
    forward: Callable[..., Tensor]
    loss: Callable[..., Tensor]
    make_caches: Callable[[int, int], list[Any]]
