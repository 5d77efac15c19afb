"""The registry of models: a second architecture is trained, saved, loaded, resumed and sampled by its name."""

from __future__ import annotations

import json

import numpy as np
import pytest
from bigram import Bigram, BigramConfig
from runs import options, python, text_file, weights

from xtrain import cli, saving
from xtrain.errors import CheckpointError, ConfigError
from xtrain.models import Qwen3, registry
from xtrain.models.presets import PRESETS
from xtrain.train import Trainer
from xtrain.train.estimate import dry_run

pytestmark = pytest.mark.on_cpu


@pytest.fixture
def second(monkeypatch):
    """The one line of a second model, and a preset, so that training can start from it by name."""
    monkeypatch.setitem(registry.MODULES, "bigram", "bigram")
    monkeypatch.setitem(PRESETS, "pairs", dict(model_type="bigram", hidden_size=8))


def given(tmp_path, out: str, **changes) -> dict:
    values = options(text_file(tmp_path / "text.txt"), tmp_path / out, model__preset="pairs", **changes)
    return {name: value for name, value in values.items() if name == "model.preset" or not name.startswith("model.")}


def test_a_second_model_goes_all_the_way(tmp_path, second, capsys) -> None:
    whole = Trainer(given(tmp_path, "whole", sample__tokens=8), quiet=True)
    assert type(whole.model) is Bigram and whole.model.config.hidden_size == 8
    result = whole.run()
    newest = tmp_path / "whole" / "checkpoint-00000008"
    assert result.step == 8 and len(result.sample) > 8
    assert json.loads((newest / "config.json").read_text())["model_type"] == "bigram"
    assert json.loads((newest / "generation_config.json").read_text()) == {"do_sample": False, "eos_token_id": 0}

    stopped = Trainer(given(tmp_path, "parts"), quiet=True)
    for _ in range(3):
        stopped.train_step()
    stopped.save()
    resumed = Trainer({"resume": str(tmp_path / "parts")}, quiet=True)
    assert type(resumed.model) is Bigram and resumed.run().step == 8
    assert weights(tmp_path / "parts" / "checkpoint-00000008") == weights(newest), "the same bits"

    model = saving.load_model(newest)
    state = whole.model.state_dict()
    assert type(model) is Bigram
    assert all(np.array_equal(value.cpu(), state[name].cpu()) for name, value in model.state_dict().items())
    saving.save_model(model, tmp_path / "copy")
    again = Trainer(given(tmp_path, "again") | {"model.preset": str(tmp_path / "copy"), "steps": 2}, quiet=True)
    assert type(again.model) is Bigram and again.run().step == 2

    capsys.readouterr()
    assert cli.main(["sample", str(newest), "--prompt", "def ", "--max-tokens", "5"]) == 0
    assert capsys.readouterr().out.startswith("def ")


def test_what_a_model_has_not_is_refused(tmp_path, second) -> None:
    with pytest.raises(ConfigError, match=r"model\.mhc_streams must be left out for model pairs, got 2"):
        Trainer(given(tmp_path, "run") | {"model.mhc_streams": 2}, quiet=True)


def test_a_model_without_policies_of_recomputation(tmp_path, second) -> None:
    for ask in (dry_run, lambda values: Trainer(values, quiet=True)):
        with pytest.raises(ConfigError, match="^recompute must be none for Bigram, got cheap"):
            ask(given(tmp_path, "run", device="cpu", recompute="cheap"))
    lines = [line for line in dry_run(given(tmp_path, "run", device="cpu")).splitlines() if "--recompute" in line]
    assert len(lines) == 1 and lines[0].startswith("--recompute none ")


def test_unknown_types_are_named(tmp_path, second) -> None:
    for kind in ("gemma", None, ["qwen3"], "xtrain_llama_mhc", "xtrain_bigram_mhc"):  # Bigram would ignore the streams
        with pytest.raises(
            ValueError, match="model_type must be gemma2, gpt2, llama, mistral, qwen2, qwen3 or bigram, got "
        ):
            registry.architecture(kind)
    assert registry.architecture("xtrain_qwen3_mhc").model is registry.architecture("qwen3").model is Qwen3
    saving.save_model(Bigram(BigramConfig()), tmp_path / "m")
    del registry.MODULES["bigram"]
    with pytest.raises(
        CheckpointError,
        match=r"config\.json: model_type must be gemma2, gpt2, llama, mistral, qwen2 or qwen3, got 'bigram'",
    ):
        saving.load_model(tmp_path / "m")


def test_any_name_of_a_type_can_have_streams(monkeypatch) -> None:
    monkeypatch.setitem(registry.MODULES, "qwen3-small.en", ".qwen3")
    assert registry.architecture("xtrain_qwen3-small.en_mhc").model is Qwen3


def test_saving_imports_no_model() -> None:
    code = (
        "import sys, xtrain.saving, xtrain.models, xtrain.train.config; assert 'xtrain.models.qwen3' not in sys.modules"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


def test_policies_that_a_model_does_not_have_are_refused() -> None:
    """They would have no effect."""
    model = Bigram(BigramConfig())
    assert model.recompute == "none" and model.gradient_checkpointing is False
    model.recompute, model.gradient_checkpointing = "none", False
    with pytest.raises(ValueError, match="^Bigram: recompute must be none, got 'block'$"):
        model.recompute = "block"
    with pytest.raises(ValueError, match="^Bigram: gradient_checkpointing must be off, got True$"):
        model.gradient_checkpointing = True
