"""Runs that begin with a model directory that holds no weights: config.json and perhaps a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from xtrain import models
from xtrain.cli import main
from xtrain.errors import CheckpointError, ConfigError, DataError
from xtrain.models.registry import MODULES, architecture
from xtrain.saving import has_weights
from xtrain.train import Trainer

pytestmark = pytest.mark.on_cpu
SIZES = dict(
    vocab_size=256, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1,
)  # fmt: skip
SMALL = {"gpt2": dict(vocab_size=256, n_embd=16, n_layer=2, n_head=2, n_positions=32)}


def folder(tmp_path: Path, kind: str) -> Path:
    """A directory with the config.json of a small model of this type."""
    (tmp_path / "text.txt").write_text("the cat sat on the mat and the dog ran home; " * 40)
    made = tmp_path / kind
    made.mkdir()
    keys = architecture(kind).config(**SMALL.get(kind, SIZES), dtype="bfloat16").to_dict()
    (made / "config.json").write_text(json.dumps({**keys, "model_type": kind}))
    return made


def options(base: Path, **given) -> dict:
    run = dict(data=str(base.parent / "text.txt"), out=str(base.parent / "run"), steps=2, batch_size=2, keep=0)
    more = dict(seq_len=16, eval_tokens=32, eval_every=0, save_every=1, plot=False, device="cpu")
    return {**run, **more, "sample.tokens": 0, **given}


@pytest.mark.parametrize("kind", list(MODULES))
def test_every_family_begins_with_a_config(tmp_path, kind: str) -> None:
    base = folder(tmp_path, kind)
    assert not has_weights(base)
    trainer = Trainer(options(base, seed=5), quiet=True, model=base)
    assert type(trainer.model) is architecture(kind).model
    start = {name: value.numpy().copy() for name, value in trainer.model.state_dict().items()}
    assert any((value.view(np.uint32) & 0xFFFF).any() for value in start.values()), "not drawn in bfloat16"
    again = Trainer(options(base, seed=5, model=str(base)), quiet=True)
    other = Trainer(options(base, seed=6, model=str(base)), quiet=True)
    same = [(again.model.state_dict()[name].numpy() == value).all() for name, value in start.items()]
    assert all(same), "the weights are those of the seed"
    assert any((other.model.state_dict()[name].numpy() != value).any() for name, value in start.items())
    result = trainer.run()
    kept = models.load(result.checkpoint)
    assert type(kept) is type(trainer.model) and kept.config.dtype == "float32"
    resumed = Trainer({"resume": str(tmp_path / "run" / "checkpoint-00000001")}, quiet=True)
    resumed.run()
    for name, value in kept.state_dict().items():
        assert (value.numpy() == resumed.model.state_dict()[name].numpy()).all(), name


def test_the_command_says_that_weights_are_new(tmp_path, capsys) -> None:
    base = folder(tmp_path, "qwen2")
    words = [
        f"--{name.replace('_', '-') if '.' not in name else name}={value}" for name, value in options(base).items()
    ]
    assert main(["train", f"--model={base}", *words, "--dry-run"]) == 0
    assert not (tmp_path / "run").exists()
    assert main(["train", f"--model={base}", *words]) == 0
    assert "parameters, drawn, as it holds no weights" in capsys.readouterr().out
    again = dict(model=str(tmp_path / "run" / "checkpoint-00000002"), out=str(tmp_path / "more"))
    Trainer(options(base, **again)).run()  # a directory with weights is continued, as ever
    assert "drawn" not in capsys.readouterr().out


def test_the_tokenizer_of_the_directory_is_used(tmp_path) -> None:
    pytest.importorskip("tokenizers", reason="needs tokenizers (pip install tokenizers)")
    base = folder(tmp_path, "llama")
    text = str(tmp_path / "text.txt")
    for name, size in (("a", 260), ("b", 264)):
        assert main(["tokenizer", "train", text, "--vocab", str(size), "--out", str(tmp_path / name)]) == 0
    with pytest.raises(DataError, match="needs a vocabulary of 260 tokens, the model has 256"):
        Trainer(options(base, tokenizer=str(tmp_path / "a")), quiet=True, model=base)
    keys = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**keys, "vocab_size": 270}))
    trainer = Trainer(options(base, tokenizer=str(tmp_path / "a")), quiet=True, model=base)
    assert trainer.corpus.vocab_size == 260  # a directory without a tokenizer takes the option's
    for file in (tmp_path / "b").iterdir():
        (base / file.name).write_bytes(file.read_bytes())
    assert Trainer(options(base), quiet=True, model=base).corpus.vocab_size == 264
    with pytest.raises(ConfigError, match="tokenizer must be that of the model"):
        Trainer(options(base, tokenizer=str(tmp_path / "a")), quiet=True, model=base)


def test_what_is_no_new_model(tmp_path) -> None:
    base = folder(tmp_path, "llama")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        models.load(base)  # only training draws weights
    with pytest.raises(ConfigError, match=r"lora\.r must be left out with .*llama, which holds no weights"):
        Trainer(options(base, **{"lora.r": 2}), quiet=True, model=base)
    with pytest.raises(ConfigError, match=r"model must be given once, got '.*llama' and the option 'tiny'"):
        Trainer(options(base, model="tiny"), quiet=True, model=base)
    with pytest.raises(ConfigError, match="model must be a model, a preset or a directory, got dict"):
        Trainer(options(base), quiet=True, model={})  # pyright: ignore[reportArgumentType]
    (base / "model-00001-of-00002.safetensors").write_bytes(b"")  # a shard whose index is lost
    assert has_weights(base)
    with pytest.raises(CheckpointError):
        Trainer(options(base), quiet=True, model=base)
    (base / "model-00001-of-00002.safetensors").rename(base / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="of pickles"):
        Trainer(options(base), quiet=True, model=base)


def test_a_save_that_lost_its_weights_is_damaged(tmp_path) -> None:
    base = folder(tmp_path, "llama")
    keys = models.LlamaConfig(**SIZES)
    models.Llama(keys).save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        Trainer(options(base), quiet=True, model=tmp_path / "saved")


def test_a_sequence_that_gpt2_cannot_read(tmp_path: Path) -> None:
    """Its positions are learned. It is said before anything is written, also of a model that is an object."""
    base = folder(tmp_path, "gpt2")
    with pytest.raises(ConfigError, match=r"^seq_len must be at most n_positions of the model \(32\), got 33$"):
        Trainer({**options(base, seq_len=33), "model.preset": str(base)}, quiet=True)
    model = models.GPT2(models.GPT2Config(**SMALL["gpt2"]))
    with pytest.raises(ConfigError, match=r"^seq_len must be at most n_positions of the model \(32\), got 33$"):
        Trainer(options(base, seq_len=33), quiet=True, model=model)
    assert not (tmp_path / "run").exists()
    assert (
        main(["train", "--model", str(base), "--data", str(tmp_path / "text.txt"), "--seq-len", "33", "--dry-run"]) == 2
    )
    Trainer({**options(base, seq_len=32), "model.preset": str(base)}, quiet=True).run()
