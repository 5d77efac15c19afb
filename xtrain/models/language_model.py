"""What every model is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import nn
from .._C import Tensor


class LanguageModel(nn.Module):
    """A model as training, saving and sampling use it. Letters: B batch, S sequence, V vocabulary.

    config: made by the architecture's config class. forward(ids, positions=None, caches=None): ids [B, S] -> logits
    [B, S, V]. loss(ids, targets, ignore_index=-100, reduction="mean"): cross entropy in nats. Both take documents, of
    functional.document_bounds, where the model is trained on rows that hold several. make_caches(batch,
    length): empty caches of `length` positions, one per layer, for forward. generation_config: the content of the
    generation_config.json that the model was loaded with, None where there was none; saving writes it.
    generation_file: its bytes then.
    """

    config: Any
    generation_config: dict[str, Any] | None = None
    generation_file: bytes = b""
    forward: Callable[..., Tensor]
    loss: Callable[..., Tensor]
    make_caches: Callable[[int, int], list[Any]]

    @property
    def recompute(self) -> str:
        """Which activations are computed again in backward: one of the architecture's policies. Here all are kept."""
        return "none"

    @recompute.setter
    def recompute(self, policy: str) -> None:
        if policy != "none":
            raise ValueError(f"{type(self).__name__}: recompute must be none, got {policy!r}")

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether training recomputes the activations of each layer in backward."""
        return False

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, on: bool) -> None:
        if on:
            raise ValueError(f"{type(self).__name__}: gradient_checkpointing must be off, got {on!r}")
