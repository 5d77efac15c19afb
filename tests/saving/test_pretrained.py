"""save_pretrained and from_pretrained: Hugging Face's names and arguments."""

from __future__ import annotations

import json

import pytest

import xtrain as xt
from xtrain import models, saving
from xtrain.tokenizers import ByteTokenizer


def llama() -> models.Llama:
    sizes = dict(vocab_size=256, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    return models.Llama(models.LlamaConfig(**sizes))


@pytest.mark.parametrize("size,files", [("5GB", 1), ("12KB", 4), (12000, 4), ("0.02MB", 3), (10**6, 1)])
def test_shards_of_a_size(tmp_path, size, files: int) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "m", max_shard_size=size)
    found = sorted(path.name for path in (tmp_path / "m").glob("*.safetensors"))
    assert len(found) == files and ("model.safetensors" in found) == (files == 1)
    if files > 1:
        index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
        for name in found:
            with saving.SafetensorsFile(tmp_path / "m" / name) as file:
                assert len(file.entries) == 1 or sum(len(file.read(tensor)) for tensor in file.entries) <= 20_000
        assert found[0] == f"model-00001-of-{files:05d}.safetensors" and set(index["weight_map"].values()) == set(found)
    loaded = models.Llama.from_pretrained(tmp_path / "m")
    assert all(
        (a.detach() == b.detach()).all().item() for a, b in zip(model.parameters(), loaded.parameters(), strict=True)
    )


@pytest.mark.parametrize(
    "size,count",
    [
        (1, 1), ("17", 17), ("3B", 3), ("2KB", 2000), ("2KiB", 2048), ("1.5 GB", 1_500_000_000), ("3MiB", 3 << 20),
        ("5gb", 5 * 10**9), ("2TiB", 2 << 40), (" 7 KB\n", 7000), (2**53 + 1, 2**53 + 1), (str(2**53 + 1), 2**53 + 1),
    ],
)  # fmt: skip
def test_sizes(size, count: int) -> None:
    assert saving.parse_size(size) == count


@pytest.mark.parametrize(
    "size", [0, -1, True, "", "GB", "-5GB", "5XB", "5IB", "0.1B", "1e3", 5.0, None, "5GB\n\n7", "9" * 40]
)
def test_sizes_that_cannot_be(tmp_path, size) -> None:
    with pytest.raises(
        ValueError, match="^save_pretrained: max_shard_size must be a positive number of bytes or a text"
    ):
        llama().save_pretrained(tmp_path / "m", max_shard_size=size)
    assert not (tmp_path / "m").exists()


def test_with_a_tokenizer_in_another_dtype(tmp_path) -> None:
    llama().save_pretrained(tmp_path / "m", tokenizer=ByteTokenizer())
    assert (tmp_path / "m" / "tokenizer.json").exists()
    loaded = models.Llama.from_pretrained(tmp_path / "m", dtype=xt.bfloat16, device="cpu")
    assert {(p.dtype, str(p.device)) for p in loaded.parameters()} == {(xt.bfloat16, "cpu")}
    assert models.LlamaConfig.from_pretrained(tmp_path / "m").hidden_size == 16
    with pytest.raises(ValueError, match=r"from_pretrained: \S+m must hold a Qwen3, got Llama"):
        models.Qwen3.from_pretrained(tmp_path / "m")


def test_names_of_transformers_have_a_substitute() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'AutoModelForCausalLM': xt\.models\.load\(DIR\) reads"):
        models.AutoModelForCausalLM  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
