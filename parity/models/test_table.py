"""The table of parity (table.py): a small part of it, and that it sees what is wrong."""

from __future__ import annotations

import pytest
import table
import torch

import xtrain as xt
from xtrain import models


@pytest.mark.parametrize("family", ["Qwen2", "GPT2"])
def test_a_part_of_the_table(family: str, capsys) -> None:
    assert table.main(["--families", family, "--configs", "1", "--prompts", "2", "--tokens", "6"]) == 0
    out = capsys.readouterr().out
    assert out.count("1/1 models") == 3 and out.count("2/2") >= 4 and "ragged" in out and "all within" in out
    assert "tokens equal" in out and f" bfloat16  {torch.get_default_device()}  greedy, 6 tokens: batch 1: " in out


def test_it_sees_another_model(capsys, monkeypatch) -> None:
    """Other weights are wrong in every line but those of files."""
    load = table.loaded

    def other(theirs: torch.nn.Module) -> models.LanguageModel:
        model = load(theirs)
        with xt.no_grad():
            model.model.norm.weight.mul_(1.01)
            model.model.embed_tokens.weight[:, 0] = 3.0
        return model

    monkeypatch.setattr(table, "loaded", other)
    assert table.main(["--families", "Llama", "--configs", "1", "--prompts", "2", "--tokens", "6"]) == 1
    out = capsys.readouterr().out
    for words in ("float32: logits", "float32: gradients", "float32: ragged", "bfloat16: logits", "batch 1", "batch 4"):
        assert any(words in line for line in out.splitlines() if line.startswith("WRONG")), words


def test_it_sees_what_does_not_come_back(monkeypatch, capsys) -> None:
    """A tensor and a key."""
    save = models.Llama.save_pretrained

    def other(model, folder) -> None:
        with xt.no_grad():
            model.model.norm.weight[0] = 0.123
        model.config.rms_norm_eps = 1e-2
        save(model, folder)

    monkeypatch.setattr(models.Llama, "save_pretrained", other)
    assert table.main(["--families", "Llama", "--configs", "1", "--prompts", "0"]) == 1
    out = capsys.readouterr().out
    assert "model.norm.weight, " in out and "rms_norm_eps of float16 did not come back" in out
