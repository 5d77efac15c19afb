"""Programs that generate on "cuda" with captured steps: test_captured_generation.py runs them, each in a process of its own, on a GPU
and on the device of fake_device.c.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

import xtrain as xt
from xtrain.generation import generate, steps, stream_tokens
from xtrain.models import GPT2, Gemma2, Gemma2Config, GPT2Config, Qwen3, Qwen3Config, decoder

SIZES = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=256, initializer_range=0.3,
)  # fmt: skip
IDS = np.random.default_rng(4).integers(0, 97, (3, 5))
made: list[steps.Steps] = []


class Seen(steps.Steps):
    """Steps that can be looked at afterwards."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        made.append(self)


def model(family: str, dtype: str, **options: object) -> xt.nn.Module:
    xt.manual_seed(8)
    if family == "gpt2":
        sizes = dict(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=256, initializer_range=0.3)
        return GPT2(GPT2Config(**sizes), dtype=getattr(xt, dtype)).to("cuda")
    if family == "gemma2":
        caps = dict(sliding_window=9, attn_logit_softcapping=0.5, query_pre_attn_scalar=1, tie_word_embeddings=False)
        return Gemma2(Gemma2Config(**SIZES | caps | options), dtype=getattr(xt, dtype)).to("cuda")
    return Qwen3(Qwen3Config(**SIZES | options), dtype=getattr(xt, dtype)).to("cuda")


def generated(one: xt.nn.Module, count: int, **options: object) -> list[list[int]]:
    made.clear()
    xt.generation.sampling.Steps = Seen  # type: ignore[attr-defined]
    return generate(one, IDS, count, capture=True, **options).tolist()


def equal(family: str, head_dim: int) -> None:
    """The tokens of steps one by one, in float64, greedy and drawn, with ends; the same on the CPU, whatever the length."""
    one = model(family, "float64", head_dim=head_dim)
    there = model(family, "float64", head_dim=head_dim).to("cpu")
    for options in (
        dict(temperature=0.0),
        dict(seed=3, top_k=9, top_p=0.8, temperature=2.0),
        dict(seed=1, eos=list(range(0, 97, 9))),
    ):
        for count in (2, 3, 5, steps.AT_ONCE + 2, 45):
            want = generate(one, IDS, count, capture=False, **options).tolist()
            assert generated(one, count, **options) == want, (options, count)
            assert generate(there, IDS, count, **options).tolist() == want, (options, count)
            assert made[0].captured == (count > 2) or "eos" in options, (options, count)


def repeats(dtype: str) -> None:
    """The same bits in every run."""
    one = model("qwen3", dtype, head_dim=64)
    runs = [generated(one, 60, seed=5, temperature=1.5) for _ in range(3)]
    assert runs[0] == runs[1] == runs[2] and made[0].captured


def counts() -> None:
    """A step is one launch, of a graph: the host waits once for AT_ONCE tokens."""
    one = model("qwen3", "float32", head_dim=8)
    generated(one, 4, seed=1)
    launches = []
    for reads in (5, 10):
        before = xt.cuda.counters()
        generated(one, 1 + reads * steps.AT_ONCE, seed=1)
        after = xt.cuda.counters()
        assert made[0].captured and after["to_host"] - before["to_host"] <= reads + 2, (before, after)
        launches.append(after["launches"] - before["launches"])
    assert launches[1] - launches[0] == 5 * steps.AT_ONCE, launches


def begun() -> None:
    """A graph has begun the steps of the next call when the tokens of one are handed out, and none that nobody asked for."""
    one, at_once = model("qwen3", "float64", head_dim=8), steps.AT_ONCE
    made.clear()
    xt.generation.sampling.Steps = Seen  # type: ignore[attr-defined]
    tokens = stream_tokens(one, IDS, 1 + 2 * at_once + 5, temperature=0.0, capture=True)
    assert [made[0]._begun if made else 0 for _ in tokens] == [0] + [at_once] * at_once + [5] * at_once + [0] * 5


def refused() -> None:
    """A step that waits for the host cannot be captured: one warning, and the same tokens step by step."""
    one = model("qwen3", "float64", head_dim=8)
    want = generate(one, IDS, 20, temperature=0.0, capture=False).tolist()
    feed = one.model.layers[0].mlp.forward

    def forward(x: xt.Tensor) -> xt.Tensor:
        x.sum().item()
        return feed(x)

    one.model.layers[0].mlp.forward = forward
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert generated(one, 20, temperature=0.0) == want
    texts = [str(one.message) for one in told]
    assert len(texts) == 1 and texts[0].startswith("generate: steps run one by one, a step cannot be captured: "), texts


def at_once() -> None:
    """All layers of a step are one op where it computes what their members do: another member, or a cache of its own, is called."""
    calls: dict[type, list[bool]] = {decoder.Decoder: [], decoder.Trunk: []}  # with the head, and without

    def count(of: Any) -> None:
        step = of._step

        def counted(*arguments: object) -> xt.Tensor | None:
            out = step(*arguments)
            calls[of].append(out is not None)
            return out

        of._step = counted

    count(decoder.Decoder)
    count(decoder.Trunk)

    class Twice(xt.nn.Linear):
        def forward(self, x: xt.Tensor) -> xt.Tensor:
            return super().forward(x) * 2

    class Half(decoder.MLP):
        def forward(self, x: xt.Tensor) -> xt.Tensor:
            return super().forward(x) * 0.5

    def other(name: str) -> xt.nn.Module:
        one = model(
            "qwen3", "float64", head_dim=8, num_attention_heads=3 if name == "groups" else 4, num_key_value_heads=1
        )
        layer = one.model.layers[1]
        if name == "linear":
            layer.self_attn.o_proj.__class__ = Twice
        elif name == "mlp":
            layer.mlp.__class__ = Half
        elif name == "eps":
            layer.self_attn.k_norm.eps = 0.5
        elif name == "theta":
            layer.self_attn.theta = 100.0
        elif name == "bias":
            layer.mlp.down_proj.bias = xt.nn.Parameter(xt.ones(32, dtype=xt.float64, device="cuda"))
        elif name == "norm":
            layer.self_attn.q_norm = None
        elif name == "head":
            one.lm_head = Twice(32, 97, False, "cuda", xt.float64)
        elif name == "last eps":
            one.model.norm.eps = 0.5
        return one

    whole = ("stock", "groups")
    for name in (*whole, "head", "last eps", "linear", "mlp", "eps", "theta", "bias", "norm"):
        one = other(name)
        want = generate(one, IDS, 12, temperature=0.0, capture=False).tolist()
        for made in calls.values():
            made.clear()
        assert generated(one, 12, temperature=0.0) == want, name
        assert calls[decoder.Decoder] == [name in whole] * 2, (name, calls)
        assert calls[decoder.Trunk] == ([] if name in whole else [name in ("head", "last eps")] * 2), (name, calls)
