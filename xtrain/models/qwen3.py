"""Qwen3 (Yang et al. 2025, Qwen3 Technical Report): pre-norm transformer with RMSNorm, QK-norm, RoPE, grouped queries
and SwiGLU.

Letters: B batch, S sequence, C hidden_size, H query heads, K kv heads, D head_dim, F intermediate_size, V vocab_size.
Every per-token layer works on [B*S, C]: one matrix product per projection whatever B is. Only attention knows the
sequences, through strided [B, heads, S, D] views of the same memory. The attribute tree is Hugging Face's, so
`state_dict()` names are the names in the files.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .. import _C, functional, generation, nn, saving
from .._C import Tensor
from .._types import Device
from ..autograd import checkpoint
from ..generation import KVCache
from ..nn.layers import joined_weights
from ..nn.module import LoadResult, is_stock, pack
from .language_model import LanguageModel
from .qwen3_config import Qwen3Config
from .registry import Architecture

if TYPE_CHECKING:
    from typing_extensions import Self

_Part = tuple[nn.HyperConnection, Callable[..., Tensor]]  # a hyper-connection and the layer that it wraps
_Shape = tuple[str, tuple[int, ...]]  # of a tensor: its name and its shape


class Attention(nn.Module):
    """Causal self-attention: x [B*S, C] -> [B*S, C]; positions [B*S] as in Qwen3.forward, cache of this layer."""

    def __init__(self, config: Qwen3Config, dtype: _C.dtype, device: Device) -> None:
        c, h, k, d = config.hidden_size, config.num_attention_heads, config.kv_heads, config.head_dim
        self.heads, self.kv_heads, self.head_dim = h, k, d
        self.theta, eps = float(config.rope_theta), float(config.rms_norm_eps)
        self.q_proj = nn.Linear(c, h * d, False, device, dtype)
        self.k_proj = nn.Linear(c, k * d, False, device, dtype)
        self.v_proj = nn.Linear(c, k * d, False, device, dtype)
        self.o_proj = nn.Linear(h * d, c, False, device, dtype)
        self.q_norm = nn.RMSNorm(d, eps, device=device, dtype=dtype)
        self.k_norm = nn.RMSNorm(d, eps, device=device, dtype=dtype)
        pack(self.q_proj, self.k_proj, self.v_proj)

    def _project(self, x: Tensor) -> Sequence[Tensor]:
        """q, k and v, [B*S, heads * D] each: of one product where these are columns of it."""
        layers = self.q_proj, self.k_proj, self.v_proj
        weights = joined_weights(*layers)
        if weights is None:
            return [layer(x) for layer in layers]
        return _C.split(_C.linear_joined(x, weights), tuple(weight.shape[0] for weight in weights), -1)

    def _rotated(self, q: Tensor, key: Tensor, positions: Tensor | None, seq: int) -> tuple[Tensor, Tensor]:
        """q and k [B, S, heads, D], each head normalised and then rotated."""
        a, b, place = self.q_norm, self.k_norm, (self.theta, positions, None if positions is not None else seq)
        stock = is_stock(a, nn.RMSNorm) and is_stock(b, nn.RMSNorm) and a.eps == b.eps
        if stock and a.eps is not None and a.weight is not None and b.weight is not None:
            return _C.qk_norm_rope(q, key, a.weight, b.weight, a.eps, *place)
        return _C.rope(a(q), *place), _C.rope(b(key), *place)

    def forward(
        self, x: Tensor, batch: int, seq: int, positions: Tensor | None = None, cache: KVCache | None = None
    ) -> Tensor:
        h, k, d = self.heads, self.kv_heads, self.head_dim
        q, key, value = self._project(x)
        q, key = q.view(batch, seq, h, d), key.view(batch, seq, k, d)
        q, key = self._rotated(q, key, positions, seq)
        q, key, value = q.transpose(1, 2), key.transpose(1, 2), value.view(batch, seq, k, d).transpose(1, 2)
        if cache is not None:
            key, value = cache.append(key, value)
        y = _C.scaled_dot_product_attention(q, key, value, True, None, h != k)
        return self.o_proj(y.transpose(1, 2).reshape(batch * seq, h * d))


class MLP(nn.Module):
    """SwiGLU feed-forward layer: x [B*S, C] -> [B*S, C]."""

    def __init__(self, config: Qwen3Config, dtype: _C.dtype, device: Device) -> None:
        c, f = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(c, f, False, device, dtype)
        self.up_proj = nn.Linear(c, f, False, device, dtype)
        self.down_proj = nn.Linear(f, c, False, device, dtype)
        pack(self.gate_proj, self.up_proj)

    def forward(self, x: Tensor) -> Tensor:
        weights = joined_weights(self.gate_proj, self.up_proj)
        if weights is None:
            return self.down_proj(_C.swiglu(self.gate_proj(x), self.up_proj(x)))
        return self.down_proj(_C.swiglu(_C.linear_joined(x, weights)))


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x)). With mhc_streams = n > 0 each + is a hyper-connection:
    x [B*S, n, C].
    """

    def __init__(self, config: Qwen3Config, dtype: _C.dtype, device: Device) -> None:
        eps = config.rms_norm_eps
        self.self_attn = Attention(config, dtype, device)
        self.mlp = MLP(config, dtype, device)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps, device=device, dtype=dtype)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps, device=device, dtype=dtype)
        self.streams = config.mhc_streams
        if self.streams:
            options: dict[str, Any] = dict(iters=config.mhc_iters, form=config.mhc_form, device=device, dtype=dtype)
            self.attn_mhc = nn.HyperConnection(config.hidden_size, self.streams, **options)
            self.mlp_mhc = nn.HyperConnection(config.hidden_size, self.streams, **options)

    def _attend(
        self, x: Tensor, batch: int, seq: int, positions: Tensor | None = None, cache: KVCache | None = None
    ) -> Tensor:
        return self.self_attn(self.input_layernorm(x), batch, seq, positions, cache)

    def _feed(self, x: Tensor, *_: object) -> Tensor:
        return self.mlp(self.post_attention_layernorm(x))

    def parts(self) -> tuple[_Part, _Part]:
        """The hyper-connections with what they wrap."""
        return (self.attn_mhc, self._attend), (self.mlp_mhc, self._feed)

    def forward(
        self, x: Tensor, batch: int, seq: int, positions: Tensor | None = None, cache: KVCache | None = None
    ) -> Tensor:
        if self.streams:
            for connection, sublayer in self.parts():
                x = connection(x, batch, seq, positions, cache, sublayer=sublayer)
            return x
        x = x + self._attend(x, batch, seq, positions, cache)
        return x + self._feed(x)


class Trunk(nn.Module):
    """Everything but the head: ids [B, S] -> [B*S, C]."""

    def __init__(self, config: Qwen3Config, dtype: _C.dtype, device: Device) -> None:
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, device, dtype)
        self.layers = nn.ModuleList(Block(config, dtype, device) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps, device=device, dtype=dtype)
        self.gradient_checkpointing, self.stream_checkpointing = False, 0
        self.streams = config.mhc_streams
        if self.streams:
            mode = config.mhc_contraction
            self.stream_head = nn.StreamContraction(config.hidden_size, self.streams, mode, device=device, dtype=dtype)

    def _recomputes_streams(self) -> bool:
        """Whether the parts of the layers may run without the layers; when not, the layers are called."""
        return bool(self.stream_checkpointing and self.streams) and all(
            is_stock(layer, Block) and all(is_stock(part, nn.HyperConnection) for part, _ in layer.parts())
            for layer in self.layers
        )

    def forward(self, ids: Tensor, positions: Tensor | None = None, caches: list[KVCache] | None = None) -> Tensor:
        batch, seq = ids.shape
        x = self.embed_tokens(ids.reshape(batch * seq))
        if self.streams:
            x = nn.expand_streams(x, self.streams)
        training = self.training and caches is None
        if self.gradient_checkpointing and training:
            for layer in self.layers:
                x = checkpoint(layer, x, batch, seq, positions)
        elif self._recomputes_streams() and training:
            parts = [part for layer in self.layers for part in layer.parts()]
            for start in range(0, len(parts), self.stream_checkpointing):
                block = parts[start : start + self.stream_checkpointing]
                x = nn.recompute_streams(block, x, batch, seq, positions)
        else:
            for i, layer in enumerate(self.layers):
                x = layer(x, batch, seq, positions, None if caches is None else caches[i])
        return self.norm(self.stream_head(x) if self.streams else x)


class Qwen3(LanguageModel):
    """A Qwen3 language model.

        config = Qwen3Config(vocab_size=256, hidden_size=192, ...)   # or Qwen3Config.from_json(directory)
        model = Qwen3(config)
        model.loss(ids, targets).backward()

    Matrices and embeddings start normal with deviation `initializer_range`, norms at one. dtype None is the config's.
    With `model.gradient_checkpointing = True` each layer is computed again in backward instead of keeping its
    activations (same bits). With config.mhc_streams, `model.stream_checkpointing = k` keeps the residual streams of
    every k-th sublayer only and computes the others again, without running any sublayer twice (same bits).

    Any sub-module may be replaced, subclassed, wrapped or hooked; forward, loss and generate follow. The head is tied
    to the token table while lm_head is None: it reads embed_tokens.weight and does not call embed_tokens. With
    changed layers or connections, `stream_checkpointing` may keep all streams (see nn.recompute_streams).
    """

    def __init__(self, config: Qwen3Config, device: Device = None, dtype: _C.dtype | None = None) -> None:
        if not isinstance(config, Qwen3Config):
            raise TypeError(f"Qwen3: config must be a Qwen3Config, got {type(config).__name__}")
        config.check()
        self.config: Qwen3Config = config
        dtype = _C.dtype(config.dtype) if dtype is None else dtype
        self.model = Trunk(config, dtype, device)
        self.lm_head: nn.Linear | None = None
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, False, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all parameters anew from the default generator."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, 0.0, self.config.initializer_range)
            elif isinstance(module, (nn.RMSNorm, nn.HyperConnection, nn.StreamContraction)):
                module.reset_parameters()

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether training recomputes the activations of each layer in backward."""
        return self.model.gradient_checkpointing

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, on: bool) -> None:
        if on and self.model.stream_checkpointing:
            raise ValueError(
                f"Qwen3: gradient_checkpointing must be off while stream_checkpointing is {self.stream_checkpointing}, "
                f"got {on!r}"
            )
        self.model.gradient_checkpointing = bool(on)

    @property
    def stream_checkpointing(self) -> int:
        """Sublayers in a block whose residual streams are computed again in backward; 0 keeps them all."""
        return self.model.stream_checkpointing

    @stream_checkpointing.setter
    def stream_checkpointing(self, size: int) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise ValueError(f"Qwen3: stream_checkpointing must be an integer, at least 0, got {size!r}")
        if size and not self.config.mhc_streams:
            raise ValueError(f"Qwen3: stream_checkpointing must be 0 without streams (mhc_streams), got {size}")
        if size and self.model.gradient_checkpointing:
            raise ValueError(f"Qwen3: stream_checkpointing must be 0 while gradient_checkpointing is on, got {size}")
        self.model.stream_checkpointing = size

    def _table(self) -> Tensor:
        """The weight [V, C] of the head that is tied to the token table."""
        weight = getattr(self.model.embed_tokens, "weight", None)
        if not isinstance(weight, _C.Tensor):
            kind = type(self.model.embed_tokens).__name__
            raise TypeError(f"Qwen3: embed_tokens must have a weight while lm_head is None, got {kind}")
        return weight

    def _check_ids(self, name: str, ids: Tensor) -> None:
        if not isinstance(ids, _C.Tensor):
            raise TypeError(f"Qwen3: {name} must be a Tensor, got {type(ids).__name__}")
        if ids.ndim != 2:
            raise ValueError(f"Qwen3: {name} must have shape (B, S), got {tuple(ids.shape)}")
        if ids.shape[1] == 0:
            raise ValueError(f"Qwen3: {name} must have at least one token per sequence, got shape {tuple(ids.shape)}")

    def forward(self, ids: Tensor, positions: Tensor | None = None, caches: list[KVCache] | None = None) -> Tensor:
        """ids [B, S] int64 or int32 -> logits [B, S, V].

        positions: None (0..S-1 in every sequence) or int64 [B*S]. caches: a list of KVCache, one per layer, see
        `make_caches`.
        """
        self._check_ids("ids", ids)
        batch, seq = ids.shape
        x = self.model(ids, positions, caches)
        logits = _C.linear(x, self._table()) if self.lm_head is None else self.lm_head(x)
        return logits.view(batch, seq, logits.shape[-1])

    def loss(self, ids: Tensor, targets: Tensor, ignore_index: int = -100, reduction: str = "mean") -> Tensor:
        """Cross entropy in nats of targets [B, S] given ids [B, S]; mean over all rows that are not ignored, "sum", or
        "none" -> [B*S].

        One op computes head and loss, see functional.linear_cross_entropy, unless the head is not a plain nn.Linear
        without bias, or head or model have hooks or another `forward`: then it is the cross entropy of self(ids).
        """
        self._check_ids("ids", ids)
        self._check_ids("targets", targets)
        if ids.shape != targets.shape:
            raise ValueError(f"Qwen3: targets must have shape {tuple(ids.shape)}, got {tuple(targets.shape)}")
        options: dict[str, Any] = dict(ignore_index=ignore_index, reduction=reduction)
        head, targets = self.lm_head, targets.reshape(-1)
        whole = is_stock(self, type(self)) and type(self).forward is Qwen3._defined_forward
        if whole and (head is None or (is_stock(head, nn.Linear) and head.bias is None)):
            weight = self._table() if head is None else head.weight
            return _C.linear_cross_entropy(self.model(ids), weight, targets, **options)
        logits = self(ids)
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets, **options)

    def load_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True) -> LoadResult:
        """As Module.load_state_dict; a tied model accepts `lm_head.weight` when it equals the embedding and refuses it
        otherwise.
        """
        head = state_dict.get("lm_head.weight")
        if head is not None and self.lm_head is None:
            table = state_dict.get("model.embed_tokens.weight")
            if table is None or head.shape != table.shape or not (head == table).all().item():
                raise ValueError(
                    "load_state_dict: lm_head.weight must equal model.embed_tokens.weight when tied, got another value"
                )
            state_dict = {key: value for key, value in state_dict.items() if key != "lm_head.weight"}
        return super().load_state_dict(state_dict, strict)

    def num_parameters(self, embeddings: bool = True) -> int:
        """Number of trained values; without `embeddings` those of the token table are left out (unless they are the
        head too).
        """
        count = sum(parameter.numel() for parameter in self.parameters())
        if not embeddings and self.lm_head is not None:
            count -= sum(parameter.numel() for parameter in self.model.embed_tokens.parameters())
        return count

    def flops_per_token(self, seq_len: int) -> int:
        """Floating-point operations of forward and backward per token at sequences of seq_len.

        6 per weight of a matrix product, and 12 H D seq_len per layer for attention (the causal half is not subtracted;
        Chowdhery et al. 2022, PaLM, appendix B).
        """
        config = self.config
        attention = 12 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * seq_len
        return 6 * self.num_parameters(embeddings=False) + attention

    def make_caches(self, batch: int, length: int) -> list[KVCache]:
        """Empty key/value caches for `length` positions of `batch` sequences, one per layer."""
        return [KVCache(batch, length) for _ in self.model.layers]

    def generate(self, ids: Any, max_new_tokens: int, **options: Any) -> Tensor:
        """Continues ids by sampling; see xtrain.generation.generate."""
        return generation.generate(self, ids, max_new_tokens, **options)

    @classmethod
    def from_pretrained(cls, directory: str | os.PathLike[str], dtype: _C.dtype | None = None) -> Self:
        """A model from a Hugging Face model directory; dtype None keeps that of the files."""
        model = saving.load_model(directory, dtype=dtype)
        if not isinstance(model, cls):
            raise ValueError(f"from_pretrained: {directory} must hold a {cls.__name__}, got {type(model).__name__}")
        return model

    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Writes config.json and model.safetensors, a directory that Hugging Face's from_pretrained reads."""
        saving.save_model(self, directory)


def tensor_shapes(config: Qwen3Config) -> Iterator[_Shape]:
    """(name, shape) of what a file must hold for this config, in the order of the model; nothing is allocated. A tied
    head is no tensor.
    """
    c, n = config.hidden_size, config.mhc_streams
    yield "model.embed_tokens.weight", (config.vocab_size, c)
    layer = _layer_shapes(config)
    for i in range(config.num_hidden_layers):
        for name, shape in layer:
            yield f"model.layers.{i}.{name}", shape
    yield "model.norm.weight", (c,)
    if n and config.mhc_contraction == "learned":
        yield from _coefficient_shapes("model.stream_head", n, n * c, 1)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, c)


def count_parameters(config: Qwen3Config) -> int:
    """Number of trained values of a model of this config, which is not built."""
    layer = sum(math.prod(shape) for _, shape in _layer_shapes(config))
    rest = tensor_shapes(dataclasses.replace(config, num_hidden_layers=0))
    return config.num_hidden_layers * layer + sum(math.prod(shape) for _, shape in rest)


def _layer_shapes(config: Qwen3Config) -> list[_Shape]:
    c, f, d, n = config.hidden_size, config.intermediate_size, config.head_dim, config.mhc_streams
    q, kv = config.num_attention_heads * d, config.kv_heads * d
    shapes: list[_Shape] = [
        ("self_attn.q_proj.weight", (q, c)),
        ("self_attn.k_proj.weight", (kv, c)),
        ("self_attn.v_proj.weight", (kv, c)),
        ("self_attn.o_proj.weight", (c, q)),
        ("self_attn.q_norm.weight", (d,)),
        ("self_attn.k_norm.weight", (d,)),
        ("mlp.gate_proj.weight", (f, c)),
        ("mlp.up_proj.weight", (f, c)),
        ("mlp.down_proj.weight", (c, f)),
        ("input_layernorm.weight", (c,)),
        ("post_attention_layernorm.weight", (c,)),
    ]
    for name in ("attn_mhc", "mlp_mhc") if n else ():
        shapes += _coefficient_shapes(name, n * n + 2 * n, n * c, 3)
    return shapes


def _coefficient_shapes(name: str, rows: int, columns: int, alphas: int) -> list[_Shape]:
    return [(f"{name}.phi", (rows, columns)), (f"{name}.alpha", (alphas,)), (f"{name}.bias", (rows,))]


ARCHITECTURE = Architecture(
    config=Qwen3Config,
    model=Qwen3,
    tensor_shapes=tensor_shapes,
    count_parameters=count_parameters,
    sizes=("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size", "mhc_streams"),
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    streams=True,
    stays_wide=lambda name: "_mhc." in name or "stream_head" in name,  # hyper-connections
)
