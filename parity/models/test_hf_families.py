"""Families of models against transformers: logits, loss, every gradient, files both ways and greedy tokens; B > 1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hf_families import CASES, FAMILIES, build, data, ours_on, relative, theirs_on
from safetensors.torch import load_file

import xtrain as xt
from xtrain import models


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


@pytest.mark.parametrize(
    ("dtype", "family", "index"),
    [("bfloat16", *case) for case in CASES] + [("float16", *case) for case in CASES if case[1] < 4],
)
def test_half_precision(dtype: str, family: str, index: int, tmp_path: Path) -> None:
    """Against float32: at most twice PyTorch's own error of logits, and of all gradients together."""
    theirs = build(family, index)
    theirs = theirs.to(getattr(torch, dtype))
    theirs.save_pretrained(tmp_path / "hf")
    ours = models.load(tmp_path / "hf")
    assert ours.config.dtype == dtype
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


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "Gemma2"])
def test_shards_of_one_library_are_read_by_the_other(family: str, tmp_path: Path) -> None:
    """Both ways, several files and an index: the same bits, and the same tensors in each index."""
    theirs = build(family, 8)
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="30KB")
    ours = models.load(tmp_path / "hf")
    ours.save_pretrained(tmp_path / "xt", "25KB")
    again, info = type(theirs).from_pretrained(tmp_path / "xt", output_loading_info=True, dtype="auto")
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    for path in (tmp_path / "hf", tmp_path / "xt"):
        assert len(list(path.glob("model-0*.safetensors"))) > 2 and not (path / "model.safetensors").exists()
    before, state = theirs.state_dict(), {name: value.cpu().numpy() for name, value in ours.state_dict().items()}
    for name, value in again.state_dict().items():
        assert torch.equal(before[name].cpu(), value.cpu()), name
        assert name not in state or np.array_equal(before[name].cpu().numpy(), state[name]), name
    names = [
        set(json.loads((tmp_path / kind / "model.safetensors.index.json").read_text())["weight_map"])
        for kind in ("hf", "xt")
    ]
    assert names[0] == names[1]


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
