"""Gemma 2 (Gemma Team 2024, arXiv 2408.00118): a decoder that caps its logits, of attention and of the head, with a
norm on either side of attention and of a GeGLU, windows in every second layer, and a scaled token table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from .. import _C, nn
from .._C import Tensor
from .._types import Device
from ..nn import init
from ..nn.layers import joined_weights
from ..nn.module import is_stock
from .decoder import MLP, Attention, Block, Decoder, Trunk, decoder_architecture
from .decoder_config import DecoderConfig
from .model_config import is_positive
from .windows import FULL, SLIDING, check_kinds, check_window

_GELU = "gelu_pytorch_tanh"


@dataclass
class Gemma2Config(DecoderConfig):
    """DecoderConfig with the defaults of Hugging Face's Gemma2Config.

    query_pre_attn_scalar: scores are divided by its root. attn_logit_softcapping, final_logit_softcapping: c, for which
    a score of attention, or a logit of the head, z becomes c tanh(z / c); None: none. sliding_window: the tokens that a
    token sees in a layer that slides, itself included; None: all before it. layer_types: for each layer
    "full_attention" or "sliding_attention"; None: every second layer, from the first on, slides.
    """

    family: ClassVar[str] = "Gemma2"
    kind: ClassVar[str] = "gemma2"
    windowed: ClassVar[bool] = True
    norms: ClassVar[tuple[str, ...]] = (
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    )  # fmt: skip

    vocab_size: int = 256000
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    head_dim: int | None = 256
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = True
    hidden_act: str = _GELU
    hidden_activation: str = _GELU
    query_pre_attn_scalar: float = 256
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0
    sliding_window: int | None = 4096
    layer_types: list[str] | None = None
    bos_token_id: int | None = 2
    eos_token_id: int | list[int] | None = 1
    pad_token_id: int | None = 0
    model_type: str = "gemma2"
    architectures: list[str] = field(default_factory=lambda: ["Gemma2ForCausalLM"])

    def _only(self) -> dict[str, Any]:
        return super()._only() | {"hidden_act": _GELU, "hidden_activation": _GELU}

    def _check_family(self) -> None:
        if not is_positive(self.query_pre_attn_scalar):
            raise self.refusal("query_pre_attn_scalar", "must be a positive number")
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            value = getattr(self, name)
            if value is not None and not (is_positive(value) and _in_float32(value)):
                raise self.refusal(name, "must be None or positive and finite in float32")

    def _check_windows(self) -> None:
        check_window(self)
        check_kinds(self)

    @property
    def kinds(self) -> list[str]:
        """layer_types; where that is None, every second layer slides."""
        return list(self.layer_types or ((SLIDING, FULL) * self.num_hidden_layers)[: self.num_hidden_layers])

    def window(self, layer: int) -> int | None:
        return self.sliding_window if self.kinds[layer] == SLIDING else None

    @property
    def score_options(self) -> dict[str, Any]:
        return {"scale": float(self.query_pre_attn_scalar) ** -0.5, "softcap": self.attn_logit_softcapping}

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"layer_types": self.kinds}


def _in_float32(value: float) -> bool:
    with np.errstate(over="ignore", under="ignore"):
        return 0 < float(np.float32(value)) < math.inf


_BITS = {_C.float64: 24, _C.float32: 24, _C.bfloat16: 8, _C.float16: 11}  # Hugging Face's scale is of float32 at most


def _rounded(value: float, bits: int) -> float:
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(math.ldexp(mantissa, bits)), exponent - bits)


class ScaledEmbedding(nn.Embedding):
    """A row of the table times sqrt(embedding_dim), rounded to the table's dtype: ids [...] -> [..., embedding_dim]."""

    def forward(self, input: Tensor) -> Tensor:
        scale = _rounded(self.embedding_dim**0.5, 24)
        return _C.embedding(input, self.weight) * _rounded(scale, _BITS[self.weight.dtype])


class GemmaNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * (1 + weight) over the last dim, in float32 (float64) and rounded once; weight [C],
    zeros at the start.
    """

    def reset_parameters(self) -> None:
        if self.weight is not None:
            init.zeros_(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        eps: Any = self.eps
        return _C.rms_norm(input, self.weight, eps, True)


def _add_norm(norm: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """(x + y, norm(x + y)): one op where nobody looks at the norm."""
    if is_stock(norm, GemmaNorm) and x.dtype == y.dtype:
        stock: Any = norm
        return _C.add_rms_norm(x, y, stock.weight, stock.eps, True)
    x = x + y
    return x, norm(x)


class GeGLU(MLP):
    """down(gelu(gate(x)) * up(x)) with the tanh formula (Shazeer 2020): x [B*S, C] -> [B*S, C]."""

    def forward(self, x: Tensor) -> Tensor:
        joined = joined_weights(self.gate_proj, self.up_proj)
        if joined is None:
            gate, up = self.gate_proj(x), self.up_proj(x)
        else:
            gate, up = _C.split(_C.linear_joined(x, *joined), tuple(weight.shape[0] for weight in joined[0]), -1)
        return self.down_proj(_C.gelu(gate, "tanh") * up)


class Gemma2Block(Block):
    """One layer: x + norm(attention(norm(x))), then x + norm(mlp(norm(x))). layer: its number, from 0. rest: positions,
    cache and documents, as of Attention.
    """

    def __init__(self, config: Gemma2Config, dtype: _C.dtype, device: Device, layer: int = 0) -> None:
        self.self_attn = Attention(config, dtype, device, config.window(layer))
        self.mlp = GeGLU(config, dtype, device)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = GemmaNorm(size, eps, device=device, dtype=dtype)
        self.post_attention_layernorm = GemmaNorm(size, eps, device=device, dtype=dtype)
        self.pre_feedforward_layernorm = GemmaNorm(size, eps, device=device, dtype=dtype)
        self.post_feedforward_layernorm = GemmaNorm(size, eps, device=device, dtype=dtype)
        self.streams = 0

    def run(self, x: Tensor, y: Tensor | None, batch: int, seq: int, *rest: Any) -> tuple[Tensor, Tensor]:
        x, h = (x, self.input_layernorm(x)) if y is None else _add_norm(self.input_layernorm, x, y)
        h = self.post_attention_layernorm(self.self_attn(h, batch, seq, *rest))
        x, h = _add_norm(self.pre_feedforward_layernorm, x, h)
        return x, self.post_feedforward_layernorm(self.mlp(h))


class Gemma2Trunk(Trunk):
    """Everything but the head: ids [B, S] -> [B*S, C]."""

    table_kind = ScaledEmbedding
    block_kind = Gemma2Block
    norm_kind = GemmaNorm


class Gemma2(Decoder):
    """A Gemma 2 language model; see Decoder. config: a Gemma2Config. Norms start at zeros: they add one to a weight."""

    config: Gemma2Config
    config_class = Gemma2Config
    trunk_kind = Gemma2Trunk


ARCHITECTURE = decoder_architecture(Gemma2)
