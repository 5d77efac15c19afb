"""A Qwen3 in plain PyTorch, written for the tests and the benchmark from the paper's formulas; parameter names are Hugging Face's."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import xtrain as xt
from xtrain.models import Qwen3, Qwen3Config

SHAPES = {
    "2x4": (
        2,
        4,
        dict(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
        ),
    ),
    "3x37": (
        3,
        37,
        dict(
            vocab_size=113,
            hidden_size=72,
            intermediate_size=200,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=24,
        ),
    ),
}


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotate(x, cos, sin):
    """x [B, H, S, D], cos and sin [S, D/2]."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Attention(nn.Module):
    def __init__(self, c) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, c.hidden_size, bias=False)
        self.q_norm, self.k_norm = RMSNorm(self.dim, c.rms_norm_eps), RMSNorm(self.dim, c.rms_norm_eps)

    def forward(self, x, cos, sin):
        b, s, _ = x.shape
        q = rotate(self.q_norm(self.q_proj(x).view(b, s, self.heads, self.dim)).transpose(1, 2), cos, sin)
        k = rotate(self.k_norm(self.k_proj(x).view(b, s, self.kv_heads, self.dim)).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(b, s, self.kv_heads, self.dim).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        return self.o_proj(y.transpose(1, 2).reshape(b, s, -1))


class MLP(nn.Module):
    def __init__(self, c) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(c), MLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    def __init__(self, c) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)


class TorchQwen3(nn.Module):
    """`config` is an xtrain Qwen3Config; sequences up to `length` tokens."""

    def __init__(self, config, length: int) -> None:
        super().__init__()
        self.model = Trunk(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, 0.0, config.initializer_range)
        half = config.head_dim // 2
        angle = torch.outer(torch.arange(length).double(), config.rope_theta ** (-torch.arange(half).double() / half))
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)

    def forward(self, ids):
        """ids [B, S] -> logits [B, S, V]."""
        x = self.model.embed_tokens(ids)
        cos, sin = self.cos[: ids.shape[1]].to(x.dtype), self.sin[: ids.shape[1]].to(x.dtype)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.model.norm(x))

    def loss(self, ids, targets):
        return F.cross_entropy(self(ids).view(-1, self.lm_head.weight.shape[0]), targets.reshape(-1))


def pair(shape: str, tied: bool, dtype=torch.float32):
    """Our model and PyTorch's with the same weights, and a batch for each."""
    b, s, sizes = SHAPES[shape]
    config = Qwen3Config(
        num_hidden_layers=3,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        rope_theta=1e4,
        max_position_embeddings=64,
        **sizes,
    )
    torch.manual_seed(1)
    theirs = TorchQwen3(config, s)
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            if "norm" in name:
                p.uniform_(0.5, 1.5)
    theirs = theirs.to(dtype)
    ours = Qwen3(config)
    if dtype == torch.float64:
        ours = ours.to(xt.float64)
    state = {name: xt.from_numpy(p.detach().cpu().numpy().copy()) for name, p in theirs.named_parameters()}
    missing = ours.load_state_dict(state)
    assert not any(missing)
    assert {name for name, _ in ours.named_parameters()} == set(state)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (b, s + 1))
    return ours, theirs, ids[:, :-1].copy(), ids[:, 1:].copy()
