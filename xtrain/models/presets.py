"""Models that training can start from by name. Each is the keys of a config.json; `model_type` names the architecture.

All are byte-level: 256 tokens, token id = byte value, byte 0 ends a document.
"""

from __future__ import annotations

from typing import Any

_QWEN3: dict[str, Any] = dict(
    model_type="qwen3",
    rope_theta=10000.0,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    initializer_range=0.02,
    mhc_streams=0,
    mhc_contraction="mean",
)
PRESETS: dict[str, dict[str, Any]] = {
    "default": dict(
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=32,
        **_QWEN3,
    ),
    "tiny": dict(
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        **_QWEN3,
    ),
    "10m": dict(
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=64,
        **_QWEN3,
    ),
    "gpu": dict(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=12,
        num_key_value_heads=6,
        head_dim=64,
        **_QWEN3,
    ),
}
