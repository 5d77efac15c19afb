"""Families of models against transformers: logits, loss, every gradient, files both ways and greedy tokens; B > 1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

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
    "Mistral": [{"sliding_window": None}],
    "Qwen2": [{}],
    "Qwen3": [{}, {"attention_bias": True}],
    "GPT2": [
        {},
        {"n_inner": 70},
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
                p.uniform_(0.5, 1.5)
    return model.eval()


def build(family: str, index: int) -> torch.nn.Module:
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
    if family == "Qwen3" and "head_dim" not in keys:
        keys["head_dim"] = 12
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


@pytest.mark.parametrize(("family", "index"), CASES)
def test_float32(family: str, index: int, tmp_path: Path) -> None:
    """Logits within 1e-5 of the largest, gradients within 1e-4."""
    theirs = build(family, index)
    theirs.save_pretrained(tmp_path / "hf")
    ours = models.load(tmp_path / "hf")
    assert type(ours).__name__ == family
    ids, targets = data(theirs.config.vocab_size)
    logits, loss, grads = ours_on(ours, ids, targets)
    want_logits, want_loss, want = theirs_on(theirs, ids, targets)
    assert relative(logits, want_logits) <= 1e-5
    assert abs(loss - want_loss) <= 1e-6 * abs(want_loss)
    assert set(grads) == set(want)
    # the gradient of a key's bias is zero but for roundings: attention does not change when all scores of a query do
    zero = {name for name in want if name.endswith("k_proj.bias") and family != "Qwen3"}
    scale = max(np.abs(g).max() for g in want.values())
    for name, grad in grads.items():
        if name in zero and np.abs(want[name]).max() < 1e-6 * scale:
            assert np.abs(grad).max() < 1e-6 * scale
        else:
            assert relative(grad, want[name]) <= 1e-4, name


@pytest.mark.parametrize(("family", "index"), [case for case in CASES if case[1] in (0, 1, 2, 3)])
def test_bfloat16(family: str, index: int, tmp_path: Path) -> None:
    """Against float32: at most twice PyTorch's own error of logits, and of all gradients together."""
    theirs = build(family, index)
    theirs = theirs.to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "hf")
    ours = models.load(tmp_path / "hf")
    assert ours.config.dtype == "bfloat16"
    ids, targets = data(theirs.config.vocab_size)
    got, their = ours_on(ours, ids, targets), theirs_on(theirs, ids, targets)
    exact = theirs_on(theirs.float(), ids, targets)

    def error(run: tuple[np.ndarray, Any, dict[str, Any]]) -> tuple[float, float]:
        grads = [
            np.linalg.norm(run[2][n] - g) / np.linalg.norm(g) for n, g in exact[2].items() if "k_proj.bias" not in n
        ]
        return float(np.linalg.norm(run[0] - exact[0])), float(np.median(grads))

    for mine, yours in zip(error(got), error(their), strict=True):
        assert mine <= 2 * yours


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("family", "index"), [case for case in CASES if case[1] < 3])
def test_files_return_bit_identical(family: str, index: int, dtype: str, tmp_path: Path) -> None:
    """transformers -> xtrain -> transformers: the bits of every tensor, and every key that transformers keeps."""
    theirs = build(family, index).to(getattr(torch, dtype))
    theirs.save_pretrained(tmp_path / "hf")
    ours = models.load(tmp_path / "hf")
    ours.save_pretrained(tmp_path / "xt")
    again, info = type(theirs).from_pretrained(tmp_path / "xt", output_loading_info=True, dtype="auto")
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    before, after = theirs.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert value.dtype == after[name].dtype, name
        assert torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (value, after[name]))), name
    configs = [transformers.AutoConfig.from_pretrained(tmp_path / kind).to_dict() for kind in ("hf", "xt")]
    assert all(configs[1][key] == value for key, value in configs[0].items() if key != "_name_or_path")
    hf, mine = (json.loads((tmp_path / kind / "config.json").read_text()) for kind in ("hf", "xt"))
    assert {key: mine[key] for key in hf} == hf
    assert (
        load_file(tmp_path / "hf" / "model.safetensors").keys()
        == load_file(tmp_path / "xt" / "model.safetensors").keys()
    )


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(("family", "index"), [case for case in CASES if case[1] in (1, 3)])
def test_greedy_tokens(family: str, index: int, batch: int, tmp_path: Path) -> None:
    """64 tokens after 5; with captured steps, and with a repetition penalty, too."""
    theirs = build(family, index)
    theirs.save_pretrained(tmp_path / "hf")
    ours = models.load(tmp_path / "hf")
    prompt = np.random.default_rng(index).integers(0, theirs.config.vocab_size, (batch, 5))
    for penalty in (1.0, 1.3):
        want = theirs.generate(
            torch.tensor(prompt),
            attention_mask=torch.ones(prompt.shape, dtype=torch.long),
            max_new_tokens=64,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            repetition_penalty=penalty,
        )
        for capture in (False, True):
            options = dict(temperature=0.0, repetition_penalty=penalty, capture=capture)
            assert np.array_equal(ours.generate(xt.tensor(prompt), 64, **options).cpu().numpy(), want.cpu().numpy())
