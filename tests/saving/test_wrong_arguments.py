"""Arguments of the wrong kind, where models and tensors are saved and loaded and runs begin: one sentence that names them."""

from __future__ import annotations

import os

import pytest

import xtrain as xt
from xtrain import lora, models, nn
from xtrain.cli.verify import command as verify
from xtrain.data import prepare
from xtrain.errors import CheckpointError, ConfigError
from xtrain.models import GPT2, GPT2Config
from xtrain.train import Trainer
from xtrain.train.rundir import resolve_run_directory

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


@pytest.mark.parametrize("path", ["a\0b", b"a\0b", "a\ud800"])
def test_a_path_that_no_file_can_have(path, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = repr(os.fsdecode(path)).replace("\\", "\\\\")
    for what, call in (
        ("save: path", lambda: xt.save({"x": xt.ones(2)}, path)),
        ("load: path", lambda: xt.load(path)),
        ("load: directory", lambda: models.load(path)),
        ("save: directory", lambda: model().save_pretrained(path)),
        ("lora.load: directory", lambda: lora.load(model(), path)),
        ("data: source", lambda: prepare(path, "o")),
        ("data: out", lambda: prepare(__file__, path)),
    ):
        with pytest.raises(ValueError, match=f"^{what} must be a path that a file can have, got {name}$"):
            call()
    for call in (lambda: resolve_run_directory(os.fsdecode(path)), lambda: verify([os.fsdecode(path)])):
        with pytest.raises(CheckpointError, match="must be a run, a checkpoint or a model directory"):
            call()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", ["a" * 5000, "a/" * 5000], ids=["name", "path"])
def test_a_path_that_is_too_long(path, tmp_path, monkeypatch) -> None:
    """One sentence that names it; nothing is left."""
    monkeypatch.chdir(tmp_path)
    for call in (
        lambda: xt.load(path),
        lambda: models.load(path),
        lambda: model().save_pretrained(path),
        lambda: lora.load(model(), path),
        lambda: resolve_run_directory(path),
        lambda: verify([path]),
    ):
        with pytest.raises(CheckpointError, match="a{9}|(a/){9}") as error:
            call()
        assert "\n" not in str(error.value)
    with pytest.raises(OSError, match="too long"):
        xt.save({"x": xt.ones(2)}, path)
    assert not list(tmp_path.iterdir())


def test_paths_of_bytes(tmp_path, monkeypatch) -> None:
    """Also those of no encoding."""
    monkeypatch.chdir(tmp_path)
    xt.save({"x": xt.ones(2)}, b"\xff.safetensors")
    assert xt.load(b"\xff.safetensors")["x"].tolist() == [1, 1]
    model().save_pretrained(b"m\xff")
    assert isinstance(models.load(b"m\xff"), nn.Module)
    assert sorted(os.listdir(b".")) == [b"m\xff", b"\xff.safetensors"]
