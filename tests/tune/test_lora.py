"""LoRA: what it computes, merge and unmerge, files, and which layers and values are refused."""

from __future__ import annotations

import copy
import dataclasses
import json
import os

import numpy as np
import pytest

import xtrain as xt
from xtrain import lora, models, nn, saving
from xtrain.errors import CheckpointError, ConfigError
from xtrain.nn.lora import LoraLayer, lora_layers
from xtrain.saving import SafetensorsFile

SIZES = dict(
    vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, head_dim=6
)


def qwen(**options) -> models.Qwen3:
    return models.Qwen3(models.Qwen3Config(**{**SIZES, "num_key_value_heads": 2, **options}))


def gpt2() -> models.GPT2:
    config = models.GPT2Config(vocab_size=61, n_positions=16, n_embd=24, n_layer=2, n_head=4)
    return models.GPT2(config).eval()


def shaken(model):
    """The model with a B that is not zero."""
    for layer in lora_layers(model).values():
        nn.init.normal_(layer.lora_B.weight, 0.0, 0.3)
    return model


def test_tensors_that_do_not_fit(tmp_path) -> None:
    path, model = adapter(tmp_path), qwen()
    tensors = xt.load(path / "adapter_model.safetensors")
    a, b = (next(name for name in tensors if part in name) for part in ("lora_A", "lora_B"))
    assert a.replace("lora_A", "lora_B") == b
    without = {part: {name: t for name, t in tensors.items() if name != part} for part in (a, b)}
    no_rank = {a: tensors[a][:0].contiguous(), b: tensors[b][:, :0].contiguous()}
    for changed, words in (
        (without[a], r"holds lora_B of \S+ alone"),
        (without[b], r"holds lora_A of \S+ alone"),
        ({}, "holds no LoRA"),
        ({**tensors, b: tensors[b].to(xt.int32)}, r"of \S+ must be floating point, got float32 and int32"),
        ({**tensors, **no_rank}, r"must have shapes \(r, \d+\) and \(\d+, r\), got \(0, \d+\) and \(\d+, 0\)"),
    ):
        xt.save(changed, path / "adapter_model.safetensors")
        with pytest.raises(CheckpointError, match=words):
            lora.load(model, path)
        assert not lora_layers(model)


def test_lora_needs_a_model_without_it(tmp_path) -> None:
    """Below a directory of LoRA; and a checkpoint with LoRA is none of a model without."""
    model = qwen()
    model.save_pretrained(tmp_path / "base")
    model = lora.apply(model, r=2, base_model_name_or_path=str(tmp_path / "base"))
    lora.save(model, tmp_path / "a")
    model.lora_config.base_model_name_or_path = str(tmp_path / "a")
    lora.save(model, tmp_path / "b")
    with pytest.raises(CheckpointError, match="base_model_name_or_path must be a model without LoRA, got "):
        models.load(tmp_path / "b")
    saving.save_checkpoint(tmp_path / "c", model)
    plain = qwen()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        saving.load_checkpoint(tmp_path / "c", plain)
    assert not lora_layers(plain) and all(p.requires_grad for p in plain.parameters())


def logits(model) -> np.ndarray:
    ids = xt.tensor(np.arange(20).reshape(2, 10) % 61)
    with xt.no_grad():
        return model(ids).float().cpu().numpy()


def parameters(model) -> dict[str, np.ndarray]:
    return {name: p.detach().float().cpu().numpy().copy() for name, p in model.named_parameters()}


# ---- what it computes


@pytest.mark.parametrize("rslora,scale", [(False, 6 / 4), (True, 6 / 2)])
def test_a_layer_is_its_formula(rslora: bool, scale: float) -> None:
    layer = nn.Sequential(nn.Linear(7, 5))
    plain = layer[0]
    lora.apply(layer, r=4, lora_alpha=6, use_rslora=rslora)
    new = layer[0]
    assert isinstance(new, lora.LoraLinear) and new.weight is plain.weight and new.bias is plain.bias
    x = xt.randn(3, 7)
    with xt.no_grad():
        assert (new(x).cpu().numpy() == plain(x).cpu().numpy()).all(), "B starts at zero"
    assert new.lora_A.weight.shape == (4, 7) and new.lora_B.weight.shape == (5, 4)
    assert 0 < float(new.lora_A.weight.abs().max()) <= 7**-0.5, "A starts as a Linear does"
    shaken(layer)
    w, b, a, up = (p.detach().cpu().numpy().astype(np.float64) for p in (new.weight, new.bias, new.lora_A.weight, new.lora_B.weight))  # fmt: skip
    want = x.cpu().numpy() @ (w + scale * up @ a).T + b
    np.testing.assert_allclose(new(x).detach().cpu().numpy(), want, rtol=1e-5, atol=1e-5)


def test_dropout_is_of_the_input_of_a() -> None:
    layer = nn.Sequential(nn.Linear(50, 5))
    lora.apply(layer, r=4, lora_dropout=0.5)
    new, x = shaken(layer)[0], xt.ones(1, 50)
    with xt.no_grad():
        a, b = new(x).cpu().numpy(), new(x).cpu().numpy()
        assert (a != b).any()
        layer.eval()
        assert (new(x).cpu().numpy() == new(x).cpu().numpy()).all()


@pytest.mark.parametrize("make", [qwen, gpt2])
def test_only_lora_is_trained(make) -> None:
    model = lora.apply(make(), r=2)
    before = parameters(model)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all(".lora_A." in name or ".lora_B." in name for name in trained)
    optimizer = xt.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    ids = xt.tensor(np.arange(20).reshape(2, 10) % 61)
    for _ in range(2):  # A has no gradient while B is zero
        optimizer.zero_grad()
        model.loss(ids, ids).backward()
        optimizer.step()
    after = parameters(model)
    assert {name for name in before if (before[name] != after[name]).any()} == trained
    assert {name for name, p in model.named_parameters() if p.grad is not None} == trained


@pytest.mark.parametrize("policy", ["cheap", "block", "full"])
def test_recomputation_gives_the_same_gradients(policy: str) -> None:
    """Also where the input of a layer requires no gradient, as the frozen table of tokens."""
    model = shaken(lora.apply(qwen(), r=2))
    ids = xt.tensor(np.arange(20).reshape(2, 10) % 61)
    found = []
    for each in ("none", policy):
        model.zero_grad()
        model.recompute = each
        model.loss(ids, ids).backward()
        found.append({name: p.grad.cpu().numpy() for name, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys() and len(found[0]) == 28
    assert all((found[0][name] == found[1][name]).all() for name in found[0])


# ---- merge and unmerge


@pytest.mark.parametrize("make", [qwen, gpt2, lambda: qwen().bfloat16()])
def test_merged_and_back_bit_for_bit(make) -> None:
    model = shaken(lora.apply(make(), r=3, lora_alpha=5))
    before, y = parameters(model), logits(model)
    wide = next(model.parameters()).dtype == xt.float32
    assert lora.merge(model) is model and all(layer.merged for layer in lora_layers(model).values())
    assert set(parameters(model)) == set(before)
    np.testing.assert_allclose(logits(model), y, rtol=0, atol=2e-5 if wide else 0.2)
    lora.merge(model)  # a second time changes nothing
    lora.unmerge(model)
    lora.unmerge(model)
    assert all((parameters(model)[name] == before[name]).all() for name in before) and (logits(model) == y).all()


def test_what_is_merged_is_rounded_once() -> None:
    """In bfloat16: B A is not rounded before it is added. What is merged stays frozen. In float64 nothing is narrower."""
    assert all(layer.delta().dtype is xt.float64 for layer in lora_layers(lora.apply(qwen().double(), r=3)).values())
    model = shaken(lora.apply(qwen().bfloat16(), r=3))
    layers = lora_layers(model)
    want = {name: (layer.weight.float() + layer.delta()).bfloat16() for name, layer in layers.items()}
    assert any((layer.weight + layer.delta().bfloat16() != want[name]).any().item() for name, layer in layers.items())
    lora.merge(model)
    assert all((layer.weight == want[name]).all().item() for name, layer in layers.items())
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        name for name in parameters(model) if ".lora_" in name
    }
    modules = dict(lora.unload(model).named_modules())
    assert all((modules[name].weight == merged).all().item() for name, merged in want.items())


def test_merged_weights_that_were_converted_come_back() -> None:
    model = shaken(lora.apply(qwen(), r=2))
    before = parameters(model)
    lora.merge(model).double()
    lora.unmerge(model)
    assert {p.dtype for p in model.parameters()} == {xt.float64}
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        name for name in before if ".lora_" in name
    }
    assert all((parameters(model)[name] == before[name]).all() for name in before)


@pytest.mark.parametrize("make", [qwen, gpt2])
def test_unloaded_it_is_a_plain_model(make, tmp_path) -> None:
    model = make()
    start = logits(model)
    shaken(lora.apply(model, r=3))
    y = logits(model)
    lora.unload(model)
    assert not lora_layers(model) and all(p.requires_grad for p in model.parameters())
    assert not hasattr(model, "lora_config")
    np.testing.assert_allclose(logits(model), y, rtol=0, atol=2e-5)
    model.save_pretrained(tmp_path / "m")
    assert (logits(models.load(tmp_path / "m").eval()) == logits(model)).all()
    again = make()
    start = logits(again)
    lora.unload(shaken(lora.apply(again, r=3)), merge=False)
    assert (logits(again) == start).all()


def test_weights_that_lie_together_stay_so() -> None:
    """q, k and v are one product again when LoRA is gone."""
    model = qwen()
    lora.unload(lora.apply(model, r=2))
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.weight.adjoins(attention.k_proj.weight)


# ---- which layers


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.group_up = nn.Linear(2, 2), nn.Linear(2, 2)


def test_a_target_is_a_whole_name() -> None:
    assert list(lora_layers(lora.apply(Two(), r=1, target_modules=["up"]))) == ["up"]


@pytest.mark.parametrize("training", [True, False])
def test_layers_have_the_mode_of_what_they_stand_for(training: bool) -> None:
    model = lora.apply(qwen().train(training), r=1, lora_dropout=0.5)
    assert {module.training for module in model.modules()} == {training}


def test_targets() -> None:
    def names(target, **options):
        return list(lora_layers(lora.apply(qwen(**options), r=1, target_modules=target)))

    every = names("all-linear")
    assert len(every) == 14 and names("all-linear", tie_word_embeddings=False) == every, "not the head"
    assert names(["q_proj", "layers.1.mlp.down_proj"]) == [
        "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj",
    ]  # fmt: skip
    assert names(r".*\.1\..*_proj") == every[7:]
    assert names(["lm_head"], tie_word_embeddings=False) == ["lm_head"]
    for target, words in (
        (["qproj"], r"must be layers of the model, among .*q_proj.*, got 'qproj'"),
        (["_proj"], "must be layers of the model"),
        (["mlp"], r"must be linear layers, got model\.layers\.0\.mlp, a MLP"),
        ("nothing", "must name a layer of the model, got 'nothing'"),
        ("(", r"'\(' is no regular expression"),
        ([], "must name a layer of the model"),
        ([3], "must be a text or a list of names"),
    ):
        with pytest.raises(ConfigError, match=f"^lora: target_modules {words}"):
            names(target)


@pytest.mark.parametrize(
    "options,words",
    [
        ({"r": 0}, "r must be an integer of at least 1, got 0"),
        ({"r": 2.0}, "r must be an integer"),
        ({"r": True}, "r must be an integer of at least 1, got True"),
        ({"lora_alpha": 0}, "lora_alpha must be a positive number, got 0"),
        ({"lora_alpha": 10**400}, "lora_alpha must be a positive number, got 10"),
        ({"lora_dropout": 1.0}, r"lora_dropout must be a number in \[0, 1\), got 1.0"),
        ({"use_rslora": 1}, "use_rslora must be true or false, got 1"),
    ],
)
def test_values_out_of_range(options, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^lora: {words}"):
        lora.apply(qwen(), **options)


def test_options_are_over_a_config() -> None:
    config = lora.LoraConfig(r=2, lora_alpha=6)
    model = lora.apply(qwen(), config, r=3)
    assert {(layer.lora_A.out_features, layer.scaling) for layer in lora_layers(model).values()} == {(3, 2.0)}
    assert config.r == 2 and model.lora_config == lora.LoraConfig(r=3, lora_alpha=6)
    with pytest.raises(ConfigError, match="must name a layer of the model"):
        lora.apply(qwen(), target_modules=r".*q_pro")  # the beginning of a name


def test_a_rank_without_memory_changes_nothing() -> None:
    model = qwen()
    with pytest.raises(xt.OutOfMemoryError, match="out of memory"):
        lora.apply(model, r=2**40)
    assert all(parameter.requires_grad for parameter in model.parameters()) and not lora_layers(model)


def test_a_layer_at_two_places_is_one() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, shared)
    lora.apply(model, r=1)
    assert model[0] is model[1] and isinstance(model[0], LoraLayer)
    with pytest.raises(ConfigError, match="the model must have no LoRA yet"):
        lora.apply(model, r=1)


def test_a_copy_is_its_own() -> None:
    model = lora.merge(shaken(lora.apply(qwen(), r=2)))
    other = copy.deepcopy(model)
    y = logits(model)
    lora.unmerge(other)
    assert (logits(model) == y).all() and not lora_layers(other)["model.layers.0.mlp.up_proj"].merged


# ---- files


@pytest.mark.parametrize("make", [qwen, gpt2])
def test_saved_and_loaded(make, tmp_path) -> None:
    base = make()
    base.save_pretrained(tmp_path / "base")
    model = shaken(lora.apply(base, r=3, lora_alpha=5, base_model_name_or_path=str(tmp_path / "base")))
    y = logits(model)
    lora.save(model, tmp_path / "a")
    values = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert (values["peft_type"], values["r"], values["lora_alpha"], values["bias"]) == ("LORA", 3, 5, "none")
    assert (values["fan_in_fan_out"], values["use_rslora"]) == (make is gpt2, False)
    with SafetensorsFile(tmp_path / "a" / "adapter_model.safetensors") as file:
        assert len(file.entries) == 2 * len(lora_layers(model))
        assert all(name.startswith("base_model.model.") for name in file.entries)
    other = lora.load(models.load(tmp_path / "base").eval(), tmp_path / "a")
    assert (logits(other) == y).all()
    assert {n for n, p in other.named_parameters() if p.requires_grad} == {
        n for n in parameters(other) if ".lora_" in n
    }
    lora.merge(shaken(other))
    lora.load(other, tmp_path / "a")  # the same layers: values alone, also where they are merged
    np.testing.assert_allclose(logits(other), y, rtol=0, atol=2e-5)
    assert all(layer.merged for layer in lora_layers(other).values())
    assert (logits(lora.unmerge(other)) == y).all()
    model.save_pretrained(tmp_path / "b")  # the same files, and what names the model
    assert (logits(models.load(tmp_path / "b").eval()) == y).all()
    assert not (tmp_path / "b" / "model.safetensors").exists()


def test_ranks_of_layers_come_from_the_tensors(tmp_path) -> None:
    model = qwen()
    nn.lora.place_layers(
        model, {"model.layers.0.mlp.up_proj": 2, "model.layers.1.mlp.up_proj": 5}, lora.LoraConfig(r=5)
    )
    shaken(model)
    lora.save(model, tmp_path / "a")
    values = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    lora.save(lora.apply(qwen(), use_rslora=True), tmp_path / "rs")
    assert json.loads((tmp_path / "rs" / "adapter_config.json").read_text())["use_rslora"] is True
    assert values["rank_pattern"] == {"model.layers.0.mlp.up_proj": 2} and values["target_modules"] == ["up_proj"]
    xt.manual_seed(0)
    found = lora_layers(lora.load(qwen(), tmp_path / "a"))
    assert [(layer.lora_A.out_features, layer.scaling) for layer in found.values()] == [(2, 4.0), (5, 1.6)]


def test_layers_whose_like_are_left_out_are_named_whole(tmp_path) -> None:
    """PEFT adapts every layer whose name ends with a target."""
    one = "model.layers.0.mlp.up_proj"
    model = qwen()
    nn.lora.place_layers(model, {one: 2}, lora.LoraConfig(r=2))
    lora.save(model, tmp_path / "a")
    assert json.loads((tmp_path / "a" / "adapter_config.json").read_text())["target_modules"] == [one]
    assert list(lora_layers(lora.load(qwen(), tmp_path / "a"))) == [one]


def adapter(tmp_path, change=lambda values: None, **options):
    """A directory of LoRA whose config is changed."""
    path = tmp_path / "a"
    lora.save(lora.apply(qwen(), **{"r": 2, **options}), path)
    values = json.loads((path / "adapter_config.json").read_text())
    change(values)
    (path / "manifest.json").unlink()
    (path / "adapter_config.json").write_text(json.dumps(values))
    return path


@pytest.mark.parametrize(
    "key,value,words",
    [
        ("use_dora", True, "use_dora must be left out, got True: it is not supported"),
        ("alpha_pattern", {"q_proj": 3}, "alpha_pattern must be left out"),
        ("modules_to_save", ["lm_head"], "modules_to_save must be left out"),
        ("lora_bias", True, "lora_bias must be left out"),
        ("a_new_key", 7, "a_new_key must be left out"),
        ("bias", "all", "bias must be none, got 'all'"),
        ("peft_type", "IA3", "peft_type must be LORA, got 'IA3'"),
        ("init_lora_weights", "pissa", "init_lora_weights must leave the model as it was, got 'pissa'"),
        ("lora_alpha", "much", "lora: lora_alpha must be a positive number, got 'much'"),
        ("base_model_name_or_path", 7, "base_model_name_or_path must be text, got 7"),
        ("base_model_name_or_path", "a\0b", "base_model_name_or_path must be text, got "),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, key: str, value, words: str) -> None:
    path = adapter(tmp_path, lambda values: values.update({key: value}))
    with pytest.raises(CheckpointError, match=rf"adapter_config\.json: {words}"):
        lora.load(qwen(), path)


def test_keys_that_change_nothing_are_read_over(tmp_path) -> None:
    path = adapter(tmp_path, lambda values: values.update(use_dora=False, alpha_pattern={}, a_new_key=None))
    lora.load(qwen(), path)


def test_loading_draws_no_random_numbers(tmp_path) -> None:
    path, model = adapter(tmp_path), qwen()
    before = xt.get_rng_state()
    lora.load(model, path)
    assert xt.get_rng_state() == before


def test_files_that_do_not_fit(tmp_path) -> None:
    path = adapter(tmp_path)
    with pytest.raises(CheckpointError, match=r"LoRA of model\.layers\.1\.\S+, which the model does not have"):
        lora.load(qwen(num_hidden_layers=1), path)
    with pytest.raises(CheckpointError, match=r"of \S+ must have shapes \(r, 44\) and \(24, r\), got \(2, 40\) and"):
        lora.load(qwen(head_dim=8, intermediate_size=44), path)
    with pytest.raises(CheckpointError, match="must hold LoRA of the layers and ranks that the model has"):
        lora.load(lora.apply(qwen(), r=3), path)
    like = lora.load(qwen(), path)
    for options in ({"lora_alpha": 77}, {"use_rslora": True}):
        own = dataclasses.replace(like.lora_config, **options)
        with pytest.raises(CheckpointError, match="lora_alpha and use_rslora must be .* as in the model's LoRA, got 8"):
            lora.load(lora.apply(qwen(), own), path)
    name = next(iter(tensors := xt.load(path / "adapter_model.safetensors")))
    xt.save({**tensors, name: tensors[name].to(xt.int64)}, tmp_path / "whole")
    os.replace(path / "adapter_model.safetensors", path / "kept")
    os.replace(tmp_path / "whole", path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"of \S+ must be floating point, got int64 and float32"):
        lora.load(qwen(), path)
    os.replace(path / "kept", path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="base_model_name_or_path must be a directory that is here, got None"):
        (path / "config.json").write_text("{}")
        models.load(path)
    with pytest.raises(ConfigError, match=r"lora\.save: the model must have LoRA, got one without"):
        lora.save(qwen(), tmp_path / "b")
