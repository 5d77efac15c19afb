"""Rules of drawing tokens, on logits whose probabilities are known, and of advance_ behind a draw. The op table compares with a whole
sort, and has the values of advance_.
"""

from __future__ import annotations

import numpy as np
import pytest

import xtrain as xt
from xtrain import _C
from xtrain import functional as F
from xtrain.optable.references import philox_words
from xtrain.optable.references import sample as reference

SEED = 20_240_607


def random(step: int = 0, seed: int = SEED) -> xt.Tensor:
    return xt.tensor(np.array([seed, step], np.int64))


def drawn(logits, rows: int = 401, dtype: _C.dtype = xt.float32, seed: int = SEED, **options) -> np.ndarray:
    """The tokens of so many rows of these logits."""
    x = xt.tensor(np.array([logits] * rows, np.float64)).to(dtype)
    return F.sample(x, random(0, seed), **options).cpu().numpy()


def possible(logits, **options) -> list[int]:
    return sorted(set(drawn(logits, **options).tolist()))


def test_the_fewest_tokens_that_reach_top_p() -> None:
    """Probabilities that are exact: of two halves one reaches 0.5, of four quarters three reach 0.75; a hair more takes another."""
    two, four = [0.0, 0.0], [0.0] * 4
    assert possible(two, top_p=0.5) == [0] and possible(two, top_p=0.5 + 2.0**-42) == [0, 1]
    for count in (1, 2, 3):
        assert possible(four, top_p=count / 4) == list(range(count))
        assert possible(four, top_p=count / 4 + 1e-6) == list(range(count + 1))
        assert possible([-9.0, *four], top_k=4, top_p=count / 4) == list(range(1, count + 1))
    assert possible([5.0, 0.0, 0.0], top_p=1e-9) == [0] and possible(four, top_p=1.0) == [0, 1, 2, 3]
    assert possible([0.0, 5.0, 0.0], top_p=1e-300) == [1]


def test_a_nucleus_that_ends_with_a_step_of_the_logits() -> None:
    """Weights of exactly 1, 1/2 and 1/2: the first alone is a half."""
    options = dict(temperature=1 / np.log(2), top_p=0.5)
    assert possible([0.0, -1.0, -1.0], **options) == [0]
    assert possible([-1.0, 0.0, -1.0, -70.0], **options) == [1]


def test_top_p_is_of_what_top_k_has_left() -> None:
    """Of eight equals four are left: a half of these are two."""
    assert possible([0.0] * 8, top_k=4, top_p=0.5) == [0, 1]


def test_the_k_most_likely() -> None:
    """Of equals, those that come first."""
    assert possible([1.0, 3.0, 2.0, 0.0], top_k=2) == [1, 2] and possible([1.0, 1.0, 1.0], top_k=2) == [0, 1]
    assert possible([1.0, 3.0], top_k=5) == [0, 1] and possible([1.0, 3.0, 3.0], temperature=0.0) == [1]
    for dtype in (xt.float32, xt.float64):
        assert possible([-0.0, 0.0, -0.0], dtype=dtype, top_k=1) == [0], "both zeros are equal"


def test_the_k_most_likely_of_many() -> None:
    """Of more logits than a list of candidates holds, in any order, growing or falling."""
    rng = np.random.default_rng(4)
    x = np.linspace(-0.5, 0.5, 6000)
    for logits in (rng.permutation(x), x, x[::-1]):
        rows = np.array([logits] * 64, np.float32)
        assert possible(logits, top_k=3) == sorted(np.argsort(-logits)[:3].tolist())
        for k in (3, 700):
            tokens = F.sample(xt.tensor(rows), random(), top_k=k).cpu().numpy()
            assert (tokens == reference(rows, random().cpu().numpy(), top_k=k)).all()


def test_equal_logits_across_lists_and_blocks() -> None:
    """More equals than the lists of a kernel hold: the first k are left, wherever they stand."""
    x = np.zeros((64, 5000), np.float32)
    x[:, 100:2600] = 1.0
    for k in (1, 300, 1030, 2500):
        tokens = F.sample(xt.tensor(x), random(), top_k=k).cpu().numpy()
        assert tokens.min() >= 100 and tokens.max() < 100 + k
        assert (tokens == reference(x, random().cpu().numpy(), top_k=k)).all()
    half = F.sample(xt.tensor(x), random(), top_k=2500, top_p=0.5).cpu().numpy()
    assert half.min() >= 100 and half.max() < 1350 and len(set(half.tolist())) > 32


def test_logits_are_divided_by_the_temperature() -> None:
    """exp(-2 / 0.5) / (1 + ..) = 0.018 of the draws, at 2.0 exp(-1) / (1 + ..) = 0.269: within four deviations."""
    for temperature, share in ((0.5, 0.01799), (2.0, 0.26894)):
        got = drawn([2.0, 0.0], 20_000, temperature=temperature).mean()
        assert abs(got - share) < 4 * (share * (1 - share) / 20_000) ** 0.5


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.87}])
def test_tokens_are_drawn_by_their_probabilities(options) -> None:
    """Each row's number in [0, 1) falls into the interval of its token, intervals being in the order of the indices."""
    probabilities = np.array([0.125, 0.5, 0.125, 0.25])
    left = [0, 1, 3] if options else [0, 1, 2, 3]
    words = philox_words(SEED, 0, 4 * 401).reshape(-1, 4)
    numbers = (words[:, 1] * 2.0**32 + words[:, 0]) * 2.0**-64 * probabilities[left].sum()
    want = np.array(left)[(np.cumsum(probabilities[left])[None, :] <= numbers[:, None]).sum(1)]
    assert (drawn(np.log(probabilities), dtype=xt.float64, **options) == want).all()


def test_seed_step_and_row_decide() -> None:
    """The same numbers again for the same seed, step and row; others for others; a negative seed is a number as any."""
    x = xt.tensor(np.random.default_rng(0).standard_normal((8, 1000)).astype(np.float32))
    first = F.sample(x, random(3)).tolist()
    assert first == F.sample(x, random(3)).tolist() and len(set(first)) > 4
    assert first != F.sample(x, random(4)).tolist() and first != F.sample(x, random(3, -7)).tolist()
    assert F.sample(x[:3], random(3)).tolist() == first[:3], "a row's token does not depend on the other rows"


def test_rows_without_a_largest_number() -> None:
    """-1 for a NaN anywhere, +Inf, or -Inf alone; tokens of -Inf have no chance."""
    nan, inf = float("nan"), float("inf")
    x = np.zeros((6, 700), np.float32)
    x[1, 699], x[2, 3], x[3, :], x[4, 1:] = nan, inf, -inf, -inf
    for options in ({}, {"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.5}):
        for dtype in (xt.float32, xt.bfloat16):
            tokens = F.sample(xt.tensor(x).to(dtype), random(), **options).tolist()
            assert tokens[1:5] == [-1, -1, -1, 0] and tokens[0] >= 0 and tokens[5] >= 0, options


def test_close_logits_are_told_apart() -> None:
    """float32 logits that differ in their last bit, float64 ones that float32 cannot tell apart; extreme temperatures."""
    for dtype, near in ((xt.float32, np.nextafter(np.float32(100), np.float32(200))), (xt.float64, 100 + 1e-13)):
        x = [100.0, 100.0, float(near), 100.0]
        assert possible(x, dtype=dtype, temperature=0.0) == possible(x, dtype=dtype, top_k=1) == [2]
        assert possible(x, dtype=dtype, temperature=1e-300) == possible(x, dtype=dtype, top_p=0.2) == [2]
        assert possible(x, dtype=dtype, temperature=1e300) == [0, 1, 2, 3]


def test_weights_end_at_2_to_the_minus_40() -> None:
    """The most likely token weighs 2^40, one 2^-k times as likely 2^(40 - k), down to 1 and then nothing."""
    ln2 = float(np.log(2.0))
    for k in (1, 7, 12):  # 2^k tokens that weigh 2^(40 - k) are as likely as the first one together
        share = (drawn([0.0] + [-k * ln2] * (1 << k), 1000) > 0).mean()
        assert abs(share - 0.5) < 0.07
    x = np.full((200, 1 << 15), -41.5 * ln2, np.float32)
    x[:, 5] = 0.0
    assert set(F.sample(xt.tensor(x), random()).tolist()) == {5}, "below 2^-41 a token has weight 0"


def test_strided_logits_and_options_read_late() -> None:
    x = np.random.default_rng(1).standard_normal((6, 9, 50)).astype(np.float32)
    turned = xt.tensor(x)[:, 4]
    assert (
        F.sample(turned, random(2), top_p=0.8).tolist()
        == F.sample(xt.tensor(x[:, 4].copy()), random(2), top_p=0.8).tolist()
    )
    state = random(2)
    state += 1
    assert F.sample(turned, state).tolist() == F.sample(turned, random(3, SEED + 1)).tolist()


def test_no_gradient_and_no_default_generator() -> None:
    _C.manual_seed(3)
    tokens = F.sample(xt.zeros(2, 3).requires_grad_(), random())
    assert not tokens.requires_grad and tokens.dtype is xt.int64 and _C.get_rng_state() == (3, 0)
    assert F.sample(xt.zeros(0, 3), random()).shape == (0,)


# ---- multinomial


def test_multinomial_draws_by_weights() -> None:
    """Shares of many draws within four deviations; weights need no sum of 1; nothing of weight 0."""
    _C.manual_seed(5)
    weights = np.array([2.0, 0.0, 6.0, 4.0])
    for dtype in (xt.float32, xt.bfloat16, xt.float64):
        drawn = xt.multinomial(xt.tensor(np.tile(weights, (4000, 1))).to(dtype), 1)
        share = np.bincount(drawn.cpu().numpy()[:, 0], minlength=4) / 4000
        assert (abs(share - weights / 12) <= 4 * (weights / 12 * (1 - weights / 12) / 4000) ** 0.5).all()
    again = xt.multinomial(xt.tensor(weights), 200, replacement=True)
    assert again.shape == (200,) and set(again.tolist()) == {0, 2, 3}


def test_multinomial_without_replacement() -> None:
    """Each row is a permutation; the second draw has the weights that the first one leaves."""
    _C.manual_seed(6)
    rows = xt.multinomial(xt.tensor(np.tile([1.0, 1.0, 2.0], (3000, 1))), 3).cpu().numpy()
    assert (np.sort(rows, 1) == [0, 1, 2]).all()
    last = np.bincount(rows[:, 2], minlength=3) / 3000  # P(2 is last) = 2/4 * 1/3
    assert abs(last[2] - 1 / 6) < 4 * (5 / 36 / 3000) ** 0.5
    _C.manual_seed(6)
    assert xt.multinomial(xt.tensor(np.tile([1.0, 1.0, 2.0], (3000, 1))), 3).tolist() == rows.tolist()


def test_multinomial_refuses() -> None:
    for call, error, words in (
        (lambda: xt.multinomial([1.0], 1), TypeError, "input must be a Tensor, got list"),
        (lambda: xt.multinomial(xt.ones(2, 2, 2), 1), ValueError, r"input must have shape .*\(2, 2, 2\)"),
        (lambda: xt.multinomial(xt.arange(3), 1), TypeError, "floating point dtype, got int64"),
        (lambda: xt.multinomial(xt.ones(3), 0), ValueError, "num_samples must be an integer >= 1, got 0"),
        (lambda: xt.multinomial(xt.zeros(3), 1), ValueError, "at least one weight above 0"),
        (lambda: xt.multinomial(xt.tensor([1.0, -1.0]), 1), ValueError, "none negative"),
        (lambda: xt.multinomial(xt.tensor([1.0, 0.0, 0.0]), 2), ValueError, "at least 2 weights above 0"),
        (
            lambda: xt.multinomial(xt.ones(3), 2**63 - 1),
            ValueError,
            "num_samples must be at most 3 without replacement",
        ),
    ):
        with pytest.raises(error, match=f"multinomial: .*{words}"):
            call()


def test_multinomial_of_weights_that_float32_cannot_hold() -> None:
    assert xt.multinomial(xt.tensor([0.0, 1e-300], dtype=xt.float64), 1).tolist() == [1]


# ---- the end of a step of generation: advance_


def given(rows: int = 2, slots: int = 3) -> list[xt.Tensor]:
    """ids, state, made and tokens."""
    shapes = (rows, 1), (rows + 3,), (slots, rows), (rows,)
    return [xt.tensor(np.full(shape, 7 * (i == 3), np.int64)) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("number", range(3))
def test_changes_are_counted(number: int) -> None:
    """Autograd sees that ids, state and made have changed since they were saved."""
    arguments = given()
    table = xt.ones(9, 2).requires_grad_()
    y = F.embedding(arguments[number], table).sum()
    with xt.no_grad():
        _C.advance_(*arguments)
    with pytest.raises(RuntimeError, match="changed in place"):
        y.backward()


@pytest.mark.parametrize(("one", "other"), [(1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
def test_no_common_memory(one: int, other: int) -> None:
    names, memory = ["ids", "state", "made", "tokens"], xt.zeros(9, dtype=xt.int64)
    shapes = [(2, 1), (5,), (3, 2), (2,)]
    arguments = [xt.zeros(*shape, dtype=xt.int64) for shape in shapes]
    for i in (one, other):
        arguments[i] = memory[: int(np.prod(shapes[i]))].reshape(*shapes[i])
    with pytest.raises(
        ValueError, match=f"^advance_: {names[one]} must not overlap {names[other]}, got common memory$"
    ):
        _C.advance_(*arguments)


def test_a_ring_comes_round() -> None:
    """Each step keeps its tokens in the next row, behind the last one the first."""
    ids, state, made, _ = given()
    for step in range(8):
        _C.advance_(ids, state, made, xt.tensor([step, -1]))
        assert ids.tolist() == [[step], [0]] and state.tolist() == [step + 1, step + 1, 0, step + 1, (step + 1) % 3]
        assert made[step % 3].tolist() == [step, -1]
    assert made.tolist() == [[6, -1], [7, -1], [5, -1]]


def test_tokens_of_any_strides() -> None:
    ids, state, made, _ = given()
    _C.advance_(ids, state, made, xt.tensor([[1, 2], [3, 4]])[:, 1])
    assert ids.tolist() == [[2], [4]] and made[0].tolist() == [2, 4]


@pytest.mark.on_cpu
@pytest.mark.parametrize("number", range(3))
def test_one_device(number: int) -> None:
    arguments = given()
    arguments[number] = arguments[number].to("meta")
    name = ("ids", "state", "made")[number]
    with pytest.raises(ValueError, match=rf"advance_: {name} must be on the device of tokens, cpu, got meta"):
        _C.advance_(*arguments)
