"""What `xtrain train --dry-run` says of memory, against the peak that is measured."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil

import pytest
from runs import arguments, options, text_file, xtrain

import xtrain as xt
from xtrain import _C
from xtrain.errors import CheckpointError, ConfigError, DataError
from xtrain.models import GPT2, GPT2Config, Qwen3Config
from xtrain.models.registry import RECOMPUTE, architecture
from xtrain.train import TrainConfig, Trainer, estimate
from xtrain.train.estimate import Estimate, dry_run, estimates

SMALL = {
    "model.preset": "tiny",
    "model.hidden_size": 64,
    "model.intermediate_size": 192,
    "model.num_hidden_layers": 7,
    "seq_len": 128,
}
LARGE = {
    "model.preset": "gpu",
    "batch_size": 16,
    "seq_len": 512,
}  # the constant parts of a GPU's memory are small beside it


def measured(values: dict, device: _C.device) -> int:
    """The peak of a second step and an evaluation, in bytes beside what was there before."""
    gc.collect()  # trainers of other tests
    before = _C.memory_stats(device)["allocated"]
    trainer = Trainer(values, quiet=True)
    trainer.train_step()
    if device.type == "cuda":
        xt.cuda.reset_peak_memory_stats(device)
    else:
        _C.memory_reset_peak(device)
    trainer.train_step()
    trainer.evaluate()
    peak = xt.cuda.max_memory_allocated(device) if device.type == "cuda" else _C.memory_stats(device)["peak"]
    return peak - before


@pytest.mark.parametrize("policy", RECOMPUTE)
@pytest.mark.parametrize(
    "changes",
    [{}, {"precision": "bfloat16"}, {"grad_accum": 3}, {"model.mhc_streams": 2}, {"model.mhc_streams": 2, "precision": "bfloat16"}],
    ids=["float32", "bfloat16", "pieces", "streams", "streams in bfloat16"],
)  # fmt: skip
def test_the_peak_is_estimated(tmp_path, policy: str, changes: dict) -> None:
    device = _C.get_default_device()
    values = options(text_file(tmp_path / "text.txt"), tmp_path / "run", device=str(device), graph=False)
    if device.type == "cuda":  # the preset as it is
        values = {name: value for name, value in values.items() if not name.startswith("model.")}
    values |= {"precision": "float32", **(SMALL if device.type == "cpu" else LARGE), **changes, "recompute": policy}
    peak = measured(values, device)
    config = Trainer(values, quiet=True).config
    model = Trainer(values, quiet=True).model
    rng = _C.get_rng_state()
    found = {one.recompute: one for one in estimates(architecture("qwen3"), model.config, config, device.type)}
    assert tuple(found) == RECOMPUTE and _C.get_rng_state() == rng and _C.get_default_device() == device
    estimate = found[policy]
    assert abs(estimate.peak / peak - 1) < (0.01 if device.type == "cpu" else 0.05), (estimate.peak, peak)
    assert estimate.other >= 0 and estimate.gradients == sum(p.nbytes for p in model.parameters())
    peaks = [one.peak for one in found.values()]
    assert peaks == sorted(peaks, reverse=True) or changes.get("grad_accum")
    flops = [one.flops for one in found.values()]
    assert flops[0] == flops[1] < flops[2] < flops[3] and found["cheap"].moved > found["none"].moved


@pytest.mark.parametrize(("precision", "size"), [("float32", 4), ("bfloat16", 2)])
def test_averages_count_with_the_optimizer(tmp_path, precision: str, size: int) -> None:
    """float32 of each parameter, of 16-bit ones too."""
    values = options(text_file(tmp_path / "text.txt"), tmp_path / "run", device="cpu", precision=precision)
    trainer, found = Trainer(values, quiet=True), []
    hook, before = lambda *_: None, _C.set_call_hook(None)
    try:
        for ema in (0.0, 0.9):
            trainer.config.ema = ema
            _C.set_call_hook(hook)
            found.append(estimates(architecture("qwen3"), trainer.model.config, trainer.config, "cpu")[0])
            assert _C.set_call_hook(None) is hook, "a hook of the caller's stays"
            assert _C.set_call_hook(None, thread=True) is None
    finally:
        _C.set_call_hook(before)
    assert found[0].parameters == found[1].parameters
    more, least = found[1].optimizer - found[0].optimizer, 4 * found[0].parameters // size
    assert 0.95 * least < more < 1.3 * least  # blocks are rounded


@pytest.mark.on_cpu
def test_a_captured_step_keeps_its_memory_in_an_evaluation(tmp_path) -> None:
    """Estimated for a GPU, without one: both at once, where an eager step leaves its memory to the evaluation."""
    values = options(text_file(tmp_path / "text.txt"), tmp_path / "run", device="cpu", eval_tokens=1 << 20)
    trainer = Trainer({**values, **SMALL}, quiet=True)
    found = {}
    for graph in (False, True):
        trainer.config.graph = graph
        found[graph] = estimates(architecture("qwen3"), trainer.model.config, trainer.config, "cuda")[0]
    assert found[False].step <= found[True].step < 1.1 * found[False].step and found[False].evaluation == 0
    logits = 4 * 4 * 128 * 256
    assert logits < found[True].evaluation < 4 * logits


@pytest.mark.on_cpu
def test_a_gpt2_is_estimated(tmp_path) -> None:
    """Its heads count, though their keys have other names. Its step is captured, with dropout, too: an evaluation finds the memory of
    an eager step free, where a captured one keeps its region."""
    values = options(text_file(tmp_path / "text.txt"), tmp_path / "run", device="cpu", batch_size=4, seq_len=64)
    config = Trainer(values, quiet=True).config
    config.graph = True
    found = {}
    for rate in (0.0, 0.1):
        keys = GPT2Config(
            vocab_size=97,
            n_positions=64,
            n_embd=48,
            n_layer=2,
            n_head=4,
            attn_pdrop=rate,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
        )
        found[rate], *others = estimates(architecture("gpt2"), keys, config, "cuda")
        assert [one.recompute for one in others] == list(RECOMPUTE[1:])
        peaks = [one.peak for one in (found[rate], *others)]
        assert peaks == sorted(peaks, reverse=True)
        assert found[rate].working == (32 << 20) + 4 * 4 * 64 * 48
    assert found[0.0].step < found[0.1].step and found[0.0].evaluation == found[0.1].evaluation > 0
    config.graph = False
    eager = estimates(architecture("gpt2"), keys, config, "cuda")[0]
    assert eager.step <= found[0.1].step and eager.evaluation == 0


def test_a_dry_run_says_how_long_the_run_may_take(tmp_path, monkeypatch) -> None:
    """FLOP of a step by their formula, and the time that they and the other kernels take at a rate that is measured here."""
    given = options(
        text_file(tmp_path / "text.txt"), tmp_path / "run", device="cpu", steps=100, seq_len=16, recompute="none"
    )
    assert estimate._gemm_rate(Qwen3Config(hidden_size=16), TrainConfig(precision="float32"), "cpu") > 0
    for allowed in (True, False):  # what the products of the process may do stays
        _C.allow_tf32(allowed)
        estimate._gemm_rate(Qwen3Config(hidden_size=16), TrainConfig(precision="tf32"), "cpu")
        assert _C.tf32() == allowed
    ticks = iter(range(100))
    with monkeypatch.context() as clock:
        clock.setattr(estimate, "perf_counter", lambda: float(next(ticks)))  # each product takes a second
        config = TrainConfig(batch_size=4, grad_accum=2, seq_len=8)
        assert estimate._gemm_rate(Qwen3Config(hidden_size=32), config, "cpu") == 2.0 * (2 * 8) * 32 * (4 * 32)
    monkeypatch.setattr(estimate, "_gemm_rate", lambda *_: 2e6)
    work, eta = dry_run(given).splitlines()[-2:]
    linear = 16 * (16 + 8 + 8 + 16) + 3 * 16 * 32 + 16 * 256  # q, k, v, o; gate, up, down; head
    attention = 2 * 2 * 16 * 8 * 2  # of a query, at most: scores and values, of two heads
    least, most = 64 * 6 * linear / 1e9, 64 * (6 * linear + 4 * attention) / 1e9
    found = float(re.match(r"work   ([\d.]+) GFLOP of products and attention in a step, without evaluations$", work)[1])
    assert round(least, 2) <= found <= round(most, 2)
    told = re.match(
        r"ETA    (\d+):(\d\d) for 100 steps, roughly: estimated from this machine's measured GEMM rate, 0.0 GFLOP/s in float32$",
        eta,
    )
    one = Estimate("none", 0, 0, 0, 0, 0, 0, 0, 0, flops=10**9, moved=10**6)
    assert told and int(told[1]) * 60 + int(told[2]) >= 100 * least * 1e9 / 2e6 - 1
    config = TrainConfig(precision="float32")
    assert estimate.duration(one, config, "cpu", 50, 1.02e9)[1].startswith(
        "ETA    0:50 for 50 steps, roughly: estimated from"
    )


def test_a_dry_run_answers_where_nothing_can_be_measured(tmp_path, monkeypatch) -> None:
    """On a full device, which is where somebody asks what a run needs."""

    def full(*_) -> float:
        raise xt.OutOfMemoryError("matmul: no memory")

    monkeypatch.setattr(estimate, "_gemm_rate", full)
    lines = dry_run(options(text_file(tmp_path / "text.txt"), tmp_path / "run", device="cpu")).splitlines()
    assert lines[-1] == "ETA    unknown: the GEMM rate could not be measured, cpu has too little free memory"
    assert [line for line in lines if line.startswith("--recompute none")]


def test_a_dry_run_prints_and_leaves_nothing(tmp_path) -> None:
    data = text_file(tmp_path / "text.txt")
    before = sorted(os.listdir(tmp_path))
    done = xtrain("train", *arguments(options(data, tmp_path / "run", device="cpu", recompute="cheap")), "--dry-run")
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(tmp_path)) == before
    rows = re.findall(r"^--recompute (\w+) +((?:[\d.]+ +){7})1?[\d.]+x +[\d.]+x(.*)$", done.stdout, re.M)
    assert [(name, mark) for name, _, mark in rows] == [
        ("none", ""), ("cheap", " <- this run"), ("block", ""), ("full", ""),
    ]  # fmt: skip
    for _, sizes, _ in rows:
        *parts, peak = map(float, sizes.split())
        assert abs(sum(parts) - peak) < 0.0045


@pytest.mark.on_cpu
def test_a_run_that_does_not_fit_says_so(tmp_path) -> None:
    """Of a size that no machine has: nothing of it is made."""
    data = text_file(tmp_path / "text.txt")
    text = dry_run(options(data, tmp_path / "run", device="cpu", batch_size=1 << 30, model__num_hidden_layers=2))
    assert re.search(r"--recompute none .* \(more than the [\d.]+ GiB of cpu\)$", text, re.M)


@pytest.mark.on_cpu
@pytest.mark.parametrize("sizes", [dict(batch_size=10**12), dict(seq_len=10**12)])
def test_a_batch_that_would_take_hours_is_refused(tmp_path, sizes: dict) -> None:
    data = text_file(tmp_path / "text", 100)
    with pytest.raises(ConfigError, match=r"^--dry-run: batch_size x seq_len must be at most 68719476736 tokens, got"):
        dry_run(options(data, tmp_path / "run", device="cpu", **sizes))


@pytest.mark.on_cpu
def test_layers_that_would_take_minutes_are_refused(tmp_path) -> None:
    data = text_file(tmp_path / "text.txt")
    with pytest.raises(ConfigError, match=r"^--dry-run: a model must have at most 4096 layers, got 4097$"):
        dry_run(options(data, tmp_path / "run", device="cpu", model__num_hidden_layers=4097))


@pytest.mark.on_cpu
def test_a_model_of_a_directory(tmp_path) -> None:
    data = text_file(tmp_path / "text.txt")
    Trainer(options(data, tmp_path / "run", device="cpu"), quiet=True).run()
    lines = {}
    for name, values in (
        ("preset", options(data, tmp_path / "other", device="cpu")),
        ("resumed", {"resume": str(tmp_path / "run"), "device": "cpu"}),
        ("directory", {"model.preset": str(next((tmp_path / "run").glob("checkpoint-*"))), "device": "cpu"}),
    ):
        given = values if name != "directory" else {**values, "data": str(data), "batch_size": 4, "seq_len": 16}
        lines[name] = [line for line in dry_run(given).splitlines() if line.startswith("--recompute")]
    assert lines["preset"] == lines["resumed"] == lines["directory"]


@pytest.mark.on_cpu
def test_a_run_that_is_refused_is_not_estimated(tmp_path) -> None:
    """With the words of the run."""
    keys = GPT2Config(vocab_size=300, n_positions=64, n_embd=48, n_layer=1, n_head=4)
    data, model = text_file(tmp_path / "text.txt"), tmp_path / "model"
    values = options(data, tmp_path / "run", device="cpu", seq_len=64) | {"model.preset": str(model)}
    values = {key: value for key, value in values.items() if key == "model.preset" or not key.startswith("model.")}
    for change, error, words in (
        ({}, None, ""),
        ({"vocab_size": 100}, DataError, "needs a vocabulary of 256 tokens, the model has 100"),
        ({"model_type": "bert"}, CheckpointError, r"config\.json: model_type must be gemma2, .* got 'bert'"),
    ):
        shutil.rmtree(model, ignore_errors=True)
        GPT2(keys).save_pretrained(model)
        changed = keys.to_dict() | change
        (model / "config.json").write_text(json.dumps(changed))
        (model / "manifest.json").unlink()
        if error is None:
            assert "--recompute none" in dry_run(values)
            Trainer(values, quiet=True)
            continue
        for ask in (dry_run, lambda given: Trainer(given, quiet=True)):
            if "vocab_size" in change and ask is not dry_run:
                continue  # whose tensors are of another size
            with pytest.raises(error, match=words):
                ask(values)


def test_the_work_is_that_of_the_policy_and_of_the_steps_that_are_left(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(estimate, "_gemm_rate", lambda *_: 2e6)
    monkeypatch.setattr(estimate, "duration", lambda one, config, device, steps, rate: [f"{one.recompute} {steps}"])
    data, run = text_file(tmp_path / "text.txt"), tmp_path / "run"
    for policy in ("none", "block"):
        given = options(data, tmp_path / policy, device="cpu", recompute=policy, steps=9)
        assert dry_run(given).splitlines()[-1] == f"{policy} 9"
    Trainer(options(data, run, device="cpu", steps=4), quiet=True).run()
    assert dry_run({"resume": str(run), "device": "cpu", "steps": 10, "extend": True}).splitlines()[-1].endswith(" 6")


def test_what_an_evaluation_needs_counts(tmp_path) -> None:
    """A machine that holds a step and not the evaluation beyond it is too small."""
    sizes = dict.fromkeys(("parameters", "optimizer", "activations", "loss", "other"), 10)
    one = estimate.Estimate(recompute="none", working=0, evaluation=7, gradients=0, flops=1, moved=1, **sizes)
    assert (one.step, one.peak) == (50, 57)
    config = TrainConfig(out=str(tmp_path))
    for limit, told in ((57, False), (56, True), (50, True)):
        assert ("(more than the 0.0 GiB of cpu)" in "".join(estimate.table([one], config, limit, "cpu"))) == told


def test_constants_of_devices(tmp_path) -> None:
    """Kernels of a GPU work on one piece of a batch; what the bytes of other kernels cost, its precision says."""
    config = TrainConfig(out=str(tmp_path), batch_size=7, grad_accum=3, seq_len=5)
    keys = Qwen3Config(num_attention_heads=4, num_key_value_heads=2, head_dim=6)
    memory = [estimate._working_memory(keys, config, _C.device(device)) for device in ("meta:0", "meta:1")]
    assert memory == [0, (32 << 20) + 4 * 3 * 5 * 4 * 6]
    sizes = dict.fromkeys(("parameters", "optimizer", "activations", "loss", "other"), 0)
    one = estimate.Estimate(recompute="none", working=0, evaluation=0, gradients=0, flops=9, moved=100, **sizes)
    for precision, device, work in (
        ("bfloat16", "cuda", 15009),
        ("tf32", "cuda", 7509),
        ("float32", "cuda", 1309),
        ("bfloat16", "cpu", 2009),
    ):
        config.precision = precision
        assert estimate._work(one, config, device) == work


@pytest.mark.on_cpu
def test_what_a_dry_run_says_first(tmp_path, monkeypatch) -> None:
    """What the start of the run would warn of; a batch of the limit is taken."""
    given = options(text_file(tmp_path / "text.txt"), tmp_path / "run", device="cpu")
    plan = estimate.rundir.plan

    def warns(values, warn):
        warn("the run starts over")
        return plan(values, warn)

    monkeypatch.setattr(estimate.rundir, "plan", warns)
    monkeypatch.setattr(estimate, "_MOST_TOKENS", given["batch_size"] * given["seq_len"])
    lines = dry_run(given).splitlines()
    assert lines[0] == "warning: the run starts over" and lines[1].startswith("model  ")
    monkeypatch.setattr(estimate, "_MOST_TOKENS", given["batch_size"] * given["seq_len"] - 1)
    with pytest.raises(ConfigError, match="batch_size x seq_len must be at most 63 tokens, got 4 x 16"):
        dry_run(given)


@pytest.mark.on_cpu
def test_the_state_of_an_optimizer_has_no_gradients() -> None:
    """Two moments of each parameter."""
    keys = dict(vocab_size=61, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2)
    model = Qwen3Config(**keys, num_key_value_heads=1, head_dim=32)
    config = TrainConfig(batch_size=2, seq_len=16, precision="float32")
    for one in estimates(architecture("qwen3"), model, config, "cpu"):
        assert 2 * one.parameters <= one.optimizer < 2.2 * one.parameters


@pytest.mark.parametrize("family", ["Qwen3", "GPT2"])
def test_a_dry_run_shows_the_shapes(tmp_path, family: str) -> None:
    """Each tensor of a layer once, with the number of layers; what a family ties is there once. The values add up."""
    sizes = {"vocab_size": 256, "num_hidden_layers": 11, "num_attention_heads": 2, "hidden_size": 16}
    config = Qwen3Config(**sizes, intermediate_size=24, num_key_value_heads=1, head_dim=8, tie_word_embeddings=True)
    if family == "GPT2":
        config = GPT2Config(vocab_size=256, n_positions=64, n_embd=16, n_layer=11, n_head=2)
    (tmp_path / "m").mkdir()
    config.to_json(tmp_path / "m" / "config.json")
    given = options(text_file(tmp_path / "text.txt"), tmp_path / "run", device="cpu", model__preset=str(tmp_path / "m"))
    given = {name: value for name, value in given.items() if name == "model.preset" or not name.startswith("model.")}
    lines = dry_run(given).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("parameters"))
    assert lines[start - 1].startswith("model  ") and lines[start].split() == [
        "parameters",
        "shape",
        "tensors",
        "values",
    ]
    rows = [line.split() for line in lines[start + 1 : next(i for i, line in enumerate(lines) if line[:5] == "batch")]]
    kind = architecture(config.model_type)
    assert sum(int(row[-1].replace(",", "")) for row in rows) == kind.count_parameters(config)
    assert sum(int(row[-2]) for row in rows) == len(list(kind.tensor_shapes(config)))
    if family == "Qwen3":
        assert len(rows) == 13 and rows[0] == ["model.embed_tokens.weight", "256", "x", "16", "1", "4,096"]
        assert ["model.layers.*.mlp.down_proj.weight", "16", "x", "24", "11", "4,224"] in rows
        assert ["model.layers.*.self_attn.q_norm.weight", "8", "11", "88"] in rows
