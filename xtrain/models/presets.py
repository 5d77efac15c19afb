"""Models that training can start from by name. Each is the keys of a config.json; `model_type` names the architecture.

All are byte-level: 256 tokens, token id = byte value, byte 0 ends a document.
"""

from __future__ import annotations

from typing import Any


def _qwen3(width: int, ffn_width: int, layers: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    return dict(
        model_type="qwen3",
        hidden_size=width,
        intermediate_size=ffn_width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rope_theta=10000.0,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        initializer_range=0.02,
        mhc_streams=0,
        mhc_contraction="mean",
    )


PRESETS: dict[str, dict[str, Any]] = {
    "default": _qwen3(192, 512, 4, 6, 3, 32),
    "tiny": _qwen3(64, 192, 2, 2, 1, 32),
    "10m": _qwen3(384, 1024, 6, 6, 3, 64),
    "gpu": _qwen3(768, 2048, 8, 12, 6, 64),
}
