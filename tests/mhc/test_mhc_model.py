"""Qwen3 with hyper-connections: the configuration, files, and training."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
from runs import options, text_file, weights

import xtrain as xt
from xtrain import nn
from xtrain.errors import CheckpointError, ConfigError
from xtrain.models import Qwen3, Qwen3Config
from xtrain.optable.table import array, bits, tensor
from xtrain.testing import first_divergence
from xtrain.train import Trainer, nonfinite

# ---- the model option -------------------------------------------------------------------------------------------------------------


def config(**changes) -> Qwen3Config:
    sizes = dict(vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=8, max_position_embeddings=64, tie_word_embeddings=True)  # fmt: skip
    return Qwen3Config(**{**sizes, "mhc_streams": 4, **changes})


def make(**changes) -> Qwen3:
    xt.manual_seed(1)
    model = Qwen3(config(initializer_range=0.2, **changes))
    for name, p in model.named_parameters():
        if name.endswith("mhc.alpha"):
            nn.init.constant_(p, 0.5)
    return model


def ids_of(model: Qwen3, *shape: int):
    return tensor(np.random.default_rng(0).integers(0, model.config.vocab_size, shape))


def losses(model: Qwen3, steps: int = 20) -> list[float]:
    optimizer = xt.optim.AdamW(model.parameters(), lr=1e-2)
    ids, found = ids_of(model, 2, 17), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model.loss(ids[:, :-1], ids[:, 1:])
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("contraction", ["mean", "sum", "learned"])
@pytest.mark.parametrize("streams", [1, 2, 4, 8])
def test_a_model_with_streams_learns(streams: int, contraction: str) -> None:
    model = make(mhc_streams=streams, mhc_contraction=contraction)
    before = losses(model)
    assert all(np.isfinite(before)) and before[-1] < 0.5 * before[0]
    assert all(p.grad is not None and np.isfinite(array(p.grad)).all() for p in model.parameters())


def test_no_streams_means_no_trace() -> None:
    plain = config(mhc_streams=0)
    assert not any("mhc" in key for key in plain.to_dict()) and plain.model_type == "qwen3"
    assert not any("mhc" in name or "stream" in name for name in Qwen3(plain).state_dict())


def test_a_batch_is_its_sequences_and_generation_its_cache() -> None:
    model = make()
    ids = ids_of(model, 3, 12)
    whole = model(ids)
    for i in range(3):
        assert np.allclose(array(whole[i : i + 1]), array(model(ids[i : i + 1])), atol=1e-5)
    tokens = array(model.generate(ids[:, :5], 7, temperature=0.0))
    with xt.no_grad():
        for step in range(5, 12):
            logits = array(model(tensor(tokens[:, :step])))[:, -1]
            assert (logits.argmax(-1) == tokens[:, step]).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("block", [1, 2, 4, 100])
def test_stream_checkpointing_gives_the_same_bits(block: int, dtype: str) -> None:
    found = []
    for size, whole in ((0, False), (block, False), (0, True)):
        model = make(dtype=dtype)
        model.stream_checkpointing, model.gradient_checkpointing = size, whole
        ids = ids_of(model, 2, 9)
        loss = model.loss(ids[:, :-1], ids[:, 1:])
        loss.backward()
        found.append([bits(loss), *(bits(p.grad) for p in model.parameters())])
    assert found[0] == found[1] == found[2]


def test_only_one_checkpointing_where_it_does_something() -> None:
    plain, model = make(mhc_streams=0), make()
    for wrong in (-1, True, 1.0):
        with pytest.raises(
            ValueError, match=f"Qwen3: stream_checkpointing must be an integer, at least 0, got {wrong}"
        ):
            model.stream_checkpointing = wrong
    with pytest.raises(
        ValueError, match=r"Qwen3: stream_checkpointing must be 0 without streams \(mhc_streams\), got 2"
    ):
        plain.stream_checkpointing = 2
    plain.stream_checkpointing = 0
    model.stream_checkpointing = 2
    with pytest.raises(
        ValueError, match="Qwen3: gradient_checkpointing must be off while stream_checkpointing is 2, got True"
    ):
        model.gradient_checkpointing = True
    for policy in ("block", "full"):
        with pytest.raises(ValueError, match=f"must be none or cheap while stream_checkpointing is 2, got '{policy}'"):
            model.recompute = policy
    model.gradient_checkpointing, model.stream_checkpointing = False, 0
    model.gradient_checkpointing = True
    with pytest.raises(
        ValueError, match="Qwen3: stream_checkpointing must be 0 while gradient_checkpointing is on, got 2"
    ):
        model.stream_checkpointing = 2
    assert model.gradient_checkpointing and model.stream_checkpointing == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_and_loaded(tmp_path, dtype: str) -> None:
    model = make(dtype=dtype, mhc_contraction="learned", mhc_form="D", mhc_iters=7)
    model.save_pretrained(tmp_path / "m")
    again = Qwen3.from_pretrained(tmp_path / "m")
    assert again.config == model.config and again.config.model_type == "xtrain_qwen3_mhc"
    ours, theirs = model.state_dict(), again.state_dict()
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        assert value.dtype == theirs[name].dtype and bits(value) == bits(theirs[name]), name
    assert {t.dtype.name for n, t in ours.items() if "_mhc." in n or "stream_head" in n} == {"float32"}
    ids = ids_of(model, 2, 5)
    assert bits(model(ids)) == bits(again(ids))
    assert bits(copy.deepcopy(model)(ids)) == bits(model(ids))


@pytest.mark.parametrize(
    ("values", "match"),
    [
        (dict(mhc_streams=9), "mhc_streams must be an integer in .0, 8., got 9"),
        (dict(mhc_streams=True), "mhc_streams must be an integer in .0, 8., got True"),
        (dict(mhc_iters=0), "mhc_iters must be an integer in .1, 1000., got 0"),
        (dict(mhc_form="Q"), "mhc_form must be one of P, D, got 'Q'"),
        (dict(mhc_form=np.zeros(2)), "mhc_form must be one of P, D, got array.*"),
        (dict(dtype=np.zeros(2)), "dtype must be one of float32, .*, got array.*"),
        (dict(model_type=np.zeros(2)), "model_type must be 'xtrain_qwen3_mhc', got array.*"),
        (dict(tie_word_embeddings="false"), "tie_word_embeddings must be True or False, got 'false'"),
        (dict(tie_word_embeddings=np.zeros(2)), "tie_word_embeddings must be True or False, got array.*"),
        (dict(attention_bias=np.zeros(2)), "attention_bias must be True or False, got array.*"),
        (dict(mhc_contraction="max"), "mhc_contraction must be one of mean, sum, learned, got 'max'"),
        (dict(mhc_streams=0, mhc_iters=5), "mhc_iters must be 20 without mhc_streams, got 5"),
        (dict(mhc_streams=0, mhc_form="D"), "mhc_form must be 'P' without mhc_streams, got 'D'"),
        (dict(mhc_streams=0, mhc_contraction="sum"), "mhc_contraction must be 'mean' without mhc_streams, got 'sum'"),
    ],
)
def test_bad_configurations(values, match) -> None:
    with pytest.raises(ValueError, match=f"Qwen3Config: {match}"):
        config(**values)


def test_a_file_says_what_it_is(tmp_path) -> None:
    """mhc_streams under the name of the plain model, which others would read without it, is refused, and so is the reverse."""
    written = config().to_dict()
    for change in (dict(model_type="qwen3"), dict(mhc_streams=0)):
        with pytest.raises(ValueError, match="mhc_streams must be there, and above 0, exactly when model_type is"):
            Qwen3Config.from_dict(written | change)
    written.pop("mhc_streams")
    with pytest.raises(ValueError, match="got None with 'xtrain_qwen3_mhc'"):
        Qwen3Config.from_dict(written)
    with pytest.raises(ValueError, match="Qwen3Config: mhc_gates is not supported, got 3"):
        Qwen3Config.from_dict(config().to_dict() | {"mhc_gates": 3})
    make().save_pretrained(tmp_path / "m")
    (tmp_path / "m" / "manifest.json").unlink()  # as from elsewhere
    (tmp_path / "m" / "config.json").write_text(
        (tmp_path / "m" / "config.json").read_text().replace("xtrain_qwen3_mhc", "qwen3")
    )
    with pytest.raises(CheckpointError, match="mhc_streams must be there"):
        Qwen3.from_pretrained(tmp_path / "m")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_healthy_model_has_no_divergence(dtype: str) -> None:
    """The ops of the connections are isolated by name; the carry of mhc_open, which is no gradient, does not confuse it."""
    model = make(dtype=dtype, mhc_contraction="learned")
    ids = ids_of(model, 2, 6)
    found = first_divergence(lambda m: m.loss(ids[:, :-1], ids[:, 1:]), model)
    assert found, str(found)
    seen = {(c.phase, c.name) for c in found.comparisons if c.own >= 0}
    assert {(phase, op) for phase in ("forward", "backward") for op in ("mhc_pre", "sinkhorn", "mhc_post")} <= seen
    places = {f"model.layers.{i}.{part}_mhc" for i in range(3) for part in ("attn", "mlp")}
    assert {c.where for c in found.comparisons if c.name == "mhc_post"} == places
    assert ("formula", "mhc_pre") in seen and not any("mhc_open" in name for _, name in seen)


# ---- training ------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return text_file(tmp_path_factory.mktemp("mhc") / "text.txt")


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_resume_is_bit_identical(tmp_path, data, precision: str) -> None:
    values = dict(precision=precision, model__mhc_streams=4, model__mhc_contraction="learned", save_every=5)
    whole = Trainer(options(data, tmp_path / "whole", **values), quiet=True).run()
    parts = options(data, tmp_path / "parts", **values)
    stopped = Trainer(parts, quiet=True)
    for _ in range(5):
        stopped.train_step()
    stopped.directory.mkdir()
    stopped.save()
    xt.manual_seed(999)
    resumed = Trainer({"resume": str(tmp_path / "parts")}, quiet=True)
    assert resumed.step == 5 and resumed.model.config.mhc_streams == 4
    assert resumed.run().step == 8
    last = whole.directory / "checkpoint-00000008"
    assert weights(last) == weights(tmp_path / "parts" / "checkpoint-00000008")


def test_a_plain_directory_does_not_become_one_with_streams(tmp_path, data) -> None:
    Qwen3(config(mhc_streams=0, vocab_size=256)).save_pretrained(tmp_path / "plain")
    with pytest.raises(ConfigError, match="model.mhc_streams must be 0, as in .*, got 4"):
        Trainer({"data": str(data), "model.preset": str(tmp_path / "plain"), "model.mhc_streams": 4}, quiet=True)


def test_a_config_that_is_changed_is_checked_where_it_is_used(tmp_path) -> None:
    plain = config(mhc_streams=0)
    plain.mhc_streams = 4
    model = Qwen3(plain)
    model.save_pretrained(tmp_path / "streams")
    assert Qwen3.from_pretrained(tmp_path / "streams").config.mhc_streams == 4
    back = dataclasses.replace(plain, mhc_streams=0)
    assert back.model_type == "qwen3" and back.architectures == ["Qwen3ForCausalLM"]
    for name, value in (("hidden_act", "gelu"), ("head_dim", 7), ("rms_norm_eps", -1), ("mhc_streams", 9)):
        wrong = config()
        setattr(wrong, name, value)
        with pytest.raises(ValueError, match=f"Qwen3Config: {name} must be .*, got {value!r}"):
            Qwen3(wrong)
        model.config = wrong
        with pytest.raises(ValueError, match=f"Qwen3Config: {name} must be .*, got {value!r}"):
            model.save_pretrained(tmp_path / "wrong")
        assert not (tmp_path / "wrong" / "config.json").exists()


@pytest.mark.parametrize("layer", ["attn_mhc", "mlp_mhc"])
def test_the_first_bad_value_may_be_of_a_connection(layer: str) -> None:
    model, ids = make(), xt.tensor([[1, 2, 3]])
    with xt.no_grad():
        connection = getattr(model.model.layers[1], layer)
        connection.phi.fill_(1e38)
        model.model.embed_tokens.weight.mul_(1e3)
        assert nonfinite.diagnose(model, [(ids,)]).startswith(f"h_in of model.layers.1.{layer} (")
    assert "read" not in vars(connection) and "write" not in vars(connection)


def test_a_contraction_without_streams_is_refused(tmp_path, data) -> None:
    with pytest.raises(
        ConfigError, match=r"model.mhc_contraction must be mean, .* without model.mhc_streams, got 'sum'"
    ):
        Trainer(options(data, tmp_path / "run", model__mhc_contraction="sum"), quiet=True)
    Trainer(options(data, tmp_path / "run", model__mhc_contraction="mean"), quiet=True)
