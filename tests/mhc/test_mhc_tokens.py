"""mhc_pre of many bfloat16 tokens, which a GPU may compute in one pass over x: against float64, again, and a part of the tokens alone.

Sizes: tokens that no tile divides; channels of one slice, two, several, and a last one of a few; too few tokens; streams of 2 and 4."""

from __future__ import annotations

import numpy as np
import pytest

import xtrain as xt
import xtrain.functional as F
from xtrain import _C
from xtrain.optable.table import array, bits, exact, tensor

SIZES = [(128, 8), (131, 24), (333, 72), (200, 264), (129, 1288), (160, 2560), (40, 264)]


def drawn(tokens: int, n: int, c: int, rms: float) -> list[np.ndarray]:
    """x, phi, alpha, bias, gamma: x as bfloat16 has it, the others as float32."""
    rng = np.random.default_rng([tokens, n, c])
    k, m = n * c, n * n + 2 * n
    return [
        exact(rng.standard_normal((tokens, n, c)) * rms, "bfloat16"),
        exact(rng.standard_normal((m, k)) / np.sqrt(k), "float32"),
        exact([1.1, 0.9, 1.05], "float32"),
        exact(rng.standard_normal(m) * 0.3, "float32"),
        exact(1 + 0.5 * rng.standard_normal((n, c)), "float32"),
    ]


def leaves_of(given: list[np.ndarray], gamma: bool, low: bool) -> list:
    dtypes = ["bfloat16"] + ["float32"] * 4 if low else ["float64"] * 5
    return [tensor(a, d).requires_grad_() for a, d in zip(given if gamma else given[:4], dtypes)]


@pytest.mark.parametrize("gamma", [True, False])
@pytest.mark.parametrize("n", [4, 2])
@pytest.mark.parametrize(("tokens", "c"), SIZES)
def test_many_tokens(tokens: int, c: int, n: int, gamma: bool) -> None:
    given = drawn(tokens, n, c, (0.1, 1.0, 4.0)[c % 3])
    check_against_float64(leaves_of(given, gamma, True), leaves_of(given, gamma, False))


def check_against_float64(leaves: list, exact_leaves: list) -> None:
    outs, wanted = F.mhc_pre(*leaves), F.mhc_pre(*exact_leaves)
    for name, out, want in zip(("h_in", "h_post", "h_res"), outs, wanted):
        got, ref = array(out), array(want)
        assert np.isfinite(got).all(), name
        rounding = 2.0**-8 * np.abs(ref) if name == "h_in" else 0.0
        assert (np.abs(got - ref) <= rounding + 4e-6 * np.abs(ref).max()).all(), name

    # What is saved for the backward: r, u and h_pre are in every gradient.
    dys = [np.random.default_rng(i).standard_normal(o.shape) for i, o in enumerate(wanted)]
    dys[0] = exact(dys[0], "bfloat16")
    _C.backward(list(outs), [tensor(d, o.dtype.name) for d, o in zip(dys, outs)], False)
    _C.backward(list(wanted), [tensor(d) for d in dys], False)
    for i, (leaf, want) in enumerate(zip(leaves, exact_leaves)):
        got, ref = array(leaf.grad), array(want.grad)
        rounding = 2.0**-8 * np.abs(ref) if i == 0 else 0.0
        assert (np.abs(got - ref) <= rounding + 1e-5 * np.abs(ref).max()).all(), f"gradient {i}"


@pytest.mark.parametrize("tokens", [40, 160])
@pytest.mark.parametrize("which", [0, 1, 4], ids=["x", "phi", "gamma"])
def test_an_argument_that_begins_at_any_element(which: int, tokens: int) -> None:
    given = drawn(tokens, 4, 72, 1.0)
    leaves, dtype = leaves_of(given, True, True), "float32" if which else "bfloat16"
    room = tensor(np.append(0.0, given[which].reshape(-1)), dtype)
    leaves[which] = room[1:].view(*given[which].shape).requires_grad_()
    assert leaves[which].data_ptr() % 16 == room.dtype.itemsize
    check_against_float64(leaves, leaves_of(given, True, False))


@pytest.mark.parametrize("tokens", [40, 160])
@pytest.mark.parametrize(
    "word", [0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF], ids=["inf", "-inf", "low nan", "nan"]
)
@pytest.mark.parametrize("column", [6, 7, 64, 159])
def test_a_weight_that_is_not_finite(column: int, word: int, tokens: int) -> None:
    """Infinite u, and gates that are full or empty; NaN only for NaN. Parts of phi may have other bits than phi."""
    phi = np.zeros((24, 160), np.float32)
    phi[:, column] = np.array([word], np.uint32).view(np.float32)
    sign = np.where(np.arange(tokens) % 3 == 1, -1.0, 1.0)
    x = np.broadcast_to(sign[:, None, None], (tokens, 4, 40))
    zeros = tensor(np.zeros(24), "float32")
    outs = F.mhc_pre(tensor(x, "bfloat16"), xt.tensor(phi), tensor(np.ones(3), "float32"), zeros, hc_eps=0.0)
    u = (sign * float(phi[0, column]))[:, None]
    gate = np.where(np.isnan(u), np.nan, u > 0)
    for out, want in zip(outs, (4 * sign[:, None] * gate, 2 * gate, u[..., None])):
        assert np.array_equal(array(out), np.broadcast_to(want, out.shape), equal_nan=True)


def test_dx_of_more_than_a_million_tokens() -> None:
    """Without phi it is half of dh_in."""
    tokens = 65535 * 16 + 40
    rng = np.random.default_rng(0)
    x, dy = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((tokens, 1, 1), (tokens, 1)))
    leaf = tensor(x, "float32").requires_grad_()
    h_in, _, _ = F.mhc_pre(leaf, *(tensor(np.zeros(s), "float32") for s in ((3, 1), (3,), (3,))), hc_eps=0.0)
    h_in.backward(tensor(dy, "float32"))
    assert np.array_equal(array(leaf.grad), dy[..., None] / 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_slope_of_a_gate_that_is_almost_full_or_empty(dtype: str) -> None:
    """Where a sigmoid s is 1 - 1e-9, s (1 - s) is 0 in float32."""
    bias = np.append([5.0, 10.0, 20.0, 60.0, -5.0, 15.0, 25.0, -40.0], np.zeros(16))
    x = tensor(np.ones((1, 4, 8)), dtype)
    leaf = tensor(bias, "float32").requires_grad_()
    zeros = [tensor(np.zeros(shape), "float32") for shape in ((24, 32), (3,))]
    h_in, h_post, _ = F.mhc_pre(x, *zeros, leaf)
    _C.backward([h_in, h_post], [tensor(np.ones((1, 8)), dtype), tensor(np.ones((1, 4)), "float32")], False)
    e = np.exp(-np.abs(bias[:8]))
    want = np.repeat([8.0, 2.0], 4) * e / (1 + e) ** 2
    assert np.abs(array(leaf.grad)[:8] / want - 1).max() <= 4e-6


@pytest.mark.parametrize("n", [4, 2])
@pytest.mark.parametrize(("tokens", "c"), [(333, 72), (450, 264), (300, 1288)])
def test_tokens_do_not_feel_each_other(tokens: int, c: int, n: int) -> None:
    """The same bits again, and beside a token that is not a number; the last tokens alone may be added up in another order."""
    given = drawn(tokens, n, c, 1.0)
    x, *rest = given
    parameters = [tensor(a, "float32") for a in rest]
    first = [array(o) for o in F.mhc_pre(tensor(x, "bfloat16"), *parameters)]
    for _ in range(5):
        assert [bits(o) for o in F.mhc_pre(tensor(x, "bfloat16"), *parameters)] == [a.tobytes() for a in first]
    start = tokens // 3 + 1
    for i, (out, whole) in enumerate(zip(F.mhc_pre(tensor(x[start:], "bfloat16"), *parameters), first)):
        limit = (2.0**-7 * np.abs(whole[start:]) if i == 0 else 0.0) + 4e-6 * np.abs(whole).max()
        assert (np.abs(array(out) - whole[start:]) <= limit).all()
    spoilt = x.copy()
    spoilt[start, 1, c // 2] = np.nan
    for out, whole in zip(F.mhc_pre(tensor(spoilt, "bfloat16"), *parameters), first):
        got = array(out)
        assert np.isnan(got[start]).any()
        assert (np.delete(got, start, 0) == np.delete(whole, start, 0)).all()


@pytest.mark.parametrize("tokens", [300, 513, 777])
def test_gradients_of_parameters_are_sums_over_all_tokens(tokens: int) -> None:
    """Of more tokens than one stretch of the sums has: those of the tokens in parts of at most 200."""
    n, c = 2, 8
    given = drawn(tokens, n, c, 1.0)
    dys = [np.random.default_rng(i).standard_normal((tokens, *shape)) for i, shape in enumerate(((c,), (n,), (n, n)))]

    def gradients(part: slice) -> list[np.ndarray]:
        leaves = [tensor(a, "float64").requires_grad_() for a in (given[0][part], *given[1:])]
        outs = F.mhc_pre(*leaves)
        _C.backward(list(outs), [tensor(d[part].reshape(o.shape), "float64") for d, o in zip(dys, outs)], False)
        return [array(leaf.grad) for leaf in leaves[1:]]

    whole = gradients(slice(None))
    parts = [gradients(slice(at, at + 200)) for at in range(0, tokens, 200)]
    for i, found in enumerate(whole):
        want = sum(part[i] for part in parts)
        assert np.abs(found - want).max() <= 1e-12 * np.abs(want).max(), f"gradient {i + 1}"


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("c", [1, 1024, 1025, 2060])
def test_the_way_back_of_many_channels(n: int, c: int) -> None:
    """mhc_post of small integers, exact in any order; two of the same streams, whose gradient is the sum of both."""
    rng = np.random.default_rng([n, c])

    def drawn_integers(*shape: int) -> np.ndarray:
        return rng.integers(-3, 4, shape).astype(np.float32)

    shapes = (3, n, c), (3, c), (3, n), (3, n, n)
    x = drawn_integers(*shapes[0])
    leaf = tensor(x, "float32").requires_grad_()
    outs, dys, sum_x = [], [], np.zeros_like(x)
    for _ in range(2):
        y, h, m, dy = (drawn_integers(*shape) for shape in (*shapes[1:], shapes[0]))
        others = [tensor(one, "float32").requires_grad_() for one in (y, h, m)]
        out = F.mhc_post(leaf, *others)
        assert (array(out) == m @ x + h[..., None] * y[:, None]).all()
        outs.append(out)
        dys.append(tensor(dy, "float32"))
        sum_x += m.transpose(0, 2, 1) @ dy
        out.backward(dys[-1], retain_graph=True)
        want = np.einsum("tn,tnc->tc", h, dy), np.einsum("tnc,tc->tn", dy, y), dy @ x.transpose(0, 2, 1)
        assert all((array(one.grad) == ref).all() for one, ref in zip(others, want))
    assert (array(leaf.grad) == sum_x).all()  # added to what a backward before has left
    leaf.grad = None
    _C.backward(outs, dys, False)
    assert (array(leaf.grad) == sum_x).all()


@pytest.mark.parametrize("c", [1, 512, 513, 1030])
def test_the_gradient_of_h_pre_is_of_all_channels(c: int) -> None:
    """Without phi the slope of each sigmoid is 1/4: the gradient of its bias is exact."""
    rng = np.random.default_rng(c)
    x, dy = (rng.integers(-3, 4, shape).astype(np.float64) for shape in ((5, 3, c), (5, c)))
    parameters = [tensor(np.zeros(shape)).requires_grad_() for shape in ((15, 3 * c), (3,), (15,))]
    h_in, _, _ = F.mhc_pre(tensor(x), *parameters)
    h_in.backward(tensor(dy))
    assert (array(parameters[2].grad)[:3] == np.einsum("tnc,tc->n", x, dy) / 4).all()
