"""Rules of generation, on models whose logits are known. Those of drawing a token: tests/ops/test_sample.py."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import numpy as np
import pytest

import xtrain as xt
from xtrain import _C
from xtrain.generation import KVCache, generate, generate_text
from xtrain.models import Qwen3, Qwen3Config
from xtrain.tokenizers import ByteTokenizer

pytestmark = pytest.mark.on_cpu


# ---- generation


class Fixed(xt.nn.Module):
    """A model whose next token is the position of the last one, modulo its vocabulary, plus the row of the batch."""

    def __init__(self, limit: int = 8, vocab: int = 12) -> None:
        super().__init__()
        self.weight = xt.nn.Parameter(xt.zeros((1,)))
        self.config = SimpleNamespace(max_position_embeddings=limit)
        self.vocab, self.calls = vocab, []

    def make_caches(self, batch: int, length: int) -> list:
        assert length <= self.config.max_position_embeddings
        return []

    def forward(self, ids, positions, caches):
        batch, seq = ids.shape
        at = np.arange(seq) if positions is None else positions.numpy().reshape(batch, seq)[0]
        assert at.max() < self.config.max_position_embeddings
        self.calls.append((seq, int(at[0])))
        logits = np.zeros((batch, seq, self.vocab), np.float32)
        for row in range(batch):
            logits[row, np.arange(seq), (at + row) % self.vocab] = 9.0
        return xt.tensor(logits)


def test_finished_sequences_repeat_their_last_token() -> None:
    """Rows count up from another number each: the second reaches the end 4 first, and waits for the others."""
    streamed: list = []
    out = generate(Fixed(), [[7, 7], [7, 7]], 6, temperature=0, eos=4, stream=streamed.append)
    assert out.tolist() == [[7, 7, 1, 2, 3, 4], [7, 7, 2, 3, 4, 4]] and streamed == [[1, 2], [2, 3], [3, 4], [4, 4]]


def test_generation_goes_on_behind_the_limit() -> None:
    """The older half goes: what is fed begins at position 0 again, and no position is beyond the model's."""
    model = Fixed(limit=8)
    with pytest.warns(
        UserWarning, match="^generate: 8 tokens, max_position_embeddings, are full: the older half"
    ) as told:
        out = generate(model, [7, 7, 7], 12, temperature=0)
    assert len(told) == 1, "once a call"
    assert out.tolist() == [7, 7, 7, 2, 3, 4, 5, 6, 7, 3, 4, 5, 6, 7, 3]
    assert model.calls == [(3, 0), *((1, at) for at in range(3, 8)), (4, 0), *((1, at) for at in range(4, 8)), (4, 0)]


def test_caches_have_room_for_what_comes() -> None:
    """Not for the longest context of the model, which may take more memory than the model."""
    for limit, count, rooms in ((100, 4, [7]), (7, 4, [7]), (6, 4, [6]), (100, 0, [])):
        model, found = Fixed(limit), []
        model.make_caches = lambda batch, length, found=found: found.append((batch, length)) or []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            generate(model, [[7, 7, 7]] * 2, count, temperature=0)
        assert found == [(2, room) for room in rooms], limit


def test_a_batch_of_nothing_and_a_context_of_one() -> None:
    for rows in (0, 2):
        assert generate(Fixed(), np.zeros((rows, 3), np.int64), 2, temperature=0).shape == (rows, 5)
    with pytest.warns(UserWarning, match="^generate: 1 tokens, max_position_embeddings, are full"):
        assert generate(Fixed(limit=1), [7], 3, temperature=0).tolist() == [7, 0, 0, 0]


def test_seeds_of_calls() -> None:
    """A seed repeats a call and leaves the default generator alone; without one, that decides."""
    model = Qwen3(
        Qwen3Config(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    )  # fmt: skip
    _C.manual_seed(3)
    a, b = (generate(model, [1, 2], 12, seed=5).tolist() for _ in range(2))
    assert a == b and _C.get_rng_state() == (3, 0)
    c, d = (generate(model, [1, 2], 12).tolist() for _ in range(2))
    assert c != d and _C.get_rng_state() == (3, 2)
    _C.manual_seed(3)
    assert generate(model, [1, 2], 12).tolist() == c


def test_each_token_has_a_number() -> None:
    """Of two equally likely tokens none is drawn 40 times in a row; row by row they differ."""

    class Even(Fixed):
        def forward(self, ids, positions, caches):
            return xt.zeros(*ids.shape, 2)

    out = generate(Even(limit=100), [[1], [1]], 40, seed=2**64 - 1).tolist()
    assert all(0 < sum(row[1:]) < 40 for row in out) and out[0] != out[1]


def test_a_cache_holds_what_it_has_room_for() -> None:
    cache = KVCache(1, 3)
    for n in (2, 1):
        keys, values = cache.append(xt.full((1, 2, n, 4), float(n)), xt.full((1, 2, n, 4), -float(n)))
    assert keys[0, 0, :, 0].tolist() == [2.0, 2.0, 1.0] and values[0, 1, :, 3].tolist() == [-2.0, -2.0, -1.0]
    with pytest.raises(ValueError, match="KVCache: positions must fit into 3, got 4"):
        cache.append(xt.ones((1, 2, 1, 4)), xt.ones((1, 2, 1, 4)))


def test_text_ends_before_its_end_token() -> None:
    """One in the prompt is none: the model counts 0, 1, 2 behind it."""

    class Letters(ByteTokenizer):
        eos = 3

        def decode(self, ids) -> str:
            return " ".join(map(str, ids))

    assert generate_text(Fixed(), Letters(), [3, 7], 6, temperature=0) == "3 7 1 2"


# ---- arguments and shapes


def test_what_comes_back() -> None:
    """int64 [B, S + new], or [S + new] for 1-D ids, on the device of the ids; nothing is recorded."""
    for ids, shape in (([7, 7], (5,)), ([[7, 7]], (1, 5)), (np.array([[7, 7], [1, 2]], np.int32), (2, 5))):
        out = generate(Fixed(), ids, 3, temperature=0)
        assert out.shape == shape and out.dtype is xt.int64 and not out.requires_grad
    for ids, error in (
        (np.zeros((1, 1, 2), np.int64), ValueError),
        (3, ValueError),
        ([], ValueError),
        (np.zeros((2, 0), np.int64), ValueError),
        ([1.0, 2.0], TypeError),
        (np.ones(2, np.float32), TypeError),
        (xt.ones(2), TypeError),
        ([True], TypeError),
    ):
        with pytest.raises(error, match="generate: ids must have"):
            generate(Fixed(), ids, 3)


def test_arguments_outside_their_ranges() -> None:
    for options, words in (
        (dict(max_new_tokens=10_000_001), r"max_new_tokens must be an integer in \[0, 10000000\]"),
        (dict(max_new_tokens=1.0), "max_new_tokens must be an integer"),
        (dict(max_new_tokens=1, temperature=float("nan")), "temperature must be a number >= 0, got nan"),
        (dict(max_new_tokens=1, temperature="1"), "temperature must be a number >= 0, got '1'"),
        (dict(max_new_tokens=1, top_p="a"), r"top_p must be in \(0, 1\] or None, got 'a'"),
        (dict(max_new_tokens=1, repetition_penalty=None), "repetition_penalty must be a number > 0, got None"),
        (dict(max_new_tokens=1, repetition_penalty=2**1024), "repetition_penalty must be a number > 0, got 1797"),
        (dict(max_new_tokens=1, temperature=float("inf")), "temperature must be a number >= 0, got inf"),
        (dict(max_new_tokens=1, top_p=1.0 + 1e-9), r"top_p must be in \(0, 1\] or None"),
        (dict(max_new_tokens=1, top_p=float("nan")), r"top_p must be in \(0, 1\] or None"),
        (dict(max_new_tokens=1, top_p=0.0), r"top_p must be in \(0, 1\] or None, got 0.0"),
        (dict(max_new_tokens=1, top_k=2.0), "top_k must be an integer >= 1 or None"),
        (dict(max_new_tokens=1, seed=-1), r"seed must be an integer in \[0, 2\^64\) or None, got -1"),
        (dict(max_new_tokens=1, seed=2**64), "seed must be an integer in"),
        (dict(max_new_tokens=1, seed=1.0), "seed must be an integer in"),
    ):
        with pytest.raises(ValueError, match=f"generate: {words}"):
            generate(Fixed(), [1], **options)


def test_several_ends_and_token_0_is_one() -> None:
    """The model counts 0, 1, 2, ..: each of several ids ends it, 0 too."""
    for eos, count in ((2, 4), ([5, 2], 4), ((2, 5), 4), (None, 8), ([], 8), (np.int64(3), 5)):
        assert len(generate(Fixed(), [7], 8, temperature=0, eos=eos).tolist()) == 1 + (count - 1 if count < 8 else 8), (
            eos
        )
    assert generate(Fixed(vocab=1), [0], 8, temperature=0, eos=0).tolist() == [0, 0]
    for eos in (4, [9, 4]):  # of the config
        model = Fixed()
        model.config.eos_token_id = eos
        assert generate(model, [7], 8, temperature=0).tolist() == [7, 0, 1, 2, 3, 4]
        assert len(generate(model, [7], 8, temperature=0, eos=()).tolist()) == 9
    for eos in ("4", [4, "5"], 4.0, [4.0], {"a": 1}):  # which would end nothing
        with pytest.raises(ValueError, match="^generate: eos must be a token id or several, got "):
            generate(Fixed(), [7], 8, temperature=0, eos=eos)


def test_logits_that_are_not_finite() -> None:
    """Of any row, and one +Inf; tokens of -Inf have no chance and are no error."""

    class Bad(Fixed):
        bad = float("nan")

        def forward(self, ids, positions, caches):
            logits = super().forward(ids, positions, caches).numpy()
            logits[-1, -1, 3] = self.bad
            return xt.tensor(logits)

    model = Bad()
    for model.bad in (float("nan"), float("inf")):
        for temperature in (0, 1.0):
            with pytest.raises(FloatingPointError, match="generate: logits must be finite, got NaN or infinity"):
                generate(model, [[1], [2]], 2, temperature=temperature)
    model.bad = float("-inf")
    assert 3 not in generate(model, [1], 60, temperature=50.0, seed=0).tolist()[1:]


def test_close_logits_are_told_apart() -> None:
    """In float64: a float32 model's logits that differ in their last bit."""

    class Near(Fixed):
        def forward(self, ids, positions, caches):
            logits = np.full((*ids.shape, 4), 100.0, np.float32)
            logits[..., 2] = np.nextafter(np.float32(100.0), np.float32(200.0))
            return xt.tensor(logits)

    assert generate(Near(), [1], 1, temperature=0).tolist() == [1, 2]
    for temperature, tops in ((1e-7, {2}), (1e3, {0, 1, 2, 3})):
        assert set(generate(Near(), [1], 60, temperature=temperature, seed=0).tolist()[1:]) == tops


def test_every_bit_of_a_seed_counts() -> None:
    found = [
        generate(Fixed(limit=100), [1], 40, temperature=50.0, seed=seed).tolist()
        for seed in (0, 1, 2**32, 2**63, 2**63 + 1, 2**64 - 1)
    ]
    assert len(set(map(tuple, found))) == len(found)


def test_the_most_likely_costs_no_random_number() -> None:
    _C.manual_seed(3)
    generate(Fixed(), [1], 3, temperature=0)
    assert _C.get_rng_state() == (3, 0)


def test_a_stream_gets_lists_of_ints() -> None:
    seen: list = []
    generate(Fixed(), [[7], [7]], 2, temperature=0, stream=seen.append)
    assert seen == [[0, 1], [1, 2]] and all(type(n) is int for tokens in seen for n in tokens)


def test_a_cache_takes_shape_and_dtype_of_what_comes_first() -> None:
    cache = KVCache(2, 3)
    keys, values = cache.append(xt.ones((2, 1, 2, 4), dtype=xt.bfloat16), xt.ones((2, 3, 2, 5), dtype=xt.float64))
    assert keys.shape == (2, 1, 2, 4) and values.shape == (2, 3, 2, 5) and cache.used == 2
    assert keys.dtype is xt.bfloat16 and values.dtype is xt.float64


def test_a_cache_refuses_to_record() -> None:
    key = xt.ones((1, 1, 1, 2)).requires_grad_()
    with pytest.raises(RuntimeError):
        KVCache(1, 3).append(key, key)


def test_options_of_text() -> None:
    """top_k 0 takes all tokens, and the seed is passed on."""

    class Letters(ByteTokenizer):
        eos = None

        def decode(self, ids) -> str:
            return " ".join(map(str, ids))

    def text(**options) -> str:
        return generate_text(Fixed(limit=100), Letters(), [7], 30, temperature=20.0, **options)

    assert text(seed=1) == text(seed=1, top_k=0) == text(seed=1, top_p=1.0) != text(seed=2)
    ending = Fixed(limit=100)
    ending.config.eos_token_id = [3, 50]
    assert generate_text(ending, Letters(), [7], 30, temperature=0.0) == "7 0 1 2", "an end of the config is not text"
    assert text(seed=1, top_k=1) == text(seed=2, top_k=1) == text(seed=3, top_p=1e-9)
