"""Runs that train a part of a model: LoRA and frozen parameters, their checkpoints, and what a resumed run needs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from xtrain import models
from xtrain.cli import main
from xtrain.errors import CheckpointError, ConfigError
from xtrain.nn.lora import lora_layers
from xtrain.saving import SafetensorsFile, find_checkpoints, verify_checkpoint
from xtrain.train import Trainer

pytestmark = pytest.mark.on_cpu
SIZES = dict(
    vocab_size=256, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, head_dim=8
)


@pytest.fixture
def base(tmp_path) -> Path:
    (tmp_path / "text.txt").write_text("the cat sat on the mat and the dog ran home; " * 40)
    models.Llama(models.LlamaConfig(**SIZES, num_key_value_heads=1)).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def options(base: Path, **given) -> dict:
    run = dict(data=str(base.parent / "text.txt"), model=str(base), out=str(base.parent / "run"), steps=4, batch_size=2)
    more = dict(seq_len=16, eval_tokens=32, eval_every=0, save_every=2, keep=0, plot=False, device="cpu")
    return {**run, **more, "sample.tokens": 0, "optim.lr": 0.05, "optim.warmup": 0, **given}


def tensors(path: Path) -> dict[str, bytes]:
    with SafetensorsFile(path) as file:
        return {name: bytes(file.read(name)) for name in file.entries}


def test_a_run_with_lora(base, capsys) -> None:
    run = base.parent / "run"
    given = options(base, **{"lora.r": 2, "lora.targets": "q_proj, v_proj", "lora.alpha": 3.0})
    words = [f"--{name.replace('_', '-') if '.' not in name else name}={value}" for name, value in given.items()]
    assert main(["train", *words]) == 0
    said = capsys.readouterr().out
    assert "0.01 M parameters, 0.00 M of them trained" in said
    first, last = sorted(find_checkpoints(run))
    for checkpoint in (first, last):
        verify_checkpoint(checkpoint)
        assert not (checkpoint / "model.safetensors").exists()
    values = json.loads((last / "adapter_config.json").read_text())
    assert values["base_model_name_or_path"] == str(base) and values["target_modules"] == ["q_proj", "v_proj"]
    assert (values["r"], values["lora_alpha"]) == (2, 3.0)
    moments = tensors(last / "optimizer.safetensors")
    assert {name.partition(".")[2] for name in moments} == {
        f"model.layers.0.self_attn.{layer}_proj.lora_{part}.weight" for layer in "qv" for part in "AB"
    }
    model, start = models.load(last), models.load(base)
    for name, tensor in start.state_dict().items():
        assert (tensor.numpy() == model.state_dict()[name].numpy()).all(), name
    assert all(np.abs(layer.lora_B.weight.detach().numpy()).max() > 0 for layer in lora_layers(model).values())
    assert main(["sample", str(run), "--max-tokens", "4"]) == 0 and main(["verify", str(run)]) == 0


def test_a_resumed_run_has_the_same_bits(base) -> None:
    given = options(base, **{"lora.r": 2, "lora.dropout": 0.1})
    Trainer(given, quiet=True).run()
    whole = tensors(base.parent / "run" / "checkpoint-00000004" / "adapter_model.safetensors")
    half = base.parent / "run" / "checkpoint-00000002"
    resumed = Trainer({"resume": str(half)}, quiet=True)
    trained = {name for name, p in resumed.model.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in resumed.model.named_parameters() if ".lora_" in name}
    resumed.run()
    again = base.parent / "run" / "checkpoint-00000004"
    assert tensors(again / "adapter_model.safetensors") == whole and len(whole) == 14
    with pytest.raises(ConfigError, match=r"resume: lora\.r was 2 in this run, got 3"):
        Trainer({"resume": str(half), "lora.r": 3}, quiet=True)


def test_a_resumed_run_has_its_model_below(base) -> None:
    Trainer(options(base, **{"lora.r": 2}), quiet=True).run()
    changed = models.load(base)
    changed.model.norm.weight.detach().fill_(2.0)
    changed.save_pretrained(base)
    with pytest.raises(ConfigError, match=r"resume: the model \S+base below LoRA was another one in this run"):
        Trainer({"resume": str(base.parent / "run")}, quiet=True)
    base.rename(base.parent / "moved")
    with pytest.raises(CheckpointError, match="base_model_name_or_path must be a directory that is here, got "):
        Trainer({"resume": str(base.parent / "run")}, quiet=True)


def test_lora_that_was_trained_can_be_trained_on(base) -> None:
    Trainer(options(base, **{"lora.r": 2}), quiet=True).run()
    more = options(base, model=str(base.parent / "run" / "checkpoint-00000004"), out=str(base.parent / "more"))
    trainer = Trainer(more, quiet=True)
    assert trainer.base is not None and len(trainer.optimizer.param_groups[0]["params"]) == 14
    trainer.run()
    last = base.parent / "more" / "checkpoint-00000004"
    assert json.loads((last / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    Trainer({"resume": str(base.parent / "more" / "checkpoint-00000002")}, quiet=True)


def test_frozen_parameters(base) -> None:
    """They keep their bits and have no moments; a resumed run leaves them frozen, and goes on bit for bit."""
    given = options(base, freeze="model.embed_tokens.*, *norm.weight")
    Trainer(given, quiet=True).run()
    last = base.parent / "run" / "checkpoint-00000004"
    before, after = tensors(base / "model.safetensors"), tensors(last / "model.safetensors")
    same = {name for name in before if before[name] == after[name]}
    assert same == {name for name in before if "norm" in name or "embed" in name} and 0 < len(same) < len(before)
    moments = {name.partition(".")[2] for name in tensors(last / "optimizer.safetensors")}
    assert moments == set(before) - same
    Trainer({"resume": str(base.parent / "run" / "checkpoint-00000002")}, quiet=True).run()
    assert tensors(last / "model.safetensors") == after


@pytest.mark.parametrize(
    "given,words",
    [
        (
            {"freeze": "model.embed.*"},
            r"freeze must name parameters of the model, got 'model\.embed\.\*', which matches",
        ),
        ({"freeze": " ,"}, "freeze must name parameters of the model, got ' ,'$"),
        ({"freeze": "*"}, r"freeze must leave a parameter to be trained, got '\*'"),
        ({"freeze": "*norm*", "lora.r": 2}, r"freeze must be left out with lora\.r, which trains nothing else"),
        ({"model": "tiny", "lora.r": 2}, r"model must be a model directory with lora\.r 2, got tiny"),
        ({"lora.r": -1}, r"lora\.r must be at least 0, got -1"),
        ({"lora.r": 2, "lora.targets": "qproj"}, "lora: target_modules must be layers of the model"),
    ],
)
def test_options_that_cannot_be(base, given: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^{words}"):
        Trainer(options(base, **given), quiet=True)


def test_a_dry_run_counts_what_is_trained(base, capsys) -> None:
    given = options(base)
    words = [f"--{name.replace('_', '-') if '.' not in name else name}={value}" for name, value in given.items()]
    found = []
    for more in ([], ["--lora.r", "2"], ["--freeze", "model.*"]):
        assert main(["train", *words, *more, "--dry-run"]) in (0, 2)
        said = capsys.readouterr()
        found.append(said.out or said.err)
    assert "peak" in found[0] and "peak" in found[1] and found[0] != found[1]
    Trainer({**given, "lora.r": 2, "steps": 1}, quiet=True).run()
    tuned = [f"--model={base.parent / 'run' / 'checkpoint-00000001'}", "--out", str(base.parent / "more")]
    assert main(["train", *words, *tuned, "--dry-run"]) == 0
    memory = slice(2, -1)  # the last line has a rate that is measured
    assert capsys.readouterr().out.splitlines()[memory] == found[1].splitlines()[memory], (
        "of the LoRA that is in the model"
    )
