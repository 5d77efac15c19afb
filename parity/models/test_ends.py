"""Where a sequence ends: transformers -> xtrain -> transformers, the same number of tokens for each file."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from hf_families import build

import xtrain as xt
from xtrain import models, saving

pytestmark = pytest.mark.on_cpu
PROMPT = [1, 2, 3]
SHAPE = {"Llama": 2, "GPT2": 0, "Gemma2": 3}  # of hf_families, where greedy tokens are not all the same
FILES: dict[str, Any] = {
    "no file": None,
    "a list": {"eos_token_id": "both", "do_sample": True, "temperature": 0.6, "top_k": 20},
    "one": {"eos_token_id": "late"},
    "none": {"bos_token_id": 1, "eos_token_id": None},
    "nothing said": {"do_sample": False},
}


def of_transformers(path: Path) -> tuple[list[int], Any]:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids = torch.tensor([PROMPT], device="cpu")
    drawn = dict(do_sample=False, temperature=None, top_k=None)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, pad_token_id=0, **drawn)
    return out[0, 3:].tolist(), model.generation_config


def of_xtrain(path: Path) -> list[int]:
    return models.load(path).generate(PROMPT, 24, temperature=0.0).tolist()[3:]


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("family", SHAPE)
def test_both_ways(family: str, kind: str, tmp_path: Path) -> None:
    """The ends are tokens that come: `early`, which config.json names, and `late`; `both` is a list, whose second comes
    first. What is written is what was read, byte for byte, with a tokenizer of the same end and without.
    """
    hf = tmp_path / "hf"
    build(family, SHAPE[family]).save_pretrained(hf)
    free = models.load(hf).generate(PROMPT, 24, temperature=0.0, eos=()).tolist()[3:]
    order = list(dict.fromkeys(free))
    assert len(order) >= 3, free
    early, late = order[1], order[2]
    values = FILES[kind]
    if values is None:
        (hf / "generation_config.json").unlink()
        end = early
    else:
        names = {"both": [late, early], "late": late}
        values = {key: names.get(value, value) if key == "eos_token_id" else value for key, value in values.items()}
        (hf / "generation_config.json").write_text(json.dumps(values))
        end = values.get("eos_token_id")
    config = json.loads((hf / "config.json").read_text()) | {"eos_token_id": early}
    (hf / "config.json").write_text(json.dumps(config))
    want, said = of_transformers(hf)
    ends = end if isinstance(end, list) else [end]
    assert len(want) == next((i + 1 for i, token in enumerate(free) if token in ends), 24)
    assert of_xtrain(hf) == want
    tokenizer = SimpleNamespace(eos=ends[0], files=dict)
    for name, given in (("plain", None), ("with a tokenizer", tokenizer)):
        models.load(hf).save_pretrained(tmp_path / name, tokenizer=given)
        found, then = of_transformers(tmp_path / name)
        assert found == of_xtrain(tmp_path / name) == want, name
        assert (then.do_sample, then.temperature, then.top_k) == (said.do_sample, said.temperature, said.top_k)
        if values is not None:
            files = [(path / "generation_config.json").read_bytes() for path in (hf, tmp_path / name)]
            assert files[0] == files[1]
    saving.save_checkpoint(tmp_path / "checkpoint-00000001", models.load(hf), None, {})
    assert of_transformers(tmp_path / "checkpoint-00000001")[0] == want


def test_a_new_model_is_drawn_as_one_of_theirs(tmp_path: Path) -> None:
    """A new model of ours stops in transformers where it stops here, and `generate` is greedy there by default."""
    xt.manual_seed(4)
    sizes = dict(vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4)
    model = models.Llama(models.LlamaConfig(**sizes, initializer_range=0.3, bos_token_id=None))
    free = model.generate(PROMPT, 24, temperature=0.0, eos=()).tolist()[3:]
    model.config.eos_token_id = [60, list(dict.fromkeys(free))[2]]
    model.save_pretrained(tmp_path / "m")
    found, said = of_transformers(tmp_path / "m")
    assert found == of_xtrain(tmp_path / "m") == free[: len(found)] and len(found) < 24
    assert said.do_sample in (None, False) and said.eos_token_id == model.config.eos_token_id
