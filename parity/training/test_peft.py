"""LoRA beside PEFT: the same layers, logits and gradients; each side loads what the other has saved."""

from __future__ import annotations

import importlib
import importlib.util
import json

import numpy as np
import pytest
import torch

import xtrain as xt
from xtrain import lora, models
from xtrain.nn.lora import lora_layers

transformers = pytest.importorskip("transformers", reason="needs transformers (pip install transformers)")
pytestmark = [
    pytest.mark.on_cpu,
    pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="the exchange with PEFT needs peft"),
]
IDS = (np.arange(2 * 11) * 7 % 61).reshape(2, 11)


@pytest.fixture
def peft():
    """Its import takes seconds, and every worker collects this file: those that run its tests import it."""
    return importlib.import_module("peft")


def hf(family: str, path):
    """A random model of transformers, saved in `path`."""
    torch.manual_seed(0)
    if family == "gpt2":
        config = transformers.GPT2Config(vocab_size=61, n_positions=32, n_embd=24, n_layer=2, n_head=4)
    else:
        sizes = dict(vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4)
        more = {"qwen3": {"head_dim": 8}, "mistral": {"sliding_window": 5}}.get(family, {})
        sizes |= dict(num_key_value_heads=2, max_position_embeddings=64, **more)
        config = transformers.AutoConfig.for_model(family, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(path)
    return model


def theirs(model) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(IDS)).logits.numpy()


def ours(model) -> np.ndarray:
    with xt.no_grad():
        return model.eval()(xt.from_numpy(IDS)).numpy()


def close(a: np.ndarray, b: np.ndarray) -> None:
    assert np.isfinite(a).all() and np.abs(a - b).max() <= 1e-5 * max(np.abs(b).max(), 1.0), np.abs(a - b).max()


def shake(model) -> None:
    torch.manual_seed(1)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, 0.0, 0.2)


CASES = [
    ("llama", {"target_modules": ["q_proj", "v_proj"], "r": 4, "lora_alpha": 12}),
    ("llama", {"target_modules": "all-linear", "r": 3, "lora_alpha": 5, "use_rslora": True}),
    ("llama", {"target_modules": ["up_proj"], "r": 2, "rank_pattern": {"layers.1.mlp.up_proj": 5}}),
    ("llama", {"target_modules": r".*\.0\..*_proj", "r": 2, "init_lora_weights": "gaussian"}),
    ("gpt2", {"target_modules": ["c_attn", "c_proj"], "r": 4, "fan_in_fan_out": True}),
    ("qwen2", {"target_modules": ["q_proj", "k_proj"], "r": 4, "lora_alpha": 6}),  # which have biases
    ("qwen3", {"target_modules": "all-linear", "r": 2}),
    ("mistral", {"target_modules": ["o_proj", "down_proj"], "r": 3, "use_rslora": True}),
]


@pytest.mark.parametrize("family,options", CASES)
def test_we_load_theirs(peft, tmp_path, family: str, options: dict) -> None:
    model = peft.get_peft_model(hf(family, tmp_path / "base"), peft.LoraConfig(task_type="CAUSAL_LM", **options)).eval()
    shake(model)
    model.save_pretrained(tmp_path / "a")
    found = lora.load(models.load(tmp_path / "base"), tmp_path / "a")
    close(ours(found), theirs(model))
    close(ours(lora.merge(found)), theirs(model))
    lora.unmerge(found)
    # gradients of A and B
    ids = xt.from_numpy(IDS)
    found.zero_grad()
    found.loss(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()).backward()
    model(torch.from_numpy(IDS), labels=torch.from_numpy(IDS)).loss.backward()
    want = {n.removeprefix("base_model.model."): p.grad for n, p in model.named_parameters() if p.grad is not None}
    got = {n: p.grad for n, p in found.named_parameters() if p.grad is not None}
    assert {n.replace(".default", "") for n in want} == set(got) and got
    for name, grad in want.items():
        mine = got[name.replace(".default", "")].numpy()
        assert np.abs(mine - grad.numpy()).max() <= 1e-4 * max(float(grad.abs().max()), 1e-3), name


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("targets", ["all-linear", "one", "whole"])
def test_they_load_ours(peft, tmp_path, family: str, targets: str) -> None:
    base = hf(family, tmp_path / "base")
    first = "transformer.h.0.mlp.c_fc" if family == "gpt2" else "model.layers.0.mlp.up_proj"
    names = {"all-linear": "all-linear", "one": [first.rpartition(".")[2]], "whole": [first]}[targets]
    model = models.load(tmp_path / "base")
    lora.apply(model, r=3, lora_alpha=7, target_modules=names, base_model_name_or_path=str(tmp_path / "base"))
    for layer in lora_layers(model).values():
        xt.nn.init.normal_(layer.lora_B.weight, 0.0, 0.2)
    lora.save(model, tmp_path / "a")
    found = peft.PeftModel.from_pretrained(base, tmp_path / "a")
    assert sum("lora_A" in n for n, _ in found.named_parameters()) == len(lora_layers(model))
    close(theirs(found.eval()), ours(model))
    auto = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "a").eval()  # finds the model below by its path
    close(theirs(auto), ours(model))
    found.save_pretrained(tmp_path / "b")  # and back, bit for bit
    again = lora.load(models.load(tmp_path / "base"), tmp_path / "b")
    assert (ours(again) == ours(model)).all()
    lora.unload(model).save_pretrained(tmp_path / "merged")
    close(theirs(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()), ours(model))


def test_every_key_of_their_config_is_known(peft, tmp_path) -> None:
    """A default config of this PEFT has nothing that we refuse; what changes the mathematics is."""
    base = hf("llama", tmp_path / "base")
    for more, known in (({}, True), ({"use_dora": True}, False), ({"modules_to_save": ["lm_head"]}, False)):
        path = tmp_path / f"a{len(more)}{known}{''.join(more)}"
        peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"], **more)).save_pretrained(path)
        base = hf("llama", tmp_path / "base")
        assert json.loads((path / "adapter_config.json").read_text())["peft_type"] == "LORA"
        if known:
            lora.load(models.load(tmp_path / "base"), path)
        else:
            with pytest.raises(ValueError, match=f"{next(iter(more))} must be left out"):
                lora.load(models.load(tmp_path / "base"), path)
