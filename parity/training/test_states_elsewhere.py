"""What a run keeps beside its weights, read by others: averages by the safetensors package and transformers, Muon's state by torch.optim."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
import transformers
from runs import options, text_file

import xtrain as xt
from xtrain import models
from xtrain.cli import main
from xtrain.optable.table import array
from xtrain.tokenizers import load_tokenizer, train_tokenizer
from xtrain.train import Trainer

pytestmark = pytest.mark.on_cpu
STEPS = 4


def run(folder: Path, family: str = "Llama", **changes: Any) -> tuple[Trainer, Path]:
    """A run with Muon and averages, of a model with a tokenizer that was trained on the same text; its checkpoint."""
    text, start = text_file(folder / "text.txt"), folder / "start"
    (folder / "tokenizer").mkdir()
    for name, content in train_tokenizer([text.read_bytes()], 280).items():
        (folder / "tokenizer" / name).write_bytes(content)
    xt.manual_seed(5)
    shape = dict(vocab_size=280, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    shape |= dict(num_key_value_heads=2, max_position_embeddings=128, eos_token_id=0)
    model = getattr(models, family)(getattr(models, f"{family}Config")(**shape))
    model.save_pretrained(start, tokenizer=load_tokenizer(folder / "tokenizer"))
    given = dict(device="cpu", steps=STEPS, optim__name="muon", optim__lr=0.02, ema=0.8, **changes)
    values = {key: value for key, value in options(text, folder / "run", **given).items() if "model." not in key}
    trainer = Trainer({**values, "model.preset": str(start)}, quiet=True)
    trainer.run()
    return trainer, folder / "run" / f"checkpoint-{STEPS:08}"


def logits_of(model: Any, ids: np.ndarray) -> np.ndarray:
    if isinstance(model, torch.nn.Module):
        with torch.no_grad():
            return model.eval()(torch.tensor(ids)).logits.double().numpy()
    return array(model(xt.tensor(ids)))


def relative(a: np.ndarray, b: np.ndarray) -> float:
    assert a.shape == b.shape and np.isfinite(a).all() and np.isfinite(b).all()
    return float(np.abs(a - b).max() / np.abs(b).max())


@pytest.mark.parametrize(("family", "precision"), [("Llama", "float32"), ("Qwen2", "bfloat16")])
def test_averages_are_read_elsewhere(family: str, precision: str, tmp_path: Path) -> None:
    """The file by the safetensors package, in float32. transformers with its tensors, with a model saved from averages,
    and with what `export --ema` writes, has our logits, which are not those of the last weights.
    """
    trainer, checkpoint = run(tmp_path, family, precision=precision)
    assert trainer.ema is not None
    averages = safetensors.numpy.load_file(checkpoint / "ema.safetensors")
    kept = {name: trainer.ema.averages[parameter] for name, parameter in trainer.model.named_parameters()}
    assert set(averages) == set(kept)
    for name, value in averages.items():
        assert value.dtype == np.float32 and np.array_equal(value, array(kept[name])), name
    ids = np.random.default_rng(0).integers(0, 256, (2, 16))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    last = logits_of(theirs, ids)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(torch.tensor(averages[name]))
    limit = 1e-5  # of parity/models, for float32 logits
    ours = logits_of(models.load(checkpoint, dtype=xt.float32, ema=True), ids)
    assert relative(ours, logits_of(theirs, ids)) <= limit and relative(ours, last) > 100 * limit

    dtype = getattr(torch, precision)
    averaged = models.load(checkpoint, ema=True)
    averaged.save_pretrained(tmp_path / "saved")
    saved = safetensors.torch.load_file(tmp_path / "saved" / "model.safetensors")
    for name, value in averages.items():
        assert torch.equal(saved[name], torch.tensor(value).to(dtype)), name
    elsewhere = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    found = logits_of(averaged.to(xt.float32), ids)
    assert relative(found, logits_of(elsewhere, ids)) <= limit and relative(found, last) > 100 * limit

    pytest.importorskip("gguf", reason="needs gguf (pip install gguf)")
    (tmp_path / "exported").mkdir()
    assert main(["export", str(tmp_path / "run"), "--ema", "--gguf", str(tmp_path / "exported" / "model.gguf")]) == 0
    exported = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "exported", gguf_file="model.gguf", dtype=torch.float32
    )
    assert relative(found, logits_of(exported, ids)) <= limit


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs a PyTorch with torch.optim.Muon (2.9)")
def test_torch_takes_the_next_step_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, moments and options out of the files of a checkpoint into torch.optim.Muon and AdamW: with the gradients
    of our next batch they take our next step. Of PyTorch's iteration, which is in bfloat16, the rounding is left out.
    """
    trainer, checkpoint = run(tmp_path, precision="float32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    parameters = dict(theirs.named_parameters())
    state = safetensors.torch.load_file(checkpoint / "optimizer.safetensors")
    stored = json.loads((checkpoint / "trainer_state.json").read_text())["optimizer"]
    peers: list[torch.optim.Optimizer] = []
    for group in stored["param_groups"]:
        values = {key: value for key, value in group.items() if key not in ("params", "ns_dtype", "initial_lr")}
        kind = torch.optim.Muon if "momentum" in group else torch.optim.AdamW
        peer = kind([parameters[name] for name in group["params"]], **values)
        loaded: dict[int, dict[str, Any]] = {}
        for number, name in enumerate(group["params"]):
            tensors = {full.partition(".")[0]: value for full, value in state.items() if full.partition(".")[2] == name}
            counts = {key: torch.tensor(float(value)) for key, value in stored["state"].get(name, {}).items()}
            loaded[number] = {**tensors, **counts}
            assert set(loaded[number]) == (
                {"momentum_buffer"} if kind is torch.optim.Muon else {"exp_avg", "exp_avg_sq", "step"}
            )
        peer.load_state_dict({**peer.state_dict(), "state": loaded})
        peers.append(peer)
    names = [name for group in stored["param_groups"] for name in group["params"]]
    assert sorted(names) == sorted(parameters) and sum(type(peer) is torch.optim.Muon for peer in peers) == 1

    ids, targets = map(xt.from_numpy, trainer.loader.next_batch())
    trainer.optimizer.zero_grad()
    trainer.model.loss(ids, targets).backward()
    before = {name: array(parameter) for name, parameter in trainer.model.named_parameters()}
    for name, parameter in trainer.model.named_parameters():
        assert np.array_equal(before[name], parameters[name].detach().double().numpy()), name
        parameters[name].grad = torch.tensor(array(parameter.grad), dtype=torch.float32)
    trainer.optimizer.step()
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())
        for peer in peers:
            peer.step()

    for group in stored["param_groups"]:
        for name in group["params"]:
            found, want = (
                array(dict(trainer.model.named_parameters())[name]),
                parameters[name].detach().double().numpy(),
            )
            step = np.abs(want - before[name]).max()
            # Muon: roundings of an iteration, and how five of them grow; of AdamW and of the weight itself: some each.
            growth = 40 * 3.4445**5 if "momentum" in group else 16
            allowed = 2.0**-24 * (growth * step + 4 * np.abs(before[name]).max())
            error = np.abs(found - want).max()
            assert step > 100 * allowed and error <= allowed, f"{name}: {error}, allowed {allowed}, a step of {step}"
