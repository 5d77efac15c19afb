"""GPT-2 (Radford et al. 2019, Language Models are Unsupervised Multitask Learners): pre-norm transformer with
LayerNorm, learned positions, GELU and biases. Names and layout of tensors are Hugging Face's: weights of projections
are [in, out].
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from .. import _C, functional, nn
from .._C import Tensor
from .._types import Device, is_whole
from ..autograd import recompute
from ..generation import KVCache
from ..nn.layers import add_norm
from ..nn.lora import ADAPTED, LoraLayer
from ..nn.module import is_stock
from ..optim.qk_clip import AttentionHeads
from ..tensors.documents import sees
from .causal_lm import CausalLM
from .model_config import ModelConfig, is_positive
from .policies import check_policy, run_in_line, run_layers, run_two_parts, runs_in_line
from .registry import RECOMPUTE, Architecture

_DROPOUTS = ("embd_pdrop", "attn_pdrop", "resid_pdrop")
_ACTIVATIONS = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "none"}


@dataclass
class GPT2Config(ModelConfig):
    """Keys and defaults of Hugging Face's GPT2Config. n_inner None: 4 n_embd. ValueError names key, rule and value."""

    family: ClassVar[str] = "GPT2"
    kind: ClassVar[str] = "gpt2"

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    resid_pdrop: float = 0.1
    embd_pdrop: float = 0.1
    attn_pdrop: float = 0.1
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 50256
    eos_token_id: int | list[int] | None = 50256
    pad_token_id: int | None = None
    use_cache: bool = True
    model_type: str = "gpt2"
    architectures: list[str] = field(default_factory=lambda: ["GPT2LMHeadModel"])

    def check(self) -> None:
        for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner"):
            value, least = getattr(self, name), 0 if name == "n_layer" else 1
            if name == "n_inner" and value is None:
                continue
            if not is_whole(value) or value < least:
                raise self.refusal(name, f"must be an integer >= {least}")
        if self.n_embd % self.n_head:
            raise self.refusal("n_head", f"must divide n_embd {self.n_embd}")
        for name in _DROPOUTS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
                raise self.refusal(name, "must be in [0, 1)")
        for name in ("layer_norm_epsilon", "initializer_range"):
            if not is_positive(getattr(self, name)):
                raise self.refusal(name, "must be a positive number")
        if self.activation_function not in tuple(_ACTIVATIONS):  # a list of JSON has no hash
            raise self.refusal("activation_function", f"must be one of {', '.join(_ACTIVATIONS)}")
        for name in ("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "tie_word_embeddings"):
            if not isinstance(getattr(self, name), bool):
                raise self.refusal(name, "must be True or False")
        if self.model_type != self.kind:
            raise self.refusal("model_type", f"must be {self.kind!r}")
        self._check_ends()
        self._check_dtype()

    @classmethod
    def _read(cls, values: dict[str, Any]) -> None:
        super()._read(values)
        for key in ("reorder_and_upcast_attn", "add_cross_attention", "quantization_config"):
            if values.get(key):
                raise ValueError(f"{cls.__name__}: {key} is not supported, got {values[key]!r}")

    @property
    def inner(self) -> int:
        """Channels between the two projections of a feed-forward layer."""
        return 4 * self.n_embd if self.n_inner is None else self.n_inner

    @property
    def num_hidden_layers(self) -> int:
        """n_layer, by the name that other families have."""
        return self.n_layer

    @property
    def num_attention_heads(self) -> int:
        """n_head, by the name that other families have."""
        return self.n_head

    @property
    def head_dim(self) -> int:
        """n_embd / n_head, by the name that other families have."""
        return self.n_embd // self.n_head

    @property
    def max_position_embeddings(self) -> int:
        """n_positions, by the name that other families have."""
        return self.n_positions


class Conv1D(nn.Module):
    """y = x W + b: x [..., in] -> [..., out]; weight [in, out], as files of GPT-2 have it, bias [out]."""

    def __init__(self, in_features: int, out_features: int, dtype: _C.dtype, device: Device) -> None:
        self.weight = nn.Parameter(_C.full((in_features, out_features), 0.0, dtype, device))
        self.bias = nn.Parameter(_C.full((out_features,), 0.0, dtype, device))

    def forward(self, x: Tensor) -> Tensor:
        return _C.linear(x, self.weight.transpose(0, 1), self.bias)


class LoraConv1D(LoraLayer, Conv1D):
    """A Conv1D with LoRA."""

    transposed = True

    def base(self, x: Tensor) -> Tensor:
        return _C.linear(x, self.weight.transpose(0, 1), self.bias)


ADAPTED[Conv1D] = LoraConv1D


class Attention(nn.Module):
    """Causal self-attention: x [B*S, C] -> [B*S, C]. layer: its number, from 0."""

    def __init__(self, config: GPT2Config, layer: int, dtype: _C.dtype, device: Device) -> None:
        c = config.n_embd
        self.heads, self.head_dim = config.n_head, config.head_dim
        self.scale = 1.0 / math.sqrt(self.head_dim) if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            self.scale /= layer + 1
        self.dropout, self.resid_dropout = float(config.attn_pdrop), nn.Dropout(config.resid_pdrop)
        self.c_attn = Conv1D(c, 3 * c, dtype, device)
        self.c_proj = Conv1D(c, c, dtype, device)

    def qk_heads(self) -> AttentionHeads:
        """The parameters that queries and keys come from, for optim.QKClip."""
        width, weight, bias = self.heads * self.head_dim, self.c_attn.weight, self.c_attn.bias
        query, key = ([(weight, 1, first), (bias, 0, first)] for first in (0, width))
        return AttentionHeads(self.heads, self.heads, self.head_dim, query, key)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        if not (self.training and self.dropout):
            return _C.scaled_dot_product_attention(q, k, v, True, self.scale, False, documents=documents)
        # One op after the other: no kernel has dropout inside attention. The mask is not kept.
        seen = sees(q.shape[2], q.shape[2], True, documents, None, q.device)
        scores = _C.where(seen, (q @ k.transpose(2, 3)) * self.scale, -math.inf)
        return functional.dropout(_C.softmax(scores, -1), self.dropout) @ v

    def forward(
        self, x: Tensor, batch: int, seq: int, cache: KVCache | None = None, documents: Tensor | None = None
    ) -> Tensor:
        h, d = self.heads, self.head_dim
        parts = _C.split(self.c_attn(x), (h * d, h * d, h * d), -1)
        q, k, v = (part.view(batch, seq, h, d).transpose(1, 2) for part in parts)
        y = self._attend(q, k, v, documents) if cache is None else cache.attend(q, k, v, self.scale)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).reshape(batch * seq, h * d)))


class MLP(nn.Module):
    """x [B*S, C] -> [B*S, C]: projection, GELU, projection."""

    def __init__(self, config: GPT2Config, dtype: _C.dtype, device: Device) -> None:
        self.approximate = _ACTIVATIONS[config.activation_function]
        self.c_fc = Conv1D(config.n_embd, config.inner, dtype, device)
        self.c_proj = Conv1D(config.inner, config.n_embd, dtype, device)
        self.dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, x: Tensor) -> Tensor:
        fc, proj = self.c_fc, self.c_proj
        if not is_stock(fc, Conv1D):
            return self.dropout(proj(functional.gelu(fc(x), self.approximate)))
        up = fc.weight.transpose(0, 1)
        if is_stock(proj, Conv1D):
            y = _C.gelu_mlp(x, up, fc.bias, proj.weight.transpose(0, 1), proj.bias, self.approximate)
        else:
            y = proj(_C.bias_gelu(_C.linear(x, up), fc.bias, self.approximate))
        return self.dropout(y)


class Block(nn.Module):
    """One layer: x + attn(ln_1(x)), then x + mlp(ln_2(x)); x [B*S, C]. rest: cache and documents, as of Attention."""

    def __init__(self, config: GPT2Config, layer: int, dtype: _C.dtype, device: Device) -> None:
        eps = config.layer_norm_epsilon
        self.ln_1 = nn.LayerNorm(config.n_embd, eps, device=device, dtype=dtype)
        self.attn = Attention(config, layer, dtype, device)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps, device=device, dtype=dtype)
        self.mlp = MLP(config, dtype, device)

    def forward(self, x: Tensor, batch: int, seq: int, *rest: Any) -> Tensor:
        x, y = self.run(x, None, batch, seq, *rest)
        return x + y

    def run(self, x: Tensor, y: Tensor | None, batch: int, seq: int, *rest: Any) -> tuple[Tensor, Tensor]:
        """As forward(x + y), but the sum comes in and goes out as two terms; see run_two_parts."""
        return run_two_parts(x, y, (self.ln_1, self.ln_2), self.attn, self.mlp, batch, seq, *rest)


class Trunk(nn.Module):
    """Everything but the head: ids [B, S] -> [B*S, C]."""

    def __init__(self, config: GPT2Config, dtype: _C.dtype, device: Device) -> None:
        self.wte = nn.Embedding(config.vocab_size, config.n_embd, device, dtype)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd, device, dtype)
        self.drop = nn.Dropout(config.embd_pdrop)
        self.h = nn.ModuleList(Block(config, i, dtype, device) for i in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon, device=device, dtype=dtype)
        self.recompute = "none"

    def forward(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        caches: list[KVCache] | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        batch, seq = ids.shape
        words = self.wte(ids.reshape(batch * seq))
        if positions is None:
            rows = self.wpe.weight.shape[0] if isinstance(self.wpe, nn.Embedding) else seq
            if seq > rows:
                raise IndexError(f"GPT2: ids must have at most n_positions {rows} tokens per sequence, got {seq}")
            positions = _C.arange(0, seq, 1, _C.int64, ids.device)
        elif isinstance(positions, _C.Tensor) and tuple(positions.shape) not in ((batch * seq,), (batch, seq), (seq,)):
            rule = f"one entry per token of ids, shape ({batch * seq},), (B, S) or (S,)"
            raise ValueError(f"GPT2: positions must have {rule}, got {tuple(positions.shape)}")
        places = self.wpe(positions)
        if tuple(positions.shape) == (seq,) and batch != 1:  # the same rows for every sequence
            x = (words.view(batch, seq, words.shape[-1]) + places).view(batch * seq, words.shape[-1])
        else:
            x = words + places.view(batch * seq, words.shape[-1])
        x = self.drop(x)
        policy = self.recompute if self.training and caches is None else "none"
        with recompute() if policy in ("cheap", "full") else contextlib.nullcontext():
            # A layer of the user's need not know what it is not given.
            more = () if documents is None else (documents,)
            rest = () if documents is None else (None, documents)  # with the place of a cache
            if policy in ("block", "full"):
                return self.ln_f(run_layers(self.h, policy, x, batch, seq, *rest))
            in_line = functools.partial(runs_in_line, kind=Block)
            x, y = run_in_line(self.h, in_line, x, (batch, seq), caches, more)
            return self.ln_f(x) if y is None else add_norm(self.ln_f, x, y)[1]


class GPT2(CausalLM):
    """A GPT-2 language model. config: a GPT2Config. Longest sequence: config.n_positions tokens, else IndexError.

    Matrices and embeddings start normal with deviation `initializer_range`, the last projections of attention and of
    the feed-forward layers with that over the root of 2 n_layer, norms at one, biases at zero. `model.recompute` as for
    the other families, see Decoder: "cheap" are norms and GELU; dropout draws the same numbers again.
    """

    config: GPT2Config
    table: ClassVar[str] = "transformer.wte"

    def __init__(self, config: GPT2Config, device: Device = None, dtype: _C.dtype | None = None) -> None:
        if not isinstance(config, GPT2Config):
            raise TypeError(f"GPT2: config must be a GPT2Config, got {type(config).__name__}")
        config.check()
        self.config = config
        dtype = _C.dtype(config.dtype) if dtype is None else dtype
        self.transformer = Trunk(config, dtype, device)
        self.lm_head: nn.Linear | None = None
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.n_embd, config.vocab_size, False, device, dtype)
        self.reset_parameters()

    @property
    def recompute(self) -> str:
        """Which activations are not kept but computed again in backward: none, cheap, block or full."""
        return self.transformer.recompute

    @recompute.setter
    def recompute(self, policy: str) -> None:
        check_policy("GPT2", policy)
        self.transformer.recompute = policy

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether training recomputes the activations of each layer in backward."""
        return self.recompute in ("block", "full")

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, on: bool) -> None:
        if bool(on) != self.gradient_checkpointing:
            self.recompute = "block" if on else "none"

    def reset_parameters(self) -> None:
        """Draws all parameters anew from the default generator."""
        deviation = self.config.initializer_range
        last = deviation / math.sqrt(2 * max(self.config.n_layer, 1))
        for name, module in self.named_modules():
            if isinstance(module, (Conv1D, nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, 0.0, last if name.endswith("c_proj") else deviation)
            if isinstance(module, Conv1D):
                nn.init.zeros_(module.bias)
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()

    def flops_per_token(self, seq_len: int) -> int:
        """Floating-point operations of forward and backward per token at sequences of seq_len: 6 per weight of a matrix
        product, 4 where it is frozen, and 12 C seq_len per layer for attention (Chowdhery et al. 2022, PaLM, appendix
        B).
        """
        config = self.config
        positions = self.transformer.wpe.weight.numel()
        weights = self.num_parameters(embeddings=False) - positions
        idle = self.idle_weights() - (0 if self.transformer.wpe.weight.requires_grad else positions)
        return 6 * weights - 2 * idle + 12 * config.n_layer * config.n_embd * seq_len


def tensor_shapes(config: GPT2Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of what a file must hold for this config."""
    c, f = config.n_embd, config.inner
    yield "transformer.wte.weight", (config.vocab_size, c)
    yield "transformer.wpe.weight", (config.n_positions, c)
    for i in range(config.n_layer):
        products = ("attn.c_attn", c, 3 * c), ("attn.c_proj", c, c), ("mlp.c_fc", c, f), ("mlp.c_proj", f, c)
        for name, inputs, outputs in products:
            yield f"transformer.h.{i}.{name}.weight", (inputs, outputs)
            yield f"transformer.h.{i}.{name}.bias", (outputs,)
        for name in ("ln_1", "ln_2"):
            yield f"transformer.h.{i}.{name}.weight", (c,)
            yield f"transformer.h.{i}.{name}.bias", (c,)
    yield "transformer.ln_f.weight", (c,)
    yield "transformer.ln_f.bias", (c,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, c)


def stored(name: str) -> str | None:
    """The first files of GPT-2 lack the prefix, and hold the causal masks."""
    name = name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"
    return None if re.fullmatch(r"transformer\.h\.\d+\.attn\.(masked_)?bias", name) else name


ARCHITECTURE = Architecture(
    config=GPT2Config,
    model=GPT2,
    tensor_shapes=tensor_shapes,
    count_parameters=lambda config: sum(math.prod(shape) for _, shape in tensor_shapes(config)),
    sizes=("n_embd", "n_layer", "n_inner", "vocab_size"),
    tied={"lm_head.weight": "transformer.wte.weight"},
    stored=stored,
    recompute=RECOMPUTE,
)
