"""Sliding windows: which layers have one, as Qwen2 and Qwen3 write it in config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from .._types import is_whole
from .decoder_config import DecoderConfig

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass
class WindowedConfig(DecoderConfig):
    """DecoderConfig with a sliding window in some layers.

    use_sliding_window: whether there are windows. sliding_window: the tokens that a token sees there, itself included.
    layer_types: for each layer "full_attention" or "sliding_attention"; None: the layers from max_window_layers on
    slide. (Hugging Face's documentation says those before it; its code, which this follows, means those behind.)
    """

    windowed: ClassVar[bool] = True

    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: list[str] | None = None

    def _check_windows(self) -> None:
        if not isinstance(self.use_sliding_window, bool):
            raise self.refusal("use_sliding_window", "must be True or False")
        check_window(self)
        if self.use_sliding_window and self.sliding_window is None:
            raise self.refusal("sliding_window", "must be an integer >= 1 with use_sliding_window")
        most = self.max_window_layers
        if not is_whole(most) or most < 0:
            raise self.refusal("max_window_layers", "must be an integer >= 0")
        check_kinds(self)
        if SLIDING in (self.layer_types or ()) and not self.use_sliding_window:
            raise self.refusal("layer_types", f"must be {FULL} without use_sliding_window", SLIDING)

    @property
    def kinds(self) -> list[str]:
        """layer_types; where that is None, what max_window_layers says."""
        if self.layer_types is not None:
            return list(self.layer_types)
        first = self.max_window_layers if self.use_sliding_window else self.num_hidden_layers
        return [SLIDING if layer >= first else FULL for layer in range(self.num_hidden_layers)]

    def window(self, layer: int) -> int | None:
        return self.sliding_window if self.kinds[layer] == SLIDING else None

    @classmethod
    def _read(cls, values: dict[str, Any]) -> None:
        super()._read(values)
        if not values.get("use_sliding_window"):  # all are full, whatever is written beside it
            kinds = values.get("layer_types")
            if isinstance(kinds, (list, tuple)) and set(kinds) <= {FULL}:
                values["layer_types"] = None

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"layer_types": self.kinds}


def check_kinds(config: Any) -> None:
    """ValueError for layer_types that are neither None nor a kind for every layer."""
    kinds = config.layer_types
    if kinds is None:
        return
    if not isinstance(kinds, (list, tuple)):
        raise config.refusal("layer_types", "must be a list")
    if len(kinds) != config.num_hidden_layers:
        rule = f"must have num_hidden_layers {config.num_hidden_layers} entries"
        raise config.refusal("layer_types", rule, len(kinds))
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            raise config.refusal("layer_types", f"must be {FULL} or {SLIDING}", kind)


def check_window(config: Any) -> None:
    """ValueError for a sliding_window that is neither None nor a number of tokens."""
    window = config.sliding_window
    if window is not None and (not is_whole(window) or window < 1):
        raise config.refusal("sliding_window", "must be None or an integer >= 1")
