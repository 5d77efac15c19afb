"""QK-clip: which logit is the largest, what is scaled, and runs with it."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import run_ranks
from runs import arguments, metrics, options, text_file, weights

import xtrain as xt
import xtrain.functional as F
from xtrain import _C, lora, models, optim, saving
from xtrain.distributed.bank import Bank
from xtrain.errors import ConfigError, NonFiniteError
from xtrain.nn.module import evaluating
from xtrain.optable.table import array
from xtrain.optim import qk_clip
from xtrain.train import Trainer, step

pytestmark = pytest.mark.on_cpu

SIZES = dict(
    vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=32, initializer_range=0.4,
)  # fmt: skip


def model_of(kind: str, dtype: Any = xt.float32) -> models.CausalLM:
    """shared: two heads share keys; biased: each has its own, and biases; gpt2: all in one matrix."""
    xt.manual_seed(3)
    if kind == "gpt2":
        sizes = dict(vocab_size=256, n_positions=32, n_embd=32, n_layer=2, n_head=4, initializer_range=0.4)
        model: models.CausalLM = models.GPT2(models.GPT2Config(**sizes), dtype=dtype)
    elif kind == "biased":
        model = models.Qwen2(models.Qwen2Config(**SIZES, num_key_value_heads=4), dtype=dtype)
    else:
        model = models.Llama(models.LlamaConfig(**SIZES, num_key_value_heads=2), dtype=dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.copy_(xt.randn(*parameter.shape).to(dtype))
    return model


# ---- the largest logit -----------------------------------------------------------------------------------------------


def reference(q, k, causal, scale, documents, window) -> tuple[np.ndarray, float]:
    """float64, pair by pair, by the definition; and what the rounding of float32 products may be."""
    (batch, heads, queries, dim), (groups, keys) = q.shape, k.shape[1:3]
    scale = 1 / math.sqrt(dim) if scale is None else scale
    found = np.full(heads, -np.inf)
    for b, h, i, j in np.ndindex(batch, heads, queries, keys):
        place = i + keys - queries
        if (causal and j > place) or (window is not None and j <= place - window):
            continue
        if documents is not None and not documents[b, 0, i] <= j < documents[b, 1, i]:
            continue
        found[h] = max(found[h], scale * (q[b, h, i] @ k[b, h // (heads // groups), j]))
    return found, (dim + 2) * 2.0**-24 * abs(scale) * (np.abs(q).sum(-1).max() * np.abs(k).max())


@pytest.mark.parametrize("dtype", [xt.float32, xt.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("heads", "groups", "queries", "keys", "causal", "scale", "window", "packed"),
    [
        (2, 2, 9, 9, True, None, None, False),
        (4, 2, 9, 9, True, 0.7, None, True),
        (4, 2, 9, 9, True, -0.7, None, True),
        (6, 2, 12, 12, True, 1.5, 3, True),
        (4, 1, 5, 11, True, None, 4, False),
        (2, 1, 7, 5, False, None, None, False),
        (1, 1, 1, 1, True, None, None, False),
    ],
)
def test_the_largest_logit(
    heads, groups, queries, keys, causal, scale, window, packed, dtype, monkeypatch
) -> None:  # fmt: skip
    """Against float64; in one block, and in blocks of two rows. Pairs that attention does not see are larger."""
    rng = np.random.default_rng(heads + keys)
    q, k = rng.standard_normal((2, heads, queries, 8)), rng.standard_normal((2, groups, keys, 8))
    k[:, :, -1] *= 20  # most queries do not see it
    if packed:
        k[1, :, 2] *= 100  # all queries behind it do in row 1, and those before place 4 would in row 0
    q, k = (xt.tensor(each, dtype=xt.float32).to(dtype) for each in (q, k))
    documents = F.document_bounds([[4, queries - 4], [1, queries - 1]]) if packed else None
    bounds = None if documents is None else documents.numpy()
    want, bound = reference(
        *(array(each.to(xt.float64)) for each in (q, k)), causal, scale, bounds, window
    )  # fmt: skip
    for block in (1 << 20, 2 * heads * keys):
        monkeypatch.setattr(qk_clip, "_BLOCK", block)
        found = array(qk_clip.logit_maxima(q, k, causal, scale, documents, window))
        assert np.isfinite(found).all() and (np.abs(found - want) <= bound).all(), (found, want)


# ---- what is scaled --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["shared", "biased", "gpt2"])
@pytest.mark.parametrize("dtype", [xt.float32, xt.bfloat16], ids=["float32", "bfloat16"])
def test_heads_that_are_too_large_are_scaled(kind: str, dtype: Any) -> None:
    """By hand, with their masters; all else stays. The logits of the first layer are tau then, and others as they were:
    what the later layers read has changed."""
    model = model_of(kind, dtype)
    optimizer = optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    ids = xt.randint(0, 256, (2, 16))
    model.loss(ids, ids).backward()
    optimizer.step()  # makes the masters
    with evaluating(model):
        measure = optim.QKClip(model, 1.0, optimizer).measure
        maxima = measure(lambda: model.features(ids))
        tau = float(np.sort(maxima[0])[1:3].mean())  # two of the heads of the first layer are above it
        assert tau > 0 and (np.array(maxima[0]) > 0).all()
        clip = optim.QKClip(model, tau, optimizer)
        assert clip.count(maxima) == (np.array(maxima) > tau).sum()
        before = {name: array(p.to(xt.float32)).astype(np.float32) for name, p in model.named_parameters()}
        clip.step(maxima)
        after = measure(lambda: model.features(ids))
    changed = 0
    for layer, logits in enumerate(maxima):
        g = np.array([tau / logit if logit > tau else 1.0 for logit in logits])
        rows = np.repeat(np.sqrt(g) if kind != "shared" else g, 8).astype(np.float32)
        ones = np.ones(16 if kind == "shared" else 32, np.float32)
        place = f"transformer.h.{layer}.attn" if kind == "gpt2" else f"model.layers.{layer}.self_attn"
        for name, parameter in model.named_parameters():
            if not name.startswith(place):
                continue
            factor = np.float32(1)
            if "q_proj" in name:
                factor = rows
            elif "k_proj" in name:
                factor = ones if kind == "shared" else rows
            elif "c_attn" in name:
                factor = np.concatenate([rows, rows, np.ones(32, np.float32)])
            if parameter.ndim == 2 and "c_attn" not in name and factor.ndim:
                factor = factor[:, None]
            want = before[name] * factor
            if dtype is xt.bfloat16:  # at lr 0 the masters are what the parameters were
                assert (array(optimizer.state[parameter]["master"]) == want).all(), name
                want = array(xt.tensor(want, dtype=xt.float32).to(dtype).to(xt.float32))
            assert (array(parameter.to(xt.float32)) == want).all(), name
            changed += (before[name] != want).any()
    assert changed >= {"shared": 2, "biased": 8, "gpt2": 4}[kind]
    # Factors and weights are rounded, then the products: some 2^-24 (or, of bfloat16, 2^-8 of every rounded value) each.
    error = 32 * (2.0**-7 if dtype is xt.bfloat16 else 2.0**-23) * max(maxima[0])
    assert (np.abs(np.array(after[0]) - np.minimum(maxima[0], tau)) <= error).all(), (maxima[0], after[0], tau)


def test_logits_that_scale_nothing() -> None:
    """Negative ones, those at tau, and those that are not finite."""
    model = model_of("biased")
    clip = optim.QKClip(model, 5.0, optim.AdamW(model.parameters()))
    assert clip.factors([[-7.0, 5.0, math.inf, math.nan], [0.0, -math.inf, 4.9, 5.0]]) == {}
    factors = clip.factors([[-7.0, 20.0, math.inf, 1.0], [0.0] * 4])
    assert clip.count([[-7.0, 20.0, math.inf, 5.0], [math.nan, 5.1, 0.0, 0.0]]) == 2
    names = {id(p): name for name, p in model.named_parameters()}
    assert sorted(names[id(p)].partition("self_attn.")[2] for p in factors) == [
        "k_proj.bias", "k_proj.weight", "q_proj.bias", "q_proj.weight",
    ]  # fmt: skip
    for factor in factors.values():
        assert array(factor).reshape(-1).tolist() == [1.0] * 8 + [0.5] * 8 + [1.0] * 16


def test_measuring_leaves_settings_as_they_were() -> None:
    """Logits are of float32 products, whatever the process has chosen; a hook of the caller's stays. Two calls of a
    layer's attention are an error.
    """
    model, ids = model_of("shared"), xt.tensor([[1, 2, 3]])
    seen: list[tuple[str, bool]] = []
    clip = optim.QKClip(model, 1.0, optim.AdamW(model.parameters()))

    def hook(op: Any, *_: Any) -> None:
        seen.append((op.__name__, _C.tf32()))

    mode, before = xt.get_float32_matmul_precision(), _C.set_call_hook(hook)
    try:
        xt.set_float32_matmul_precision("high")
        assert len(clip.measure(lambda: model(ids))) == 2
        assert xt.get_float32_matmul_precision() == "high"
        seen.clear()
        qk_clip.logit_maxima(xt.ones(1, 2, 3, 4), xt.ones(1, 2, 3, 4), True, None, None, None)
        assert [tf32 for name, tf32 in seen if name == "matmul"] == [False]
        with pytest.raises(RuntimeError, match="must call scaled_dot_product_attention once, got 4 calls"):
            clip.measure(lambda: (model(ids), model(ids)))
    finally:
        xt.set_float32_matmul_precision(mode)
        _C.set_call_hook(before)


def test_measuring_leaves_other_threads_alone() -> None:
    """A hook that another thread sets meanwhile stays, and attention of that thread is not measured."""
    model, ids = model_of("shared"), xt.tensor([[1, 2, 3]])
    clip = optim.QKClip(model, 1.0, optim.AdamW(model.parameters()))
    wanted = clip.measure(lambda: model(ids))
    seen: list[str] = []

    def hook(op: Any, *_: Any) -> None:
        seen.append(op.__name__)

    def meanwhile() -> None:
        model(ids)
        _C.set_call_hook(hook)
        model(ids)

    def forward() -> None:
        model(ids)
        thread = threading.Thread(target=meanwhile)
        thread.start()
        thread.join()

    before = _C.set_call_hook(None)
    try:
        assert clip.measure(forward) == wanted
        assert "scaled_dot_product_attention" in seen
        assert _C.set_call_hook(None) is hook
    finally:
        _C.set_call_hook(before)


# ---- runs ------------------------------------------------------------------------------------------------------------


def run(folder: Path, out: str, kind: str = "shared", callbacks: Any = (), **changes: Any) -> Trainer:
    data = folder / "data.txt"
    if not data.exists():
        text_file(data)
    model = folder / kind
    if not model.exists():
        saving.save_model(model_of(kind), model)
    values = {name: value for name, value in options(data, folder / out).items() if not name.startswith("model.")}
    values |= {"model.preset": str(model), "device": "cpu", "optim.lr": 0.01, "optim.qk_clip": 9.0, "eval_every": 0}
    trainer = Trainer(values | {"optim.qk_clip_every": 2} | changes, quiet=True, callbacks=callbacks)
    trainer.run()
    return trainer


@pytest.mark.parametrize("max_ranks", [0, 2])
def test_a_step_of_a_run_is_that_of_the_optimizer_and_then_the_clip(max_ranks: int, tmp_path) -> None:
    """In every second step, by the logits that its batch had before it."""
    none = {"optim.qk_clip": 0.0, "optim.qk_clip_every": 10}
    plain = run(tmp_path, "plain", steps=2, max_ranks=max_ranks, **none)
    before = run(tmp_path, "one", steps=2, max_ranks=max_ranks, callbacks=[lambda trainer, record: True])
    clipped = run(tmp_path, "two", steps=2, max_ranks=max_ranks)
    assert "qk_clipped" not in metrics(tmp_path / "two")[0] and before.step == 1
    record = metrics(tmp_path / "two")[1]
    clip = optim.QKClip(before.model, 9.0, before.optimizer)
    ids, _ = before.loader.next_batch()
    with evaluating(before.model):
        halves = [
            clip.measure(lambda part=part: before.model.features(xt.from_numpy(part))) for part in (ids[:2], ids[2:])
        ]
    maxima = np.maximum(*(np.array(each) for each in halves))
    assert record["max_logit"] == pytest.approx(maxima.max(), rel=1e-5)
    assert record["qk_clipped"] == (maxima > 9.0).sum() > 0
    for layer, logits in enumerate(maxima):
        g = np.repeat(np.minimum(1.0, 9.0 / logits), 8)[:, None]
        name = f"model.layers.{layer}.self_attn.q_proj.weight"
        want, found = (array(dict(t.model.named_parameters())[name]) for t in (plain, clipped))
        assert (np.abs(found - want * g) <= 1e-5 * np.abs(want)).all()
    same = [array(dict(t.model.named_parameters())["model.layers.0.self_attn.k_proj.weight"]) for t in (plain, clipped)]
    assert (same[0] == same[1]).all()


def test_a_bad_step_that_is_read_late_clips_nothing(tmp_path) -> None:
    """Its logits are too large and its loss is not a number: the heads stay as they are, and so do those of the steps behind it."""
    trainer = run(tmp_path, "run", steps=8, callbacks=[lambda trainer, record: trainer.step == 3])
    trainer.stepper.read_every = 4
    parameters = dict(trainer.model.named_parameters())
    with xt.no_grad():
        parameters["model.norm.weight"][0] = math.nan
    before = {name: array(one).tobytes() for name, one in parameters.items()}
    queued = [trainer.stepper.queue() for _ in range(3)]
    assert queued[0].data["qk_clipped"] > 0  # step 4
    assert {name: array(one).tobytes() for name, one in parameters.items()} == before
    with pytest.raises(NonFiniteError, match="^step 4: "):
        trainer.stepper.check(queued[0], trainer.stepper.read(queued)[0])


def test_logits_that_are_not_finite_count_as_none() -> None:
    found = [[[1.0, math.inf, math.nan]], [[math.nan, 3.0, math.nan]]]
    assert step._largest(found) == step._largest(found[::-1]) == [[1.0, 3.0, 0.0]]


@pytest.mark.parametrize(("name", "precision"), [("adamw", "float32"), ("muon", "bfloat16")])
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(name: str, precision: str, tmp_path) -> None:
    more = {"optim.name": name, "precision": precision, "grad_accum": 2, "ema": 0.9}
    run(tmp_path, "whole", "gpt2", steps=7, **more)
    run(tmp_path, "run", "gpt2", steps=7, callbacks=[lambda trainer, record: trainer.step == 4], **more)
    Trainer({"resume": str(tmp_path / "run")}, quiet=True).run()
    assert weights(tmp_path / "run" / "checkpoint-00000007") == weights(tmp_path / "whole" / "checkpoint-00000007")
    assert sum(record.get("qk_clipped", 0) for record in metrics(tmp_path / "whole")) > 2


def test_the_bits_do_not_depend_on_the_number_of_processes(tmp_path) -> None:
    """With masters, which lie on the ranks in pieces, and packed rows."""
    sizes = {**SIZES, "vocab_size": 490, "num_hidden_layers": 1, "num_key_value_heads": 4, "tie_word_embeddings": True}
    model = models.Qwen2(models.Qwen2Config(**sizes))
    bank = Bank(list(model.parameters()), 2)
    query = next(i for i, p in enumerate(bank.parameters) if p is model.model.layers[0].self_attn.q_proj.weight)
    assert bank.offsets[query] < bank.length // 2 < bank.offsets[query] + 1024  # it has parts on both ranks
    saving.save_model(model, tmp_path / "biased")
    text_file(tmp_path / "data.txt")
    found = []
    for size in (1, 2):
        values = {
            name: v for name, v in options(tmp_path / "data.txt", tmp_path / f"{size}").items() if "model." not in name
        }
        values |= {"model.preset": str(tmp_path / "biased"), "device": "cpu", "optim.lr": 0.01, "precision": "bfloat16",
                   "optim.qk_clip": 9.0, "optim.qk_clip_every": 1, "pack": True, "max_ranks": 2, "steps": 4}  # fmt: skip
        said = run_ranks(size, ["-m", "xtrain", "train", *arguments(values)], tmp_path / f"ranks{size}")
        assert [one.status for one in said] == [0] * size, said
        kept = ("loss", "max_logit", "qk_clipped", "grad_norm")
        records = [{key: record[key] for key in kept} for record in metrics(tmp_path / f"{size}")]
        found.append((weights(tmp_path / f"{size}" / "checkpoint-00000004"), records))
    assert found[0] == found[1] and sum(record["qk_clipped"] for record in found[0][1]) > 2


def test_bad_input_is_one_sentence(tmp_path) -> None:
    xt.manual_seed(0)
    qwen3 = models.Qwen3(models.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8))
    llama = model_of("shared")
    adamw = optim.AdamW(llama.parameters())
    for tau in (0, -1.0, math.nan, math.inf, True, "1"):
        with pytest.raises(ValueError, match="^QKClip: tau must be a number greater than 0, got "):
            optim.QKClip(llama, tau, adamw)
    with pytest.raises(ValueError, match="^QKClip: model must have layers with qk_heads, got Linear$"):
        optim.QKClip(xt.nn.Linear(2, 2), 1.0, adamw)
    with pytest.raises(
        RuntimeError, match="^QKClip: each of 2 layers must call scaled_dot_product_attention once, got 0"
    ):
        optim.QKClip(llama, 1.0, adamw).measure(lambda: None)
    text_file(tmp_path / "data.txt")
    saving.save_model(llama, tmp_path / "llama")

    def refused(model: Any, **more: Any) -> str:
        values = {
            name: v for name, v in options(tmp_path / "data.txt", tmp_path / "run").items() if "model." not in name
        }
        with pytest.raises(ConfigError) as caught:
            Trainer({**values, "optim.qk_clip": 100.0, **more}, quiet=True, model=model)
        return str(caught.value)

    assert refused(qwen3) == (
        "optim.qk_clip must be 0 for Qwen3: model must not normalise queries and keys, which do not grow with their weights"
    )
    frozen = (
        "optim.qk_clip must be 0 for Llama: model must train the weights of queries and keys, got some that are frozen"
    )
    assert refused(str(tmp_path / "llama"), freeze="*k_proj*") == frozen
    assert refused(lora.apply(llama, r=2)) == frozen
    assert refused(str(tmp_path / "llama"), **{"optim.qk_clip": -1.0}) == "optim.qk_clip must be at least 0.0, got -1.0"
