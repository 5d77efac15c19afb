"""Muon, learning rates of some parameters, wsd, averages and the z-loss as options of a run."""

from __future__ import annotations

import numpy as np
import pytest
from runs import metrics, options, text_file, weights

import xtrain as xt
from xtrain import cli, errors, models, optim, saving
from xtrain.optable.table import array, check_close
from xtrain.train import Trainer
from xtrain.train.checkpoints import _bad_moment
from xtrain.train.config import decay_steps
from xtrain.train.parts import hidden_matrices

pytestmark = pytest.mark.on_cpu

ALL = {
    "optim.name": "muon", "optim.lr": 0.02, "optim.lr_factors": "*k_proj*=0.5, model.embed_tokens.*=0.1",
    "optim.schedule": "wsd", "optim.decay": 3, "ema": 0.7, "z_loss": 1e-2,
}  # fmt: skip


@pytest.fixture
def data(tmp_path):
    return text_file(tmp_path / "data.txt")


def trainer(data, out, callbacks=(), **changes) -> Trainer:
    return Trainer({**options(data, out), "device": "cpu", **changes}, quiet=True, callbacks=callbacks)


def test_muon_has_the_matrices_of_hidden_layers(data, tmp_path) -> None:
    run = trainer(data, tmp_path / "run", **ALL, **{"model.tie_word_embeddings": False})
    assert isinstance(run.optimizer, optim.ChainedOptimizer)
    names = {id(p): name for name, p in run.model.named_parameters()}
    muon, adamw = (
        [names[id(p)] for group in one.param_groups for p in group["params"]] for one in run.optimizer.optimizers
    )
    assert len(muon) == 7 and all(name.endswith("_proj.weight") for name in muon)
    assert {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"} <= set(adamw)
    assert sorted(muon + adamw) == sorted(names.values())
    assert {group["adjust_lr_fn"] for group in run.optimizer.optimizers[0].param_groups} == {"match_rms_adamw"}
    assert [group["weight_decay"] for group in run.optimizer.param_groups] == [0.1, 0.1, 0.1, 0.1, 0.0]
    gpt = models.GPT2(models.GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    assert sorted(tuple(w.shape) for w in hidden_matrices(gpt)) == [(8, 8), (8, 24), (8, 32), (32, 8)]


def test_the_first_pattern_counts_and_averages_are_of_what_is_trained(data, tmp_path) -> None:
    run = trainer(
        data, tmp_path / "run", **{**ALL, "optim.lr_factors": "*k_proj*=0.5,*proj*=3,*q_norm*=0", "freeze": "*embed*", "optim.decay": None}
    )  # fmt: skip
    names = {id(p): name for name, p in run.model.named_parameters()}
    rates = {names[id(p)]: group["lr"] for group in run.optimizer.param_groups for p in group["params"]}
    assert {name: round(rate / 0.02, 6) for name, rate in rates.items()} == {
        name: 0.5 if "k_proj" in name else 3.0 if "proj" in name else 0.0 if "q_norm" in name else 1.0 for name in rates
    }
    groups = [round(group["lr"] / 0.02, 6) for group in run.optimizer.param_groups]
    assert groups[:2] == [3.0, 0.5] and groups[-2:] == [0.0, 1.0], "in the order in which they come"
    assert run.ema is not None
    assert {names[id(p)] for p in run.ema.params} == {name for name in names.values() if "embed" not in name}
    assert decay_steps(run.config) == run.config.steps // 5
    buffer = next(iter(run.model.model.layers)).self_attn.q_proj.weight
    run.optimizer.state[buffer] = {"momentum_buffer": xt.full(buffer.shape, float("nan"))}
    assert (
        _bad_moment(run) == f"momentum_buffer of parameter {names[id(buffer)]} has NaN"
    )  # what an emergency save looks for


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(precision, data, tmp_path) -> None:
    whole = tmp_path / "whole"
    trainer(data, whole, precision=precision, **ALL).run()
    first = tmp_path / "first"
    trainer(data, first, [lambda run, record: run.step == 5], precision=precision, **ALL).run()
    Trainer({"resume": str(first)}, quiet=True).run()
    assert weights(first / "checkpoint-00000008") == weights(whole / "checkpoint-00000008")
    assert (whole / "checkpoint-00000008" / "ema.safetensors").exists()
    rates = [line["lr_groups"] for line in metrics(whole)]
    lrs = [0.01, 0.02, 0.02, 0.02, 0.02, 0.02]  # warm-up of 2 steps, then none of decay before step 5
    assert [line["lr"] for line in metrics(whole)][:6] == pytest.approx(lrs)
    assert metrics(whole)[-1]["lr"] == pytest.approx(3e-4 + (0.02 - 3e-4) / 3)
    assert rates[3] == pytest.approx([0.02, 0.01, 0.002, 0.02])


def test_averages_lie_beside_the_weights(data, tmp_path, capsys) -> None:
    seen: list[dict[str, np.ndarray]] = []

    def look(run, record) -> None:
        seen.append({name: array(p).copy() for name, p in run.model.named_parameters()})

    out = tmp_path / "run"
    run = trainer(data, out, [look], ema=0.7)
    run.run()
    shares = np.array([0.7**age for age in reversed(range(8))])
    checkpoint = out / "checkpoint-00000008"
    found = dict(models.load(checkpoint, ema=True).named_parameters())
    for name, parameter in found.items():
        want = np.tensordot(shares / shares.sum(), np.array([values[name] for values in seen]), 1)
        check_close(array(parameter), want, 8 * 2.0**-23 * np.abs([values[name] for values in seen]).max(0), name)
    assert not np.array_equal(array(found["model.norm.weight"]), seen[-1]["model.norm.weight"])
    assert cli.main(["sample", str(out), "--ema", "--max-tokens", "3", "--seed", "1"]) == 0
    assert capsys.readouterr().out
    plain = tmp_path / "plain"
    trainer(data, plain).run()
    with pytest.raises(
        errors.CheckpointError, match=r"holds no averages \(ema.safetensors\): they come from training with --ema"
    ):
        saving.load_model(plain / "checkpoint-00000008", ema=True)
    with pytest.raises(errors.ConfigError, match="ema was 0.7 in this run, got 0.8"):
        Trainer({"resume": str(out), "ema": 0.8}, quiet=True)
    with pytest.raises(errors.CheckpointError, match="checkpoint-00000008: the averages do not fit the model: "):
        saving.load_checkpoint(checkpoint, run.model, ema=optim.EMA([xt.nn.Parameter(xt.ones(2))]))


def test_the_z_loss_is_trained_and_not_evaluated(data, tmp_path) -> None:
    plain, more = trainer(data, tmp_path / "plain"), trainer(data, tmp_path / "more", z_loss=0.1)
    assert more.evaluate() == plain.evaluate()
    ids = xt.tensor(np.arange(32).reshape(2, 16) % 7)
    logits = array(more.model(ids)).astype(np.float64)
    squares = np.log(np.exp(logits).sum(-1)) ** 2
    hard = more.model.loss(ids, ids).item()
    assert more.model.loss(ids, ids, z_loss=0.1).item() == pytest.approx(hard + 0.1 * squares.mean(), rel=1e-5)
    handle = more.model.register_forward_hook(lambda *_: None)  # head and loss apart
    assert more.model.loss(ids, ids, z_loss=0.1).item() == pytest.approx(hard + 0.1 * squares.mean(), rel=1e-5)
    handle.remove()
    assert more.train_step()["loss"] > plain.train_step()["loss"] + 1


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"optim.lr_factors": "model.*"}, r"optim.lr_factors must be patterns with factors of at least 0 \(\*norm.weight=2\), got 'model.\*'"),
        ({"optim.lr_factors": "model.*=-1"}, r"optim.lr_factors must be patterns with factors of at least 0"),
        ({"optim.lr_factors": "*=1e308", "optim.lr": 100.0}, r"optim.lr_factors must be patterns with factors of at least 0"),
        ({"optim.lr_factors": "head*=2"}, r"optim.lr_factors must name parameters that are trained, got 'head\*', which matches none"),
        ({"optim.lr_factors": ","}, r"optim.lr_factors must name parameters that are trained, got ','$"),
        ({"optim.name": "muon", "freeze": "*proj*"}, r"optim.name must be adamw where no matrix of a hidden layer is trained, got muon"),
        ({"optim.name": "sgd"}, r"optim.name must be one of adamw, muon, got 'sgd'"),
        ({"optim.decay": 9}, r"optim.decay must be at most steps \(8\), got 9"),
        ({"optim.muon_momentum": 1.0}, r"optim.muon_momentum must be less than 1.0, got 1.0"),
        ({"ema": 1.0}, r"ema must be less than 1.0, got 1.0"),
        ({"ema": 1.5}, r"ema must be less than 1.0, got 1.5"),
        ({"z_loss": -1.0}, r"z_loss must be at least 0.0, got -1.0"),
    ],
)  # fmt: skip
def test_bad_options_are_one_sentence(changes, sentence, data, tmp_path) -> None:
    with pytest.raises(errors.ConfigError, match=sentence):
        trainer(data, tmp_path / "run", **changes)
