"""Arguments of the wrong kind, where models and tensors are saved and loaded and runs begin: one sentence that names them."""

from __future__ import annotations

import os

import pytest

import xtrain as xt
from xtrain import lora, models, nn
from xtrain.data import prepare
from xtrain.errors import CheckpointError, ConfigError
from xtrain.models import GPT2, GPT2Config
from xtrain.train import Trainer

pytestmark = pytest.mark.on_cpu
TINY = {"vocab_size": 16, "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 8}


def model() -> GPT2:
    return GPT2(GPT2Config(**TINY))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: models.load(None), "load: directory must be a path, got NoneType"),
        (lambda: GPT2.from_pretrained(3), "load: directory must be a path, got int"),
        (lambda: model().save_pretrained(None), "save: directory must be a path, got NoneType"),
        (lambda: xt.load(None), "load: path must be a path, got NoneType"),
        (lambda: xt.save({"x": xt.ones(2)}, 77), "save: path must be a path, got int"),
        (lambda: lora.load(model(), None), "lora.load: directory must be a path, got NoneType"),
        (lambda: lora.save(lora.apply(model(), r=2), []), "lora.save: directory must be a path, got list"),
        (lambda: lora.apply(5, r=2), "lora: model must be a Module, got int"),
        (lambda: prepare(None, "o"), "data: source must be a path, got NoneType"),
        (lambda: prepare("python", 3), "data: out must be a path, got int"),
        (lambda: prepare(__file__, "o", 5), "data: tokenizer must be a Tokenizer or None, got int"),
        (lambda: Trainer([1]), "Trainer: values must be a dict of options or a TrainConfig, got list"),
        (lambda: Trainer("x"), "Trainer: values must be a dict of options or a TrainConfig, got str"),
    ],
)
def test_what_is_no_path_and_no_model(call, message: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError if message.startswith("Trainer") else TypeError, match=f"^{message}$"):
        call()
    assert not list(tmp_path.iterdir())


def test_a_name_with_nul_is_no_directory(tmp_path) -> None:
    for call in (lambda: models.load("a\0b"), lambda: lora.load(model(), "a\0b")):
        with pytest.raises(CheckpointError, match=r"^a.?b"):
            call()


def test_paths_of_bytes(tmp_path, monkeypatch) -> None:
    """Also those of no encoding."""
    monkeypatch.chdir(tmp_path)
    xt.save({"x": xt.ones(2)}, b"\xff.safetensors")
    assert xt.load(b"\xff.safetensors")["x"].tolist() == [1, 1]
    model().save_pretrained(b"m\xff")
    assert isinstance(models.load(b"m\xff"), nn.Module)
    assert sorted(os.listdir(b".")) == [b"m\xff", b"\xff.safetensors"]
