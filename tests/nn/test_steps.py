"""Generation without the host: generation.steps, on the device of the tests; captured ones: tests/cuda/test_captured_generation.py."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

import xtrain as xt
from xtrain.generation import KVCache, generate, steps
from xtrain.generation.draws import Draws, Penalty
from xtrain.models import GPT2, GPT2Config, Llama, LlamaConfig, Qwen3, Qwen3Config

SIZES = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, max_position_embeddings=128, initializer_range=0.3,
)  # fmt: skip
IDS = np.random.default_rng(4).integers(0, 97, (3, 5))


def model(family: str = "qwen3", **options) -> xt.nn.Module:
    xt.manual_seed(8)
    if family == "gpt2":
        sizes = dict(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.3)
        return GPT2(GPT2Config(**sizes | options), dtype=xt.float64)
    kind, config = (Llama, LlamaConfig) if family == "llama" else (Qwen3, Qwen3Config)
    return kind(config(**SIZES | options), dtype=xt.float64)


@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt2"])
@pytest.mark.parametrize(
    "options", [dict(temperature=0.0), dict(seed=3), dict(seed=3, top_k=9, top_p=0.8, temperature=2.0)]
)
def test_the_same_tokens_as_step_by_step(family: str, options: dict) -> None:
    """In float64, where both ways differ by far less than two logits do; fewer, as many and more than are read at once."""
    one = model(family)
    for count in (1, 2, steps.AT_ONCE + 1, 40):
        want = generate(one, IDS, count, capture=False, **options).tolist()
        assert generate(one, IDS, count, capture=True, **options).tolist() == want
        assert generate(one, IDS[0], count, capture=True, **options).tolist()[:5] == IDS[0].tolist()


def test_rows_of_steps_end() -> None:
    """Tokens behind the end of all rows are not seen, rows that have ended repeat their last token."""
    one, seen, plain = model(), [], []
    for eos in ((), list(range(0, 90, 7)), list(range(0, 97, 2))):
        for seed in range(4):
            options = dict(seed=seed, temperature=3.0, eos=eos)
            want = generate(one, IDS, 30, capture=False, stream=plain.append, **options).tolist()
            assert generate(one, IDS, 30, capture=True, stream=seen.append, **options).tolist() == want
    assert seen == plain and len(seen) < 12 * 30 and all(type(n) is int for row in seen for n in row)


def test_what_is_not_captured(monkeypatch) -> None:
    """Hooks, and caches of another class: the steps of before, without a word."""

    def refuse(*args: object) -> None:
        raise AssertionError("no steps are made")

    monkeypatch.setattr("xtrain.generation.sampling.Steps", refuse)
    one = model()
    generate(one, IDS, 3, temperature=0.0, capture=False)
    handle = one.model.layers[0].mlp.register_forward_hook(lambda *args: None)
    generate(one, IDS, 3, temperature=0.0, capture=True)
    handle.remove()

    class Own(KVCache):
        pass

    one.make_caches = lambda batch, length: [Own(batch, length) for _ in range(2)]
    generate(one, IDS, 3, temperature=0.0, capture=True)
    del one.make_caches
    with pytest.raises(AssertionError, match="no steps are made"):
        generate(one, IDS, 15, temperature=0.0, capture=True)


@pytest.mark.on_cpu
@pytest.mark.parametrize("count", [2, steps.AT_ONCE, steps.AT_ONCE + 3])
def test_no_step_is_made_behind_the_last_token(count: int, monkeypatch) -> None:
    """The caches have no room for one."""
    made: list[int] = []
    run = steps.Steps.run

    def counted(self, wanted: int, more: int = 0):
        made.append(wanted)
        return run(self, wanted, more)

    monkeypatch.setattr(steps.Steps, "run", counted)
    generate(model(), IDS, count, temperature=0.0, capture=True, eos=())
    assert sum(made) == count - 1


@pytest.mark.parametrize("count", [15, 16, 17, 60])
def test_behind_the_limit(count: int) -> None:
    """As long as context would be dropped before the end, step by step; the rest follows without the host."""
    one = model(max_position_embeddings=20)
    with pytest.warns(UserWarning, match="are full") if count > 16 else contextlib.nullcontext():
        want = generate(one, IDS, count, temperature=0.0, capture=False).tolist()
    with pytest.warns(UserWarning, match="are full") if count > 16 else contextlib.nullcontext():
        assert generate(one, IDS, count, temperature=0.0, capture=True).tolist() == want


@pytest.mark.on_cpu
def test_the_default_is_a_rule() -> None:
    """Captured by itself on a GPU only, and only when steps.CAPTURES says so."""
    from xtrain.generation.sampling import _captures

    one = model()
    caches = one.make_caches(1, 4)
    assert not _captures(True, one, caches), "empty caches"
    for cache in caches:
        cache.append(xt.ones(1, 2, 1, 8), xt.ones(1, 2, 1, 8))
    assert _captures(True, one, caches) and not _captures(None, one, caches) and not _captures(False, one, caches)


@pytest.mark.parametrize("capture", [False, True])
def test_logits_that_are_not_finite_are_found_late(capture: bool) -> None:
    """At a later position: its tokens before that are there, and no index is out of range."""
    one, seen = model("gpt2"), []
    with xt.no_grad():
        one.transformer.wpe.weight[9] = float("nan")
    with pytest.raises(FloatingPointError, match="generate: logits must be finite, got NaN or infinity"):
        generate(one, IDS, 30, capture=capture, seed=0, stream=seen.append)
    assert len(seen) == 5


def test_a_step_that_cannot_be_captured() -> None:
    """Runs eagerly from then on, after one warning; other errors of a step are errors."""

    class Broken:
        ready, captured = True, False

        def __call__(self) -> None:
            raise RuntimeError("no capture")

    one = model()
    caches = one.make_caches(3, 40)
    with xt.no_grad():
        one(xt.tensor(IDS), None, caches)
        made = steps.Steps(one, caches, IDS[:, 0], 5, Draws((0.0, None, None), 1, Penalty(1.0, IDS)))
        made._graph = Broken()
        with pytest.warns(UserWarning, match="^generate: steps run one by one, a step cannot be captured: no capture"):
            first = made.run(4)
        assert first.shape == (4, 3) and first.min() >= 0 and not made.captured
        made._graph = Broken()
        made._graph.ready = False
        with pytest.raises(RuntimeError, match="no capture"):
            made.run(1)


def test_tokens_are_read_in_any_number() -> None:
    """The ring of tokens comes round between and within two reads."""
    one, found = model(), []
    for counts in ([1] * 40, [5, 7, 16, 3, 9]):
        caches = one.make_caches(3, 50)
        with xt.no_grad():
            one(xt.tensor(IDS), None, caches)
            made = steps.Steps(one, caches, IDS[:, 0], 5, Draws((1.0, None, None), 1, Penalty(1.0, IDS)))
            found.append(np.concatenate([made.run(count) for count in counts]).tolist())
    assert found[0] == found[1] and len({tuple(row) for row in found[0]}) > 30


def test_attend_stores_behind_the_others_or_at_positions() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (xt.tensor(rng.standard_normal((2, heads, 6, 8))) for heads in (4, 2, 2))
    plain, late = KVCache(2, 6), KVCache(2, 6)
    want = plain.attend(q, k, v)
    first = late.attend(q[:, :, :4], k[:, :, :4], v[:, :, :4])
    late.positions = xt.tensor([4, 4])
    rest = []
    for n in (4, 5):
        rest.append(late.attend(q[:, :, n : n + 1], k[:, :, n : n + 1], v[:, :, n : n + 1]))
        late.positions.add_(1)
    got = xt.cat([first, *rest], 2)
    assert (got - want).abs().max().item() < 1e-13 and late.used == 4
    assert (late.key == plain.key).all().item() and (late.value == plain.value).all().item()
