"""Random models of transformers, and what they and ours make of the same tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers

import xtrain as xt
from xtrain import models

LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
# heads, kv heads, head_dim (None: hidden / heads), tied, theta, eps, further keys
SHAPES: list[tuple[int, int, int | None, bool, float, float, dict[str, Any]]] = [
    (8, 8, None, False, 1e4, 1e-6, {}),
    (8, 1, None, True, 1e4, 1e-6, {}),
    (8, 2, 16, False, 5e5, 1e-5, {}),
    (8, 4, 10, True, 1e6, 1e-6, {}),
    (4, 4, 26, False, 1e4, 1e-3, {}),
    (4, 2, 6, False, 1e4, 1e-6, {"intermediate_size": 65}),
    (2, 1, 64, True, 1e6, 1e-5, {"vocab_size": 131}),
    (1, 1, 2, False, 1e4, 1e-6, {"hidden_size": 6}),
    (6, 3, 8, False, 1e4, 1e-6, {"num_hidden_layers": 4}),
    (6, 2, 32, True, 1e4, 1e-5, {"hidden_size": 54}),
]
# name -> what only this family has, one entry for some shapes
FAMILIES: dict[str, list[dict[str, Any]]] = {
    "Llama": [
        {},
        {"rope_parameters": LLAMA3},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0}},
        {"attention_bias": True},
        {"mlp_bias": True},
    ],
    "Mistral": [{"sliding_window": None}, {"sliding_window": 7}],
    "Qwen2": [{}, {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}],
    "Qwen3": [
        {},
        {"attention_bias": True},
        {"use_sliding_window": True, "sliding_window": 2, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    ],
    "Gemma2": [
        {},
        {"sliding_window": 7, "query_pre_attn_scalar": 4, "attn_logit_softcapping": 1.5, "tie_word_embeddings": False},
        {"final_logit_softcapping": 2.0, "attn_logit_softcapping": None, "attention_bias": True},
        {
            "final_logit_softcapping": None,
            "attn_logit_softcapping": 0.5,
            "tie_word_embeddings": False,
            "sliding_window": 3,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ],
    "GPT2": [
        {},
        {"n_inner": 70, "n_embd": 120},  # heads of 15 and 60
        {"activation_function": "gelu"},
        {"scale_attn_by_inverse_layer_idx": True, "n_embd": 72},
        {"scale_attn_weights": False, "layer_norm_epsilon": 1e-3},
    ],
}
CASES = [(family, i) for family in FAMILIES for i in range(len(SHAPES))]


def build_gpt2(index: int) -> torch.nn.Module:
    heads, tied = SHAPES[index][0], SHAPES[index][3]
    keys = dict(
        vocab_size=97 + index, n_positions=128, n_embd=48, n_layer=1 + index % 3, n_head=heads, tie_word_embeddings=tied,
        initializer_range=0.1, attn_implementation="eager", bos_token_id=None, eos_token_id=None, pad_token_id=None,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ) | FAMILIES["GPT2"][index % len(FAMILIES["GPT2"])]  # fmt: skip
    torch.manual_seed(index)
    return randomised(transformers.GPT2LMHeadModel(transformers.GPT2Config(**keys)).float())


def randomised(model: torch.nn.Module) -> torch.nn.Module:
    """Norms and biases that are not ones and zeros."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.normal_(0, 0.3)
            elif "norm" in name or "ln_" in name:
                p.uniform_(-0.5, 0.5) if "Gemma" in type(model).__name__ else p.uniform_(0.5, 1.5)
    return model.eval()


def build(family: str, index: int, **changes: Any) -> torch.nn.Module:
    """A random model of a shape. changes: of keys of its config; GPT-2 takes none."""
    if family == "GPT2":
        return build_gpt2(index)
    heads, kv_heads, dim, tied, theta, eps, more = SHAPES[index]
    special = FAMILIES[family][index % len(FAMILIES[family])]
    keys = dict(
        vocab_size=97, hidden_size=48, intermediate_size=72, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=kv_heads, max_position_embeddings=128, tie_word_embeddings=tied, rms_norm_eps=eps,
        initializer_range=0.1, attn_implementation="eager", bos_token_id=None, eos_token_id=None, pad_token_id=None,
    ) | more | special  # fmt: skip
    if family == "Qwen2":  # has no head_dim of its own
        keys["hidden_size"] = heads * (dim or 6)
    elif dim is not None:
        keys["head_dim"] = dim
    keys["rope_parameters"] = {"rope_type": "default", **special.get("rope_parameters", {}), "rope_theta": theta}
    if family in ("Qwen3", "Gemma2") and "head_dim" not in keys:
        keys["head_dim"] = 12
    keys |= changes
    torch.manual_seed(index)
    return randomised(
        getattr(transformers, family + "ForCausalLM")(getattr(transformers, family + "Config")(**keys)).float()
    )


def relative(a: np.ndarray, b: np.ndarray) -> float:
    """Largest error relative to the largest value; NaN is not small."""
    assert a.shape == b.shape
    assert np.isfinite(a).all() and np.isfinite(b).all()
    return float(np.abs(a.astype(np.float64) - b).max() / np.abs(b).max())


def numbers(t: Any) -> np.ndarray:
    return t.detach().float().cpu().numpy()


def theirs_on(model: torch.nn.Module, ids: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, Any, dict[str, Any]]:
    model.zero_grad()
    logits = model(input_ids=torch.tensor(ids)).logits
    flat = logits.float().reshape(-1, logits.shape[-1])
    loss = torch.nn.functional.cross_entropy(flat, torch.tensor(targets).reshape(-1))
    loss.backward()
    return numbers(logits), loss.item(), {n: numbers(p.grad) for n, p in model.named_parameters()}


def ours_on(
    model: models.LanguageModel, ids: np.ndarray, targets: np.ndarray
) -> tuple[np.ndarray, Any, dict[str, Any]]:
    model.zero_grad()
    logits = model(xt.tensor(ids))
    loss = model.loss(xt.tensor(ids), xt.tensor(targets))
    loss.backward()
    return (
        logits.detach().float().cpu().numpy(),
        loss.item(),
        {n: p.grad.float().cpu().numpy() for n, p in model.named_parameters()},
    )


def data(vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """3 sequences of 33 tokens; some targets do not count."""
    ids = np.random.default_rng(7).integers(0, vocab, (3, 34))
    targets = ids[:, 1:].copy()
    targets[1, 20:] = -100
    return ids[:, :-1].copy(), targets
