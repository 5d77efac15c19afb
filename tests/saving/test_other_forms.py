"""Model directories of other makers that are not read: the reason and the way out, in one sentence."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from xtrain import models
from xtrain.errors import CheckpointError
from xtrain.models.registry import MODULES, architecture

pytestmark = pytest.mark.on_cpu

SMALL = dict(
    vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    models.Llama(models.LlamaConfig(**SMALL)).save_pretrained(tmp_path / "model")
    (tmp_path / "model/manifest.json").unlink()
    return tmp_path / "model"


def said(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        models.load(folder)
    text = str(caught.value)
    assert text.startswith(str(folder)) and "\n" not in text
    return text[len(str(folder)) :]


@pytest.mark.parametrize(
    "name",
    ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "pytorch_model.bin.index.json", "epoch=1.ckpt"],
)
def test_pickles_are_refused_with_the_way_out(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    assert said(folder) == (
        f" must hold model.safetensors, got {name!r}, of pickles, which can run code: where it is trusted, load it with "
        "transformers and write it with save_pretrained(DIR)"
    )


@pytest.mark.parametrize("name", ["model.gguf", "tf_model.h5", "flax_model.msgpack", "model.onnx"])
def test_other_forms_are_named(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    assert said(folder) == f" must hold model.safetensors, got {name!r}, a form that is not read: convert it"


def test_files_beside_weights_are_no_weights(folder: Path) -> None:
    for name in ("pytorch_model.bin", "model.gguf", "training_args.bin"):
        (folder / name).write_bytes(b"\x80\x02")
    assert models.load(folder).config.vocab_size == 61
    for name in ("model.safetensors", "pytorch_model.bin", "model.gguf"):
        (folder / name).unlink()
    assert said(folder) == "/model.safetensors cannot be read: No such file or directory"


def test_files_of_a_trainer_are_no_weights(folder: Path) -> None:
    """What is missing is named, and not a file that would not have held it."""
    (folder / "model.safetensors").unlink()
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"):
        (folder / name).write_bytes(b"\x80\x02")
    assert "model.safetensors" in said(folder) and "pickles" not in said(folder)


def test_pointers_of_git_lfs(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert "is not a safetensors file but a pointer of Git LFS: run `git lfs pull`" in said(folder)


def test_a_file_is_no_directory(folder: Path) -> None:
    assert said(folder / "model.safetensors") == " must be a model directory, but it is a file"
    assert said(folder / "nothing") == " must be a model directory, but there is none"


def test_tensors_of_integers(folder: Path) -> None:
    tensors = dict(load_file(folder / "model.safetensors"))
    tensors["model.norm.weight"] = np.ones(24, np.int64)
    shutil.copy(folder / "model.safetensors", folder / "kept")
    save_file(tensors, folder / "model.safetensors")
    assert said(folder) == ": model.norm.weight must be of float64, float32, bfloat16, float16, got int64"


@pytest.mark.parametrize("kind", [*MODULES])
def test_keys_of_other_architectures(kind: str, folder: Path) -> None:
    """Named when they change the mathematics; at values that do not, they are kept."""
    config = architecture(kind).config
    base = {} if kind == "gpt2" else SMALL
    for key, value in (
        ("final_logit_softcapping", 30.0), ("attn_logit_softcapping", 50.0), ("query_pre_attn_scalar", 256), ("num_local_experts", 8),
        ("embedding_multiplier", 12.0), ("residual_multiplier", 0.2), ("logits_scaling", 8.0), ("attention_multiplier", 0.1),
        ("clip_qkv", 8.0), ("use_qk_norm", True), ("attention_chunk_size", 8192), ("is_encoder_decoder", True), ("alibi", True),
        ("add_cross_attention", True),
    ):  # fmt: skip
        if key in {f.name for f in dataclasses.fields(config)}:
            continue
        with pytest.raises(ValueError, match=f"^{config.__name__}: {key} is not supported, got {value}: .* remove it"):
            config.from_dict({**base, key: value})
    neutral = dict(residual_multiplier=1.0, alibi=False, num_local_experts=0, final_logit_softcapping=None)
    kept = config.from_dict({**base, **neutral}).to_dict()
    assert {key: kept[key] for key in neutral} == neutral
    if kind == "llama":
        values = json.loads((folder / "config.json").read_text()) | {"clip_qkv": 8.0}
        (folder / "config.json").write_text(json.dumps(values))
        assert said(folder) == (
            "/config.json: LlamaConfig: clip_qkv is not supported, got 8.0: it changes what most models compute; where "
            "this one has no use for it, remove it from config.json"
        )
