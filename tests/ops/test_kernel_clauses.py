"""What the contracts of kernels promise at their edges, a test for each clause that the op table's random numbers do not reach."""

from __future__ import annotations

import numpy as np
import pytest

import xtrain as xt
import xtrain.functional as F
from xtrain import _C
from xtrain.optable.references import philox_block, rope
from xtrain.optable.table import UNIT_ROUNDOFF, accumulator, exact, tensor

FLOATS = ("float32", "float64", "bfloat16", "float16")
nan, inf = float("nan"), float("inf")


def values(tensor: xt.Tensor) -> np.ndarray:
    return tensor.double().cpu().numpy()


def ulps(got: np.ndarray, want: np.ndarray) -> float:
    """The largest error in units of the last place of float32."""
    return float((np.abs(got - want) / np.spacing(np.abs(want).astype(np.float32)).astype(np.float64)).max())


# ---- elementwise


@pytest.mark.parametrize(
    "name,low,high,most", [("log", 1e-30, 1e30, 2), ("tanh", 0.02, 0.7, 4), ("erf", 0.02, 1.5, 4), ("exp", -80, 80, 2)]
)
def test_functions_are_right_to_a_few_units(name: str, low: float, high: float, most: float) -> None:
    """Of float32, in both branches and around their seam."""
    draw = np.geomspace(low, high, 20001) if low > 0 else np.linspace(low, high, 20001)
    x = xt.tensor(draw.astype(np.float32))
    assert ulps(values(getattr(x, name)()), values(getattr(x.double(), name)())) <= most


def test_logarithms_of_edges() -> None:
    x = np.array([1e-40, 2.0**-149, 2.0**-126, 1.0, 3e38], np.float32)
    assert np.allclose(values(xt.tensor(x).log()), np.log(x.astype(np.float64)), rtol=1e-6, atol=0)
    for name in ("float32", "float64"):
        got = values(xt.tensor([0.0, -1.0, inf, nan, -inf], dtype=getattr(xt, name)).log())
        assert got[0] == -inf and np.isnan(got[1]) and got[2] == inf and np.isnan(got[3]) and np.isnan(got[4])


@pytest.mark.parametrize("x", [2e4, 1e5, 123456.7, 9e5])
def test_sines_beyond_the_fast_range(x: float) -> None:
    t = xt.tensor([x, -x])
    for name in ("sin", "cos"):
        assert np.abs(values(getattr(t, name)()) - values(getattr(t.double(), name)())).max() < 3e-7


def test_sines_of_all_quadrants() -> None:
    t = xt.tensor(np.linspace(-20, 20, 4001, dtype=np.float32))
    for name in ("sin", "cos"):
        assert np.abs(values(getattr(t, name)()) - values(getattr(t.double(), name)())).max() < 3e-7


def test_tails_of_gelu_keep_their_relative_precision() -> None:
    x = xt.tensor(np.linspace(-9, -2, 200, dtype=np.float32))
    want = values(F.gelu(x.double()))
    assert np.abs(values(F.gelu(x)) / want - 1).max() < 2e-5


def test_comparisons_with_nan() -> None:
    """Nothing is equal to NaN, or on one side of it."""
    for name in FLOATS:
        a = xt.tensor([nan, 1.0, nan, 1.0], dtype=getattr(xt, name))
        b = xt.tensor([1.0, nan, nan, 1.0], dtype=getattr(xt, name))
        for left, right in ((a, b), (a, 1.0)):
            other = [1.0] * 4 if right is not b else b.tolist()
            for op in ("eq", "ne", "lt", "le", "gt", "ge"):
                want = [getattr(u, f"__{op}__")(v) for u, v in zip(a.tolist(), other, strict=True)]
                assert getattr(left, f"__{op}__")(right).tolist() == want, (name, op)


def test_nan_on_either_side_of_extremes() -> None:
    for name in FLOATS:
        a, b = (xt.tensor(v, dtype=getattr(xt, name)) for v in ([nan, 1.0, nan, 2.0], [1.0, nan, nan, 1.0]))
        for op, last in ((_C.maximum, 2.0), (_C.minimum, 1.0)):
            got = values(op(a, b))
            assert np.isnan(got[:3]).all() and got[3] == last


def test_operations_with_a_number_have_the_bits_of_ieee() -> None:
    """A quotient is one division, and no product with a reciprocal."""
    x = np.random.default_rng(0).standard_normal((40, 300)).astype(np.float32)
    t = xt.tensor(x)
    for number in (3.0, 7.0, 0.1):
        n = np.float32(number)
        for got, want in (
            (t / number, x / n),
            (number / t, n / x),
            (t - number, x - n),
            (number - t, n - x),
            (t * number, x * n),
        ):
            assert np.array_equal(got.cpu().numpy(), want)
    row = np.random.default_rng(1).standard_normal((40, 1)).astype(np.float32)
    for got, want in ((t / xt.tensor(row), x / row), (t - xt.tensor(row), x - row), (xt.tensor(row) - t, row - x)):
        assert np.array_equal(got.cpu().numpy(), want)


@pytest.mark.parametrize("exponent", [2, 3, 0.5, -0.5, -1, -2, 1.5, -3, 0, 1])
def test_powers_by_a_number(exponent: float) -> None:
    base = np.array([0.25, 1.0, 2.0, 9.0, 1e-3])
    if float(exponent).is_integer():
        base = np.concatenate([base, -base])
    for name, rtol in (("float32", 1e-6), ("float64", 1e-14)):
        got = values(xt.tensor(base, dtype=getattr(xt, name)) ** exponent)
        assert np.allclose(got, values(xt.tensor(base, dtype=getattr(xt, name))) ** exponent, rtol=rtol, atol=0)


def test_powers_of_integers_by_integers() -> None:
    base, exponent = xt.tensor([1, -1, -1, 2, 0, 3, -1]), xt.tensor([-3, -3, -2, -1, 0, 5, 4])
    assert (base**exponent).tolist() == [1, -1, 1, 0, 1, 243, 1]


def test_silu_of_16_bits_is_not_0_before_its_result_is() -> None:
    """exp(88) is above 2^126, where the fast quotient of a GPU gives 0."""
    x = xt.tensor([-85.0, -87.0, -88.0], dtype=xt.bfloat16)
    wide = values(x)
    assert np.abs(values(F.silu(x)) / (wide / (1 + np.exp(-wide))) - 1).max() < 2**-7


@pytest.mark.parametrize("name", FLOATS)
def test_the_slope_of_abs_at_nan_is_nan(name: str) -> None:
    x = xt.tensor([nan, -2.0, 0.0, 3.0], dtype=getattr(xt, name), requires_grad=True)
    abs(x).sum().backward()
    assert np.array_equal(values(x.grad), [nan, -1.0, 0.0, 1.0], equal_nan=True)


def test_products_of_masks_and_of_large_integers() -> None:
    a, b = xt.tensor([True, True, False]), xt.tensor([True, False, False])
    assert (a * b).tolist() == [True, False, False] and (a + b).tolist() == [True, True, False]
    for value in (2**33 + 1, -(2**40), 3 * 2**61):
        x = xt.tensor([value])
        wrapped = ((value * value + 2**63) % 2**64) - 2**63
        assert (x * x).tolist() == [wrapped] and (x + x).tolist() == [((2 * value + 2**63) % 2**64) - 2**63]


# ---- conversions


def test_conversions_at_their_edges() -> None:
    """Each is rounded once; fractions go towards zero; integers keep their low bits; what is not 0 is true."""
    tiny = xt.tensor([1e-300, -1e-300, 0.0, -0.0, nan], dtype=xt.float64)
    assert tiny.bool().tolist() == [True, True, False, False, True]
    assert xt.tensor([2**60 + 2**36 + 1]).float().double().tolist() == [float(2**60 + 2**37)]
    assert xt.tensor([2**31, 2**32 + 5, -(2**31) - 1]).to(xt.int32).tolist() == [-(2**31), 5, 2**31 - 1]
    assert xt.tensor([256, 257, -1]).to(xt.uint8).tolist() == [0, 1, 255]
    for name in FLOATS:
        assert xt.tensor([-1.5, -0.5, 0.5, 1.5, -2.0], dtype=getattr(xt, name)).long().tolist() == [-1, 0, 0, 1, -2]
    assert xt.tensor([2**24 + 1, -(2**24) - 1], dtype=xt.int32).float().double().tolist() == [2.0**24, -(2.0**24)]


def test_a_long_range_counts_in_float64() -> None:
    last = 2**24 + 3
    assert xt.arange(0.0, last + 1.0, 1.0, dtype=xt.float64)[-3:].tolist() == [last - 2.0, last - 1.0, float(last)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_matrices_an_odd_number_of_elements_apart_are_transposed(dtype: str) -> None:
    """Their sizes and rows are even, so that pairs of elements could move together but for where they begin."""
    x = (np.arange(3 * 4097) % 251).reshape(3, 4097)
    t = xt.tensor(x.astype(np.float64)).to(getattr(xt, dtype))[:, :4096].view(3, 64, 64)
    want = x[:, :4096].reshape(3, 64, 64).transpose(0, 2, 1)
    assert np.array_equal(values(t.transpose(1, 2).contiguous()), want)


# ---- random numbers


@pytest.mark.on_cpu
def test_a_fill_takes_one_stream() -> None:
    _C.manual_seed(7)
    for fills in range(1, 4):
        xt.rand(1000)
        assert _C.get_rng_state() == (7, fills)


def test_what_words_become() -> None:
    """u = (word >> 8) 2^-24; Box-Muller of words (0, 1) and (2, 3), u1 = word 2^-32 + 2^-33; pairs of words modulo the range."""
    seed, count = 0x123456789ABCDEF, 1 << 20
    blocks = np.zeros((count // 2, 4), np.uint64)
    blocks[:, 0], blocks[:, 2] = np.arange(count // 2), 5
    words = np.asarray(philox_block(blocks, (seed & 0xFFFFFFFF, seed >> 32)), np.uint64)
    _C.set_rng_state((seed, 5))
    assert np.array_equal(xt.rand(count).cpu().numpy(), (words[: count // 4].reshape(-1) >> np.uint64(8)) * 2.0**-24)
    _C.set_rng_state((seed, 5))
    pairs = words[: count // 4].reshape(-1, 2).astype(np.float64)
    u1 = (pairs[:, 0].astype(np.float32).astype(np.float64) * 2.0**-32 + 2.0**-33).astype(
        np.float32
    )  # its logarithm is steep near 1
    radius, angle = np.sqrt(-2 * np.log(u1.astype(np.float64))), pairs[:, 1] * (2 * np.pi * 2.0**-32)
    want = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).reshape(-1)
    assert pairs[:, 0].min() < 10_000 and np.abs(xt.randn(count).cpu().numpy() - want).max() < 3e-6
    _C.set_rng_state((seed, 5))
    low, high = -(2**51) - 7, 2**52 + 5
    bits = (words[:, 1::2] << np.uint64(32) | words[:, ::2]).reshape(-1)
    assert np.array_equal(
        xt.randint(low, high, (count,)).cpu().numpy(), (bits % np.uint64(high - low)).astype(np.int64) + low
    )


# ---- reductions


def test_the_first_of_equals_in_every_layout() -> None:
    """Rows and columns, in one segment and over several, of floats and integers."""
    for rows, cols in ((100, 150), (20000, 3), (20000, 130), (9000, 1)):
        at = [0, 1, 17, rows // 2, rows - 1]
        for dtype in (np.float32, np.float64, np.int64, np.int32):
            x = np.zeros((rows, cols), dtype)
            for column in range(cols):
                x[at[column % 5] :, column] = 1  # all of them equal, from there on
            want = [at[column % 5] if at[column % 5] else 0 for column in range(cols)]
            assert _C.argmax(xt.tensor(x), 0).tolist() == want
            assert _C.argmax(xt.tensor(np.ascontiguousarray(x.T)), 1).tolist() == want


def test_the_first_of_the_lowest() -> None:
    """Nothing exceeds what a search begins with: rows and columns of -inf, or of the least integer."""
    for n in (1, 3, 40, 5000):
        for row in (xt.full((n,), -inf), xt.full((n,), -inf, dtype=xt.float64), xt.full((n,), -(2**63))):
            rows = xt.stack([row] * 9)
            assert _C.argmax(rows, 1).tolist() == [0] * 9 == _C.argmax(rows.T.contiguous(), 0).tolist()


def test_sums_over_two_dimensions_that_others_part() -> None:
    """Rows that are evenly spaced only within the inner one, of five."""
    x = (np.arange(6 * 4 * 5 * 64) % 97).reshape(6, 4, 5, 64)
    for dtype in (np.float32, np.float64, np.int64):
        assert np.array_equal(values(xt.tensor(x.astype(dtype)).sum((0, 2))), x.sum((0, 2)))


def test_the_first_nan_in_every_layout() -> None:
    for rows, cols in ((100, 150), (20000, 130), (20000, 2)):
        for dtype in (np.float32, np.float64):
            x = np.arange(rows * cols, dtype=dtype).reshape(rows, cols)
            where = [min(rows - 1, 37 * (column + 1) % rows) for column in range(cols)]
            for column, row in enumerate(where):
                x[row, column] = nan
                x[rows - 1, column] = nan
            x[:, 0] = np.arange(rows)
            where[0] = rows - 1
            for t, dim in ((xt.tensor(x), 0), (xt.tensor(np.ascontiguousarray(x.T)), 1)):
                assert _C.argmax(t, dim).tolist() == where
                for op in (_C.amax, _C.amin):
                    got = values(op(t, dim))
                    assert np.isnan(got[1:]).all() and not np.isnan(got[0])


def test_extremes_of_integers_over_segments() -> None:
    x = np.random.default_rng(0).integers(-(2**62), 2**62, 30000)
    for values_ in (x, np.abs(x), -np.abs(x)):
        t = xt.tensor(values_)
        assert (
            t.amin().item() == values_.min()
            and t.amax().item() == values_.max()
            and t.argmax().item() == values_.argmax()
        )
        assert t.sum().item() == int(np.sum(values_))


def test_statistics_at_their_edges() -> None:
    largest = np.finfo(np.float32).max
    low, high, mean, nans, infinities = _C.stats(xt.tensor(np.array([largest, -largest, inf, nan, -inf], np.float32)))
    assert (low, high, mean, nans, infinities) == (-float(largest), float(largest), 0.0, 1, 2)
    assert _C.stats(xt.tensor([2**53 - 1, -5]))[:3] == (-5.0, 2.0**53 - 1, 2.0**52 - 3)
    assert _C.stats(xt.tensor(np.array([2**25 + 1, 3], np.int32)))[:3] == (3.0, 2.0**25 + 1, 2.0**24 + 2)
    assert _C.stats(xt.tensor([nan, inf]))[3:] == (1, 1) and np.isnan(_C.stats(xt.tensor([nan, inf]))[2])
    for dtype in (np.float32, np.int32):  # one element behind an aligned one
        assert _C.stats(xt.tensor(np.arange(1002, dtype=dtype))[1:])[:3] == (1.0, 1001.0, 501.0)


def test_comparison_at_its_edges() -> None:
    def compare(a, b, rtol=0.0, atol=0.0):
        return xt.testing.verify(xt.tensor(a, dtype=xt.float64), xt.tensor(b, dtype=xt.float64), rtol=rtol, atol=atol)

    huge = 1.7e308
    assert compare([-huge, 1.0], [huge, 1.0], rtol=10.0).errors == 1, (
        "a distance that is infinite is wrong, whatever the limit"
    )
    assert compare([inf, -inf, inf], [inf, -inf, -inf]).errors == 1
    assert (
        compare([1.5, 3.0], [1.0, 3.0], rtol=0.4).errors == 1 and compare([1.0, 3.0], [1.5, 3.0], rtol=0.4).errors == 0
    ), "rtol is of the reference"
    seen = compare([1.0, 3.0], [0.0, 2.0])
    assert seen.max_rel == 0.5 and seen.max_abs == 1.0
    assert compare([1.0, 2.0, 3.0], [inf, -2.0, 1.0]).max_ref == 2.0, "the largest finite one of the reference"
    worst = compare([1.0, 1.0, 5.0], [1.0, 1.5, 1.0])
    assert worst.worst == (2,) or worst.worst == 2
    dense, apart = xt.arange(300), xt.zeros(600, dtype=xt.int64)
    apart[::2] = dense
    for left, right in ((dense, apart[::2]), (apart[::2], dense)):
        assert _C.compare(left, right, 0.0, 0.0)["errors"] == 0, "either may be strided"


# ---- losses and rotations


@pytest.mark.parametrize("ignored", [0, 2])
def test_a_label_of_the_vocabulary_may_be_ignored(ignored: int) -> None:
    x = np.random.default_rng(0).standard_normal((5, 4))
    targets = np.array([0, 2, 1, 2, 3])
    keep = targets != ignored
    for dtype in (xt.int64, xt.int32):
        t = xt.tensor(x, requires_grad=True)
        loss = F.cross_entropy(t, xt.tensor(targets).to(dtype), ignore_index=ignored)
        rows = np.log(np.exp(x).sum(1)) - x[np.arange(5), targets]
        assert abs(loss.item() - rows[keep].mean()) < 1e-12
        loss.backward()
        want = np.exp(x) / np.exp(x).sum(1, keepdims=True)
        want[np.arange(5), targets] -= 1
        assert np.allclose(values(t.grad), want * keep[:, None] / keep.sum(), atol=1e-14)


def test_what_a_loss_refuses() -> None:
    x = xt.zeros(3, 4)
    for targets, words, error in (
        (xt.zeros(4, dtype=xt.int64), "must have shape", ValueError),
        (xt.zeros(3, 1, dtype=xt.int64), "must have shape", ValueError),
        (xt.zeros(3), "must be int64 or int32 class indices, got float32", TypeError),
        (xt.zeros(3, dtype=xt.uint8), "must be int64 or int32", TypeError),
    ):
        with pytest.raises(error, match=words):
            F.cross_entropy(x, targets)
    for word in ("nonesuch", "", "Mean", "sums"):
        with pytest.raises(ValueError, match="reduction must be 'mean', 'sum' or 'none', got"):
            F.cross_entropy(x, xt.zeros(3, dtype=xt.int64), reduction=word)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_a_rotation_at_its_limits_is_finite(dtype: str) -> None:
    """The least theta and factor at the last position: the angle is a number, and so are its sine and cosine."""
    x = xt.ones(2, 3, 64, dtype=getattr(xt, dtype))
    places = xt.tensor([2**63 - 1, -(2**63)])
    for theta, factor in ((1e-9, 1e-9), (1e-9, 1.0), (1e308, 1e-9), (1e308, 1e308)):
        out = F.rope(x, theta=theta, factor=factor, positions=places).float().cpu().numpy()
        assert np.isfinite(out).all() and np.abs(out).max() < 1.5, (theta, factor)


def test_what_a_rotation_refuses() -> None:
    x = xt.rand(2, 3, 2, 4)
    places = xt.arange(6)
    for options, words in (
        (dict(positions=places, period=3), "give positions or period, not both"),
        (dict(theta=0.0), "theta must be positive, got 0"),
        (dict(theta=-1.0), "theta must be positive"),
        (dict(theta=nan), "theta must be positive"),
        (dict(theta=1e-300), "theta must be at least 1e-9, got 1e-300"),
        (dict(factor=1e-38), "factor must be at least 1e-9, got 1e-38"),
        (dict(period=0), "period must be at least 1, got 0"),
        (dict(positions=places.reshape(3, 2)), "positions must have one entry per row"),
        (dict(positions=xt.arange(5)), "positions must have one entry per row"),
        (dict(positions=xt.arange(4)), "positions must have one entry per row"),
    ):
        with pytest.raises(ValueError, match=words):
            F.rope(x, **options)
        with pytest.raises(ValueError, match=words):
            F.qk_norm_rope(x, x, xt.ones(4), xt.ones(4), **options)
    with pytest.raises(TypeError, match="positions must be int64 or int32, got float32"):
        F.rope(x, positions=xt.zeros(6))


def test_positions_in_every_form() -> None:
    """One per row, [B, S], and [S] for every sequence; in 32 bits too."""
    x = xt.rand(2, 3, 2, 4)
    want = F.rope(x).tolist()
    every = xt.tensor([0, 1, 2, 0, 1, 2])
    for positions in (every, every.reshape(2, 3), xt.arange(3), every.to(xt.int32), xt.arange(3).to(xt.int32)):
        assert F.rope(x, positions=positions).tolist() == want


@pytest.mark.parametrize("shape", [(21, 2, 8), (7, 3, 2, 8)])
def test_a_position_is_counted_anew_in_every_period(shape: tuple[int, ...]) -> None:
    """Seven periods, which a GPU turns in one block."""
    x = np.random.default_rng(0).standard_normal(shape)
    assert np.abs(values(F.rope(xt.tensor(x), period=3)) - rope(x, period=3)).max() < 1e-12
    if len(shape) == 4:
        assert np.abs(values(F.rope(xt.tensor(x))) - rope(x, period=3)).max() < 1e-12


@pytest.mark.parametrize("dtype", FLOATS)
def test_heads_an_odd_number_of_elements_apart_are_turned(dtype: str) -> None:
    """Rows begin at multiples of 16 bytes, and heads do not."""
    random = np.random.default_rng(0)
    found = []
    wide, upstream = (tensor(random.standard_normal((5, 8, 17)), dtype)[..., :16] for _ in "xy")
    for dense in (False, True):
        x, dy = (t.contiguous() if dense else t for t in (wide, upstream))
        x = x.detach().requires_grad_()
        out = F.rope(x)
        out.backward(dy)
        found.append([values(out.detach()), values(x.grad)])
    for got, want in zip(*found, strict=True):
        assert np.abs(got - want).max() <= 16 * UNIT_ROUNDOFF[dtype] * np.abs(want).max()


def test_angles_of_float64_are_float64() -> None:
    x = xt.zeros(1, 1, 4, dtype=xt.float64)
    x[0, 0, 1] = 1.0
    got = F.rope(x, theta=1234.5, positions=xt.tensor([777]))[0, 0].tolist()
    angle = 777 * 1234.5**-0.5
    assert abs(got[1] - np.cos(angle)) < 1e-12 and abs(got[3] - np.sin(angle)) < 1e-12


def test_halves_must_be_equal() -> None:
    for size in (1, 11, 33):
        with pytest.raises(ValueError, match="the last dim of a fused gate_up must be even"):
            F.swiglu(xt.zeros(2, size))


@pytest.mark.parametrize("wanted", ["gate", "up"])
def test_one_gradient_of_a_gate(wanted: str) -> None:
    gate, up = xt.rand(3, 5), xt.rand(3, 5)
    both = [t.clone().requires_grad_() for t in (gate, up)]
    F.swiglu(*both).sum().backward()
    one = [t.clone().requires_grad_(name == wanted) for name, t in (("gate", gate), ("up", up))]
    F.swiglu(*one).sum().backward()
    for a, b in zip(one, both, strict=True):
        assert (a.grad is None) == (not a.requires_grad) and (a.grad is None or a.grad.tolist() == b.grad.tolist())


# ---- where tensors begin

# Ops, and the shapes of their inputs: whole numbers of 16 bytes, but for where they begin.
ANYWHERE = {
    "layer_norm": (lambda x, w, b: [_C.layer_norm(x, w, b)], [(6, 64), (64,), (64,)]),
    "rms_norm": (lambda x, w: [_C.rms_norm(x, w)], [(6, 64), (64,)]),
    "dropout": (lambda x: [_C.dropout(x, 0.25, key=(5, 9))], [(6, 64)]),
    "bias_gelu": (lambda x, b: [_C.bias_gelu(x, b)], [(6, 64), (64,)]),
    "rope": (lambda x: [_C.rope(x)], [(6, 4, 32)]),
    "qk_norm_rope": (lambda *t: list(_C.qk_norm_rope(*t)), [(6, 4, 32), (6, 2, 32), (32,), (32,)]),
}


def one_further(x: np.ndarray, dtype: str) -> xt.Tensor:
    """x behind one other element."""
    t = tensor(np.append(0.0, x), dtype)[1:].reshape(x.shape)
    assert t.data_ptr() % 16 == t.dtype.itemsize
    return t


@pytest.mark.parametrize("op", ANYWHERE)
def test_each_tensor_may_begin_at_any_element(op: str) -> None:
    """One at a time, inputs and gradients of outputs. All the others begin at multiples of 16 bytes."""
    run, shapes = ANYWHERE[op]
    for dtype in FLOATS:
        random = np.random.default_rng(0)
        arrays = [exact(random.standard_normal(shape), dtype) for shape in shapes]
        dys = [exact(random.standard_normal(out.shape), dtype) for out in run(*(tensor(a, dtype) for a in arrays))]
        wants: list[np.ndarray] = []
        for moved in range(-1, len(arrays) + len(dys)):  # -1: none
            given = [(one_further if i == moved else tensor)(a, dtype) for i, a in enumerate([*arrays, *dys])]
            leaves = [t.detach().requires_grad_() for t in given[: len(arrays)]]
            outs = run(*leaves)
            _C.backward(outs, given[len(arrays) :], False)
            found = [values(t.detach()) for t in (*outs, *(leaf.grad for leaf in leaves))]
            wants = wants or found
            for got, want in zip(found, wants, strict=True):
                unit = 16 * UNIT_ROUNDOFF[dtype] + 400 * UNIT_ROUNDOFF[accumulator(dtype)]
                assert np.abs(got - want).max() <= unit * np.abs(want).max(), (dtype, moved)


# ---- attention


def test_scores_far_below_zero() -> None:
    """The largest is what counts, also where all are negative."""
    q, k = xt.full((1, 1, 3, 8), -10.0), xt.full((1, 1, 5, 8), 10.0)
    v = xt.rand(1, 1, 5, 8)
    for name in xt.attention_backends(xt.get_default_device()):
        out = F.scaled_dot_product_attention(q, k, v, backend=name)
        assert np.allclose(values(out), values(v).mean(2, keepdims=True), atol=1e-6), name


def test_scales_of_any_sign() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, 4, 6)) for _ in range(3))
    for scale in (-0.7, 0.0, 3.0):
        s = np.einsum("bhid,bhjd->bhij", q, k) * scale
        p = np.exp(s - s.max(-1, keepdims=True))
        want = (p / p.sum(-1, keepdims=True)) @ v
        for name in xt.attention_backends(xt.get_default_device()):
            got = F.scaled_dot_product_attention(xt.tensor(q), xt.tensor(k), xt.tensor(v), scale=scale, backend=name)
            assert np.allclose(values(got), want, atol=1e-12), (scale, name)


def test_nan_of_one_key_reaches_every_query_that_sees_it() -> None:
    q, k, v = (xt.rand(1, 1, 4, 8) for _ in range(3))
    k[0, 0, 2, 0] = nan
    for name in xt.attention_backends(xt.get_default_device()):
        seen = np.isnan(values(F.scaled_dot_product_attention(q, k, v, is_causal=True, backend=name))).any(-1)[0, 0]
        assert seen.tolist() == [False, False, True, True], name


# ---- optimizers


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_decay_is_one_product(name: str) -> None:
    """p *= 1 - lr * weight_decay, as PyTorch does it: without a gradient that is all that happens, to the bit."""
    x = np.random.default_rng(0).standard_normal(1000).astype(name)
    p = xt.nn.Parameter(xt.tensor(x))
    p.grad = xt.zeros(1000, dtype=getattr(xt, name))
    xt.optim.AdamW([p], lr=0.3, weight_decay=0.7).step()
    factor = np.dtype(name).type(1 - 0.3 * 0.7)
    assert np.array_equal(p.detach().cpu().numpy(), x * factor)


def test_a_norm_that_is_nan_multiplies_the_gradients_as_it_comes() -> None:
    grads = [xt.tensor([1.0, nan, 1.0]), xt.tensor([2.0])]
    assert np.isnan(_C.clip_grad_norm_(grads, 1.0).item()) and np.isnan([v for g in grads for v in g.tolist()]).all()


def test_an_empty_tensor_at_the_end_of_a_list() -> None:
    grads = [xt.full((5,), 2.0), xt.zeros(0)]
    assert abs(_C.clip_grad_norm_(grads, 1.0).item() - 20**0.5) < 1e-6
    assert np.allclose(values(grads[0]), 2 / 20**0.5, rtol=1e-5)
    copies = [xt.zeros(5), xt.zeros(0)]
    _C.foreach_copy_(copies, [xt.ones(5), xt.zeros(0)])
    assert copies[0].tolist() == [1.0] * 5


def test_positions_have_64_bits() -> None:
    """Beyond 2^32, and before 0, where a rotation turns the other way."""
    places = [0, 3, -3, 2**31 + 5, 2**32 + 3, -(2**33) - 1]
    x = np.random.default_rng(6).standard_normal((len(places), 2, 4))
    got = values(F.rope(xt.tensor(x), theta=100.0, positions=xt.tensor(places)))
    angles = np.array(places, float)[:, None] * 100.0 ** (-np.arange(2) / 2)
    c, s, a, b = np.cos(angles)[:, None], np.sin(angles)[:, None], x[..., :2], x[..., 2:]
    assert np.abs(got - np.concatenate([a * c - b * s, b * c + a * s], -1)).max() <= 1e-5
