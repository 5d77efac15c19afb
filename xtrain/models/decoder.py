"""The decoder that Llama, Mistral, Qwen2 and Qwen3 are: a pre-norm transformer with RMSNorm, RoPE, grouped queries and
SwiGLU. What a family adds, its config says: norms of queries and keys, biases, scaled frequencies, hyper-connections.
Gemma 2 has layers of its own.

Letters: B batch, S sequence, C hidden_size, H query heads, K kv heads, D head_dim, F intermediate_size, V vocab_size.
Every per-token layer works on [B*S, C]: one matrix product per projection whatever B is. Only attention knows the
sequences, through strided [B, heads, S, D] views of the same memory. The attribute tree is Hugging Face's, so
`state_dict()` names are the names in the files.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from .. import _C, nn
from .._C import Tensor
from .._types import Device, is_whole
from ..autograd import recompute
from ..generation import KVCache
from ..nn.layers import joined_weights
from ..nn.module import is_stock, pack
from ..optim.qk_clip import AttentionHeads
from .causal_lm import CausalLM
from .decoder_config import DecoderConfig
from .policies import check_policy, run_in_line, run_layers, run_two_parts, runs_in_line
from .registry import RECOMPUTE, Architecture

# The most rows of a step of generation on a GPU that is one op, _C.decoder_step: where the caches have room for 512
# positions at most, and else; 0: none. With more the ops of its parts may take less time (docs/worklog/generation.md).
STEPS_AT_ONCE = (16, 4)

_Part = tuple[nn.HyperConnection, Callable[..., Tensor]]  # a hyper-connection and the layer that it wraps
_StepNumbers = tuple[float, float, dict[str, Any], tuple[int, int, int]]  # eps, theta, scaling of RoPE, sizes of heads
_Shape = tuple[str, tuple[int, ...]]  # of a tensor: its name and its shape


def _pack(*layers: nn.Linear) -> None:
    """Moves weights together, and biases where all layers have one: what joined_weights looks for."""
    pack(*layers)
    if all(layer.bias is not None for layer in layers):
        pack(*layers, name="bias")


class Attention(nn.Module):
    """Causal self-attention: x [B*S, C] -> [B*S, C]; positions [B*S] and documents as in Decoder.forward, cache of this
    layer. window: the tokens that a token sees, itself included; None: all.
    """

    def __init__(self, config: DecoderConfig, dtype: _C.dtype, device: Device, window: int | None = None) -> None:
        c, h, k, d = config.hidden_size, config.num_attention_heads, config.kv_heads, config.per_head
        self.heads, self.kv_heads, self.head_dim, self.window = h, k, d, window
        self.theta, eps = float(config.rope_theta), float(config.rms_norm_eps)
        self.scaling = config.scaling  # of RoPE: keywords of functional.rope
        self.scores = config.score_options  # keywords of functional.scaled_dot_product_attention
        self.q_proj = nn.Linear(c, h * d, config.has_bias("q_proj"), device, dtype)
        self.k_proj = nn.Linear(c, k * d, config.has_bias("k_proj"), device, dtype)
        self.v_proj = nn.Linear(c, k * d, config.has_bias("v_proj"), device, dtype)
        self.o_proj = nn.Linear(h * d, c, config.has_bias("o_proj"), device, dtype)
        self.q_norm = nn.RMSNorm(d, eps, device=device, dtype=dtype) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(d, eps, device=device, dtype=dtype) if config.qk_norm else None
        _pack(self.q_proj, self.k_proj, self.v_proj)

    def qk_heads(self) -> AttentionHeads:
        """The parameters that queries and keys come from, for optim.QKClip. ValueError where they are normalised."""
        if self.q_norm is not None or self.k_norm is not None:
            raise ValueError("QKClip: model must not normalise queries and keys, which do not grow with their weights")
        query, key = (
            [(tensor, 0, 0) for tensor in (layer.weight, layer.bias) if tensor is not None]
            for layer in (self.q_proj, self.k_proj)
        )
        return AttentionHeads(self.heads, self.kv_heads, self.head_dim, query, key)

    def _project(self, x: Tensor) -> Sequence[Tensor]:
        """q, k and v, [B*S, heads * D] each: of one product where these are columns of it."""
        layers = self.q_proj, self.k_proj, self.v_proj
        joined = joined_weights(*layers)
        if joined is None:
            return [layer(x) for layer in layers]
        return _C.split(_C.linear_joined(x, *joined), tuple(weight.shape[0] for weight in joined[0]), -1)

    def _rotated(self, q: Tensor, key: Tensor, positions: Tensor | None, seq: int) -> tuple[Tensor, Tensor]:
        """q and k [B, S, heads, D], each head normalised, where it has a norm, and then rotated."""
        a, b, place = self.q_norm, self.k_norm, (self.theta, positions, None if positions is not None else seq)
        if isinstance(a, nn.RMSNorm) and isinstance(b, nn.RMSNorm) and a.weight is not None and b.weight is not None:
            stock = is_stock(a, nn.RMSNorm) and is_stock(b, nn.RMSNorm)
            if stock and a.eps is not None and a.eps == b.eps:
                return _C.qk_norm_rope(q, key, a.weight, b.weight, a.eps, *place, **self.scaling)
        q, key = q if a is None else a(q), key if b is None else b(key)
        return _C.rope(q, *place, **self.scaling), _C.rope(key, *place, **self.scaling)

    def forward(
        self,
        x: Tensor,
        batch: int,
        seq: int,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        h, k, d = self.heads, self.kv_heads, self.head_dim
        q, key, value = self._project(x)
        q, key = q.view(batch, seq, h, d), key.view(batch, seq, k, d)
        q, key = self._rotated(q, key, positions, seq)
        q, key, value = q.transpose(1, 2), key.transpose(1, 2), value.view(batch, seq, k, d).transpose(1, 2)
        if cache is not None:
            y = cache.attend(q, key, value, window=self.window, **self.scores)
        else:
            y = _C.scaled_dot_product_attention(
                q, key, value, True, enable_gqa=h != k, documents=documents, window=self.window, **self.scores
            )
        return self.o_proj(y.transpose(1, 2).reshape(batch * seq, h * d))


class MLP(nn.Module):
    """SwiGLU feed-forward layer: x [B*S, C] -> [B*S, C]."""

    def __init__(self, config: DecoderConfig, dtype: _C.dtype, device: Device) -> None:
        c, f = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(c, f, config.has_bias("gate_proj"), device, dtype)
        self.up_proj = nn.Linear(c, f, config.has_bias("up_proj"), device, dtype)
        self.down_proj = nn.Linear(f, c, config.has_bias("down_proj"), device, dtype)
        _pack(self.gate_proj, self.up_proj)

    def forward(self, x: Tensor) -> Tensor:
        joined, down = joined_weights(self.gate_proj, self.up_proj), self.down_proj
        if joined is None:
            return down(_C.swiglu(self.gate_proj(x), self.up_proj(x)))
        if joined[1] is None and is_stock(down, nn.Linear) and down.bias is None:
            gate, up = joined[0]
            return _C.swiglu_mlp(x, gate, up, down.weight)
        return down(_C.swiglu(_C.linear_joined(x, *joined)))


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x)). With mhc_streams = n > 0 each + is a hyper-connection:
    x [B*S, n, C]. layer: its number, from 0. rest: positions, cache and documents, as of Attention.
    """

    def __init__(self, config: DecoderConfig, dtype: _C.dtype, device: Device, layer: int = 0) -> None:
        eps = config.rms_norm_eps
        self.self_attn = Attention(config, dtype, device, config.window(layer))
        self.mlp = MLP(config, dtype, device)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps, device=device, dtype=dtype)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps, device=device, dtype=dtype)
        self.streams = config.mhc_streams
        if self.streams:
            options: dict[str, Any] = dict(iters=config.mhc_iters, form=config.mhc_form, device=device, dtype=dtype)
            self.attn_mhc = nn.HyperConnection(config.hidden_size, self.streams, **options)
            self.mlp_mhc = nn.HyperConnection(config.hidden_size, self.streams, **options)

    def _attend(self, x: Tensor, batch: int, seq: int, *rest: Any) -> Tensor:
        return self.self_attn(self.input_layernorm(x), batch, seq, *rest)

    def _feed(self, x: Tensor, *_: object) -> Tensor:
        return self.mlp(self.post_attention_layernorm(x))

    def parts(self) -> tuple[_Part, _Part]:
        """The hyper-connections with what they wrap."""
        return (self.attn_mhc, self._attend), (self.mlp_mhc, self._feed)

    def forward(self, x: Tensor, batch: int, seq: int, *rest: Any) -> Tensor:
        if self.streams:
            for connection, sublayer in self.parts():
                x = connection(x, batch, seq, *rest, sublayer=sublayer)
            return x
        x, y = self.run(x, None, batch, seq, *rest)
        return x + y

    def run(self, x: Tensor, y: Tensor | None, batch: int, seq: int, *rest: Any) -> tuple[Tensor, Tensor]:
        """As forward(x + y), but the sum comes in and goes out in two terms: see run_two_parts. Without streams."""
        norms = self.input_layernorm, self.post_attention_layernorm
        return run_two_parts(x, y, norms, self.self_attn, self.mlp, batch, seq, *rest)


def _runs_in_line(layer: Any, kind: type[Block] = Block) -> bool:
    """Whether a layer need not be called: as policies.runs_in_line, and it has no streams of hyper-connections."""
    return runs_in_line(layer, kind) and not layer.streams


def _step_weights(layer: Any) -> tuple[list[Tensor], _StepNumbers] | None:
    """The weights of a layer that _C.decoder_step takes, and what all layers must have in common; None where the op
    does not compute what calling the layer does.
    """
    if not _runs_in_line(layer):
        return None
    attn, mlp = layer.self_attn, layer.mlp
    if not (is_stock(attn, Attention) and is_stock(mlp, MLP)) or attn.window is not None:
        return None
    norms: list[Any] = [layer.input_layernorm, layer.post_attention_layernorm]
    of_heads: list[Any] = [attn.q_norm, attn.k_norm] if attn.q_norm is not None or attn.k_norm is not None else []
    linears: list[Any] = [attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    if not all(is_stock(norm, nn.RMSNorm) and norm.weight is not None for norm in norms + of_heads):
        return None
    eps = {norm.eps for norm in norms + of_heads}
    if len(eps) > 1 or None in eps or not all(is_stock(one, nn.Linear) and one.bias is None for one in linears):
        return None
    q, k, v, o, gate, up, down = (one.weight for one in linears)
    a, b = (norm.weight for norm in norms)
    weights = [a, q, k, v, *(norm.weight for norm in of_heads), o, b, gate, up, down]
    return weights, (eps.pop(), attn.theta, attn.scaling, (attn.heads, attn.kv_heads, attn.head_dim))


class Trunk(nn.Module):
    """Everything but the head: ids [B, S] -> [B*S, C]. A family may have other parts: a table, layers and norm."""

    table_kind: ClassVar[type[nn.Embedding]] = nn.Embedding
    block_kind: ClassVar[type[Block]] = Block
    norm_kind: ClassVar[type[nn.RMSNorm]] = nn.RMSNorm

    def __init__(self, config: DecoderConfig, dtype: _C.dtype, device: Device) -> None:
        layers = range(config.num_hidden_layers)
        self.embed_tokens = self.table_kind(config.vocab_size, config.hidden_size, device, dtype)
        self.layers = nn.ModuleList(self.block_kind(config, dtype, device, i) for i in layers)
        self.norm = self.norm_kind(config.hidden_size, config.rms_norm_eps, device=device, dtype=dtype)
        self.recompute, self.stream_checkpointing = "none", 0
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

    def step_arguments(
        self, rows: int, positions: Tensor | None, caches: list[KVCache] | None
    ) -> tuple[list[Tensor], list[Tensor], _StepNumbers] | None:
        """Weights, caches and numbers for _C.decoder_step, which computes all layers for one new token a row with the
        bits of the layers; None where the op would not do.
        """
        if positions is None or positions.device.type != "cuda" or caches is None or _C.is_grad_enabled():
            return None
        kept: list[Tensor] = []
        for cache in caches:
            if (
                type(cache) is not KVCache
                or cache.positions is not positions
                or cache.key is None
                or cache.value is None
            ):
                return None
            kept += cache.key, cache.value
        if not kept or rows > STEPS_AT_ONCE[kept[0].shape[2] > 512]:
            return None
        weights: list[Tensor] = []
        common: _StepNumbers | None = None
        for layer in self.layers:
            found = _step_weights(layer)
            if found is None or common not in (None, found[1]):
                return None
            weights += found[0]
            common = found[1]
        if common is None or not all(one.dtype == weights[0].dtype and one.is_contiguous() for one in weights):
            return None
        return weights, kept, common

    def _step(self, x: Tensor, positions: Tensor | None, caches: list[KVCache] | None) -> Tensor | None:
        """All layers for one new token a row in one op; None where the op would not do."""
        found = self.step_arguments(len(x), positions, caches)
        if found is None or positions is None or found[0][0].dtype != x.dtype:
            return None
        weights, kept, (eps, theta, scaling, _) = found
        return _C.decoder_step(x, positions, weights, kept, eps, theta, **scaling, plain=False)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        caches: list[KVCache] | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        if self.recompute in ("cheap", "full") and self.training and caches is None:
            with recompute():
                return self._run(ids, positions, caches, documents)
        return self._run(ids, positions, caches, documents)

    def _run(
        self, ids: Tensor, positions: Tensor | None, caches: list[KVCache] | None, documents: Tensor | None
    ) -> Tensor:
        batch, seq = ids.shape
        # A layer of the user's need not know what it is not given.
        more = () if documents is None else (documents,)
        places = (positions,) if documents is None else (positions, None, documents)
        x = self.embed_tokens(ids.reshape(batch * seq))
        if self.streams:
            x = nn.expand_streams(x, self.streams)
        training = self.training and caches is None
        if self.recompute in ("block", "full") and training:
            x = run_layers(self.layers, self.recompute, x, batch, seq, *places)
        elif self._recomputes_streams() and training:
            parts = [part for layer in self.layers for part in layer.parts()]
            for start in range(0, len(parts), self.stream_checkpointing):
                block = parts[start : start + self.stream_checkpointing]
                x = nn.recompute_streams(block, x, batch, seq, *places)
        elif seq == 1 and documents is None and (stepped := self._step(x, positions, caches)) is not None:
            x = stepped
        else:
            in_line = functools.partial(_runs_in_line, kind=self.block_kind)
            x, y = run_in_line(self.layers, in_line, x, (batch, seq, positions), caches, more)
            x = x if y is None else x + y
        return self.norm(self.stream_head(x) if self.streams else x)


class Decoder(CausalLM):
    """A language model of one of the families (see the subclasses).

        config = Qwen3Config(vocab_size=256, hidden_size=192, ...)   # or Qwen3Config.from_json(directory)
        model = Qwen3(config)
        model.loss(ids, targets).backward()

    Matrices and embeddings start normal with deviation `initializer_range`, norms at one, biases at zero. dtype None is
    the config's.

    `model.recompute` says what training computes again in backward instead of keeping it, with the same bits: "none",
    "cheap" (outputs of norms, RoPE and SwiGLU, see xt.recompute), "block" (each layer from its input), "full" (groups
    of about the root of all layers from the group's input, then each layer from its own, with what is cheap inside: the
    least memory, for two more forwards). `gradient_checkpointing` is whether it is "block" or "full". With
    config.mhc_streams, `model.stream_checkpointing = k` keeps the residual streams of every k-th sublayer only and
    computes the others again, without running any sublayer twice (same bits).

    Any sub-module may be replaced, subclassed, wrapped or hooked; forward, loss and generate follow. The head is tied
    to the token table while lm_head is None: it reads embed_tokens.weight and does not call embed_tokens. With
    changed layers or connections, `stream_checkpointing` may keep all streams (see nn.recompute_streams).
    """

    config_class: ClassVar[type[DecoderConfig]]
    trunk_kind: ClassVar[type[Trunk]] = Trunk
    table: ClassVar[str] = "model.embed_tokens"

    def __init__(self, config: DecoderConfig, device: Device = None, dtype: _C.dtype | None = None) -> None:
        wanted = self.config_class
        if not isinstance(config, wanted):
            raise TypeError(f"{wanted.family}: config must be a {wanted.__name__}, got {type(config).__name__}")
        config.check()
        self.config: Any = config
        dtype = _C.dtype(config.dtype) if dtype is None else dtype
        self.model = self.trunk_kind(config, dtype, device)
        self.lm_head: nn.Linear | None = None
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, False, device, dtype)
        self.reset_parameters()

    def _step(self, ids: Tensor, positions: Tensor | None, caches: list[KVCache] | None) -> Tensor | None:
        trunk, head = self.model, self.lm_head
        if not is_stock(trunk, Trunk) or trunk.streams:
            return None
        table, norm = trunk.embed_tokens, trunk.norm
        if not is_stock(table, nn.Embedding) or not is_stock(norm, nn.RMSNorm) or norm.weight is None:
            return None
        if head is not None and (not is_stock(head, nn.Linear) or head.bias is not None):
            return None
        weight = table.weight if head is None else head.weight
        found = trunk.step_arguments(len(ids), positions, caches)
        if found is None or positions is None:
            return None
        weights, kept, (eps, theta, scaling, _) = found
        last = norm.weight, weight
        if norm.eps != eps or not all(
            one.dtype == weights[0].dtype and one.is_contiguous() for one in (table.weight, *last)
        ):
            return None
        x = table(ids.reshape(len(ids)))
        return _C.decoder_step(
            x, positions, weights, kept, eps, theta, **scaling, plain=False, last_norm=last[0], head=last[1]
        )

    def reset_parameters(self) -> None:
        """Draws all parameters anew from the default generator."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, 0.0, self.config.initializer_range)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, (nn.RMSNorm, nn.HyperConnection, nn.StreamContraction)):
                module.reset_parameters()

    @property
    def recompute(self) -> str:
        """Which activations are not kept but computed again in backward: none, cheap, block or full."""
        return self.model.recompute

    @recompute.setter
    def recompute(self, policy: str) -> None:
        family, size = self.config.family, self.model.stream_checkpointing
        check_policy(family, policy)
        if policy in ("block", "full") and size:
            raise ValueError(
                f"{family}: recompute must be none or cheap while stream_checkpointing is {size}, got {policy!r}"
            )
        self.model.recompute = policy

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether training recomputes the activations of each layer in backward."""
        return self.model.recompute in ("block", "full")

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, on: bool) -> None:
        if on and self.model.stream_checkpointing:
            raise ValueError(
                f"{self.config.family}: gradient_checkpointing must be off while stream_checkpointing is "
                f"{self.stream_checkpointing}, got {on!r}"
            )
        if bool(on) != self.gradient_checkpointing:
            self.model.recompute = "block" if on else "none"

    @property
    def stream_checkpointing(self) -> int:
        """Sublayers in a block whose residual streams are computed again in backward; 0 keeps them all."""
        return self.model.stream_checkpointing

    @stream_checkpointing.setter
    def stream_checkpointing(self, size: int) -> None:
        if not is_whole(size) or size < 0:
            raise ValueError(f"{self.config.family}: stream_checkpointing must be an integer, at least 0, got {size!r}")
        if size and not self.config.mhc_streams:
            raise ValueError(
                f"{self.config.family}: stream_checkpointing must be 0 without streams (mhc_streams), got {size}"
            )
        if size and self.gradient_checkpointing:
            raise ValueError(
                f"{self.config.family}: stream_checkpointing must be 0 while gradient_checkpointing is on, got {size}"
            )
        self.model.stream_checkpointing = size

    def flops_per_token(self, seq_len: int) -> int:
        """Floating-point operations of forward and backward per token at sequences of seq_len.

        6 per weight of a matrix product, 4 where it is frozen, and 12 H D seq_len per layer for attention (the causal
        half is not subtracted; Chowdhery et al. 2022, PaLM, appendix B).
        """
        config = self.config
        attention = 12 * config.num_hidden_layers * config.num_attention_heads * config.per_head * seq_len
        return 6 * self.num_parameters(embeddings=False) - 2 * self.idle_weights() + attention


def tensor_shapes(config: DecoderConfig) -> Iterator[_Shape]:
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


def count_parameters(config: DecoderConfig) -> int:
    """Number of trained values of a model of this config, which is not built."""
    layer = sum(math.prod(shape) for _, shape in _layer_shapes(config))
    rest = copy.copy(config)  # not checked: it names kinds of layers, which are none
    rest.num_hidden_layers = 0
    return config.num_hidden_layers * layer + sum(math.prod(shape) for _, shape in tensor_shapes(rest))


def _layer_shapes(config: DecoderConfig) -> list[_Shape]:
    c, f, d, n = config.hidden_size, config.intermediate_size, config.per_head, config.mhc_streams
    q, kv = config.num_attention_heads * d, config.kv_heads * d
    shapes: list[_Shape] = []
    for place, sizes in (
        ("self_attn", {"q_proj": (q, c), "k_proj": (kv, c), "v_proj": (kv, c), "o_proj": (c, q)}),
        ("mlp", {"gate_proj": (f, c), "up_proj": (f, c), "down_proj": (c, f)}),
    ):
        for name, shape in sizes.items():
            shapes.append((f"{place}.{name}.weight", shape))
            if config.has_bias(name):
                shapes.append((f"{place}.{name}.bias", shape[:1]))
        if place == "self_attn" and config.qk_norm:
            shapes += [("self_attn.q_norm.weight", (d,)), ("self_attn.k_norm.weight", (d,))]
    shapes += [(f"{name}.weight", (c,)) for name in config.norms]
    for name in ("attn_mhc", "mlp_mhc") if n else ():
        shapes += _coefficient_shapes(name, n * n + 2 * n, n * c, 3)
    return shapes


def _coefficient_shapes(name: str, rows: int, columns: int, alphas: int) -> list[_Shape]:
    return [(f"{name}.phi", (rows, columns)), (f"{name}.alpha", (alphas,)), (f"{name}.bias", (rows,))]


def decoder_architecture(model: type[Decoder], **options: Any) -> Architecture:
    """What training, saving and sampling ask about a family; options as of Architecture."""
    return Architecture(
        config=model.config_class,
        model=model,
        tensor_shapes=tensor_shapes,
        count_parameters=count_parameters,
        sizes=("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size", *options.pop("sizes", ())),
        tied={"lm_head.weight": "model.embed_tokens.weight"},
        recompute=RECOMPUTE,
        **options,
    )
