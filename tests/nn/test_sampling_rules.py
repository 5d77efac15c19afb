"""Rules of sampling and generation, on models whose logits are known."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import xtrain as xt
from xtrain import _C
from xtrain.generation import KVCache, generate, generate_text
from xtrain.generation.sampling import _sample
from xtrain.models import Qwen3, Qwen3Config
from xtrain.tokenizers import ByteTokenizer

pytestmark = pytest.mark.on_cpu


class Draws:
    """A generator of which all numbers are known."""

    def __init__(self, value: float) -> None:
        self.value = value

    def random(self, shape) -> np.ndarray:
        return np.full(shape, self.value)


def drawn(logits, value: float, temperature: float = 1.0, top_k=None, top_p=None) -> int:
    return int(_sample(np.array([logits], np.float64), temperature, top_k, top_p, Draws(value))[0])


def possible(logits, **options) -> list[int]:
    return sorted({drawn(logits, value, **options) for value in np.linspace(0, 1 - 1e-9, 401)})


def test_the_fewest_tokens_that_reach_top_p() -> None:
    """Probabilities that are exact: of two halves one reaches 0.5, of four quarters three reach 0.75; a hair more takes another."""
    two, four = [0.0, 0.0], [0.0] * 4
    assert possible(two, top_p=0.5) == [0] and possible(two, top_p=0.5000001) == [0, 1]
    for count in (1, 2, 3):
        assert possible(four, top_p=count / 4) == list(range(count))
        assert possible(four, top_p=count / 4 + 1e-6) == list(range(count + 1))
    assert possible([5.0, 0.0, 0.0], top_p=1e-9) == [0] and possible(four, top_p=1.0) == [0, 1, 2, 3]


def test_top_p_is_of_what_top_k_has_left() -> None:
    """Of eight equals four are left: a half of these are two."""
    assert possible([0.0] * 8, top_k=4, top_p=0.5) == [0, 1]


def test_the_k_most_likely() -> None:
    """Of equals, those that come first."""
    assert possible([1.0, 3.0, 2.0, 0.0], top_k=2) == [1, 2] and possible([1.0, 1.0, 1.0], top_k=2) == [0, 1]
    assert possible([1.0, 3.0], top_k=5) == [0, 1] and drawn([1.0, 3.0, 3.0], 0.9, temperature=0.0) == 1


def test_logits_are_divided_by_the_temperature() -> None:
    """exp(-2 / 0.5) / (1 + ..) = 0.018 of the draws, at 2.0 exp(-1) / (1 + ..) = 0.269."""
    for temperature, share in ((0.5, 0.01799), (2.0, 0.26894)):
        edge = 1 - share
        assert drawn([2.0, 0.0], edge - 1e-3, temperature) == 0 and drawn([2.0, 0.0], edge + 1e-3, temperature) == 1


def test_tokens_are_drawn_by_their_probabilities() -> None:
    logits = np.log([0.5, 0.25, 0.125, 0.125]).tolist()
    assert [drawn(logits, v) for v in (0.0, 0.499, 0.501, 0.749, 0.751, 0.874, 0.876, 0.9999)] == [
        0,
        0,
        1,
        1,
        2,
        2,
        3,
        3,
    ]


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
    out = generate(model, [7, 7, 7], 12, temperature=0)
    assert out.tolist() == [7, 7, 7, 2, 3, 4, 5, 6, 7, 3, 4, 5, 6, 7, 3]
    assert model.calls == [(3, 0), *((1, at) for at in range(3, 8)), (4, 0), *((1, at) for at in range(4, 8)), (4, 0)]


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
