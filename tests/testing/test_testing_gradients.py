"""grad_check: right gradients pass, planted faults are named, for tensors and for plain NumPy functions."""

from __future__ import annotations

import numpy as np
import pytest

import xtrain as xt
from xtrain.testing import grad_check

pytestmark = pytest.mark.on_cpu

RNG = np.random.default_rng


class Product(xt.Function):
    """x w, with a fault planted in the backward when `fault` says so."""

    fault = None

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dx, dw = dy @ w.T, x.T @ dy
        if Product.fault == "factor":
            dw = dw * 2
        elif Product.fault == "transposed":
            dx = dy @ w
        elif Product.fault == "element":
            dw = dw.clone()
            dw[2, 1] += 0.5
        elif Product.fault == "nan":
            dw = dw.clone()
            dw[0, 0] = float("nan")
        elif Product.fault == "missing":
            dw = None
        return dx, dw


@pytest.fixture
def fault():
    yield lambda name: setattr(Product, "fault", name)
    Product.fault = None


def operands(dtype, n=4):
    return [xt.tensor(RNG(i).standard_normal((n, n))).to(dtype).requires_grad_() for i in range(2)]


@pytest.mark.parametrize("dtype", [xt.float32, xt.float64], ids=lambda d: d.name)
def test_right_gradients_pass(dtype):
    inputs = operands(dtype)
    r = grad_check(Product.apply, inputs)
    assert r and r.ok and r.failures == [] and r.checked == 32
    assert r.max_rel == r.worst.relative <= (2e-2 if dtype == xt.float32 else 1e-7)
    assert grad_check(lambda x, w: (x * w).sin().sum(dim=0), inputs)
    assert grad_check(lambda x, w: (x.softmax(-1), x @ w), inputs)


@pytest.mark.parametrize("dtype", [xt.float32, xt.float64], ids=lambda d: d.name)
@pytest.mark.parametrize(
    ("name", "failures", "which"),
    [("factor", 16, 1), ("transposed", 16, 0), ("element", 1, 1), ("nan", 1, 1), ("missing", 16, 1)],
)
def test_planted_faults_are_rejected(fault, dtype, name, failures, which):
    fault(name)
    r = grad_check(Product.apply, operands(dtype))
    assert not r and not r.ok
    assert (
        0.6 * failures <= len(r.failures) <= failures
    )  # a transposed matrix is right where it happens to be symmetric
    assert {f.input for f in r.failures} == {which}
    assert r.worst == r.failures[0] and r.max_rel == r.worst.relative
    if name == "element":
        assert r.worst.index == (2, 1)
        assert r.worst.analytic - r.worst.numeric == pytest.approx(0.5, abs=1e-2)
        assert "input 1 at (2, 1): gradient " in str(r)
    if name == "nan":
        assert r.worst.index == (0, 0) and np.isnan(r.worst.analytic) and r.max_rel == np.inf
    if name == "factor":
        assert r.worst.analytic == pytest.approx(2 * r.worst.numeric, rel=5e-2)


def test_inputs_come_back_as_they_were():
    x, w = operands(xt.float32)
    x.grad = xt.ones(4, 4)
    before = [x.tolist(), w.tolist()]
    grad_check(Product.apply, [x, w])
    assert [x.tolist(), w.tolist()] == before
    assert x.grad.tolist() == xt.ones(4, 4).tolist() and w.grad is None

    def broken(a, b):
        if not xt.is_grad_enabled():
            raise RuntimeError("in the middle")
        return a @ b

    with pytest.raises(RuntimeError, match="in the middle"):
        grad_check(broken, [x, w])
    assert [x.tolist(), w.tolist()] == before


def test_values_read_from_outside_the_arguments():
    """A model's parameters: fn need not take them."""
    layer = xt.nn.Linear(3, 2).double()
    data = xt.tensor(RNG(0).standard_normal((5, 3)))
    assert grad_check(lambda *_: layer(data).sin(), list(layer.parameters()))


# ---- NumPy ----------------------------------------------------------------------------------------------------------------------------


def cube(x):
    return float((x.astype(np.float64) ** 3).sum())


def cube_gradient(x):
    return [3 * x**2]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_any_callable(dtype):
    x = RNG(0).uniform(0.5, 2, (5, 6)).astype(dtype)
    assert grad_check(cube, [x], grads=cube_gradient)
    assert grad_check(cube, [x], grads=cube_gradient(x))
    r = grad_check(cube, [x], grads=[2 * x**2])
    assert len(r.failures) == 30 and r.worst.relative == pytest.approx(0.2, abs=0.01)
    wrong = 3 * x**2
    wrong[4, 1] *= 1.1
    assert [f.index for f in grad_check(cube, [x], grads=[wrong]).failures] == [(4, 1)]
    assert grad_check(lambda a, b: float((a * b).sum()), [x, x.copy()], grads=[None, x])


def test_options():
    x = np.full(3, 10.0)
    assert not grad_check(cube, [x], grads=cube_gradient, eps=5.0)  # truncation: the step is as large as the number
    assert grad_check(cube, [x], grads=cube_gradient, eps=5.0, rtol=2.0)
    assert grad_check(cube, [x], grads=[300 + np.zeros(3) + 1e-3], rtol=1e-5)
    assert not grad_check(cube, [x], grads=[300 + np.zeros(3) + 1e-3])


# ---- blocks -------------------------------------------------------------------------------------------------------------------------

BIG = (300, 400)


class Rows(xt.Function):
    """x w for a fixed w; `spoil` changes the gradient of x, an array."""

    spoil = None
    weight = RNG(7).standard_normal((400, 8))

    @staticmethod
    def forward(ctx, x):
        ctx.dtype = x.dtype
        return x @ xt.tensor(Rows.weight).to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        dx = dy @ xt.tensor(Rows.weight).to(ctx.dtype).T
        return dx if Rows.spoil is None else xt.tensor(np.ascontiguousarray(Rows.spoil(dx.numpy().copy())))


@pytest.fixture
def spoil():
    yield lambda change: setattr(Rows, "spoil", change)
    Rows.spoil = None


def typical_element(g, seed):
    """An element whose gradient has about the root mean square size."""
    picks = RNG(seed).integers(0, g.size, 100)
    size = np.abs(g.reshape(-1)[picks])
    return np.unravel_index(picks[np.argmin(np.abs(size - np.sqrt((g.astype(np.float64) ** 2).mean())))], g.shape)


def big_input(dtype, seed=0):
    return xt.tensor(RNG(seed).standard_normal(BIG)).to(dtype).requires_grad_()


@pytest.mark.parametrize("factor", [2.0, -1.0, 0.0])
@pytest.mark.parametrize("seed", range(4))
def test_one_wrong_element_among_120_000(spoil, factor, seed):
    """In float32, a typical element that is wrong by a factor of 2, a sign or altogether is found and named."""
    place, calls = [], []

    def one(g):
        place.append(tuple(map(int, typical_element(g, seed))))
        g[place[-1]] *= factor
        return g

    spoil(one)
    r = grad_check(lambda x: calls.append(1) or Rows.apply(x), [big_input(xt.float32, seed)], seed=seed)
    assert not r and [f.index for f in r.failures] == place[:1] and r.worst.size == 1
    assert r.worst.analytic == pytest.approx(factor * r.worst.numeric, abs=0.5 * abs(r.worst.numeric))
    assert len(calls) <= 501


@pytest.mark.parametrize(
    "change", [lambda g: g * 1.1, lambda g: g.reshape(400, 300).T, lambda g: 0 * g, lambda g: g[::-1]]
)
def test_many_wrong_elements_among_120_000(spoil, change):
    calls = []
    spoil(change)
    r = grad_check(lambda x: calls.append(1) or Rows.apply(x), [big_input(xt.float32)])
    assert not r and len(r.failures) > 20 and len(calls) <= 501
    assert all(f.relative > 2e-2 for f in r.failures)


def test_right_gradients_in_blocks_raise_no_alarm():
    for seed in range(20):
        r = grad_check(Rows.apply, [big_input(xt.float32, seed)], seed=seed)
        assert r, f"seed {seed}: {r}"
        assert r.blocks and r.resolution < r.typical


def relu(x):
    return x.relu()


@pytest.mark.parametrize(
    "fn", [xt.sin, relu, lambda x: x.softmax(-1), lambda x: (x * x).sum(), lambda x: x.exp().mean()]
)
def test_no_alarm_for_kinks_curvature_and_float32_sums(fn):
    for seed in range(2):
        x = xt.tensor(RNG(seed).standard_normal((100, 120))).to(xt.float32).requires_grad_()
        r = grad_check(fn, [x], seed=seed)
        assert r, f"seed {seed}: {r}"


@pytest.mark.parametrize("dtype", [xt.float32, xt.float64], ids=lambda d: d.name)
def test_resolution_is_what_is_found(spoil, dtype):
    """An element that is off by a little more than the result says is found wherever it is."""
    told = grad_check(Rows.apply, [big_input(dtype)])
    assert f"off by {told.resolution:.3g}" in str(told)
    for seed in range(8):
        place = tuple(RNG(seed).integers(0, BIG).tolist())

        def off(g, place=place, seed=seed):
            g[place] += (1.1 if seed % 2 else -1.1) * told.resolution
            return g

        spoil(off)
        r = grad_check(Rows.apply, [big_input(dtype)], seed=seed)
        assert not r and r.worst.index == place


def test_float64_is_far_tighter(spoil):
    def one(g):
        g[17, 3] *= 1 + 1e-4
        return g

    spoil(one)
    r = grad_check(Rows.apply, [big_input(xt.float64)])
    assert [f.index for f in r.failures] == [(17, 3)]
    assert r.resolution < 2e-5 * r.typical


def test_a_sum_in_float32_says_how_little_it_sees():
    """The mean of 120,000 elements in float32 cannot show one of them, and the result admits it."""
    r = grad_check(lambda x: x.exp().mean(), [big_input(xt.float32)])
    assert r.resolution > r.typical
    few = grad_check(lambda x: x.sum() + 1e4, [xt.ones(4).requires_grad_()])  # u 1e4 / eps: no digit is left
    assert few and few.resolution > few.typical == pytest.approx(1, rel=0.6)
    assert "surely found" in str(few) and "surely found" not in str(grad_check(xt.exp, [xt.ones(4).requires_grad_()]))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_blocks_of_numpy(dtype):
    x = RNG(1).uniform(0.5, 2, (200, 100)).astype(dtype)
    calls = []

    def counted(values):
        calls.append(1)
        return cube(values)

    r = grad_check(counted, [x], grads=cube_gradient)
    assert r and r.checked == 48 and len(calls) <= 350
    for wrong in (cube_gradient(x)[0] * 1.2, cube_gradient(x.T.reshape(x.shape))[0], np.zeros_like(x)):
        assert not grad_check(cube, [x], grads=[wrong])


def test_several_elements_at_fault():
    x = RNG(2).uniform(0.5, 2, (100, 100))
    wrong = 3 * x**2
    wrong[31, 77] *= 1.5
    wrong[80, 2] *= -1
    calls = []
    r = grad_check(lambda v: calls.append(1) or cube(v), [x], grads=[wrong])
    assert not r and sorted(f.index for f in r.failures) == [(31, 77), (80, 2)]
    assert {f.index: f.analytic / f.numeric for f in r.failures}[31, 77] == pytest.approx(1.5, rel=1e-6)
    assert len(calls) <= 501


def test_blocks_by_number():
    x = RNG(3).uniform(0.5, 2, 50)
    assert 5 < grad_check(cube, [x], grads=cube_gradient, projections=5).checked <= 5 + 16
    assert grad_check(cube, [x], grads=cube_gradient, projections=500).checked == 50
    assert grad_check(cube, [x], grads=cube_gradient, projections=0).checked == 50
    big = xt.tensor(RNG(4).standard_normal((80, 80))).requires_grad_()
    assert grad_check(lambda a: a @ a, [big]).checked == 48


def test_poles_and_given_steps():
    """A long step would leave the logarithm's domain; a given eps is the step that is taken."""
    x = np.concatenate([np.full(10, 1e-3), RNG(5).uniform(1, 2, 6000)]).astype(np.float32)
    assert grad_check(lambda v: float(np.log(v.astype(np.float64)).sum()), [x], grads=[1 / x], eps=1e-5)
    seen = []
    grad_check(lambda v: seen.append(np.abs(v - x).max()) or cube(v), [x], grads=cube_gradient, eps=1e-2)
    assert max(seen) == pytest.approx(6e-2, rel=1e-2)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("many", [3, 5000])
def test_what_is_not_finite_is_a_failure(many):
    x = RNG(6).uniform(0.5, 2, many)
    right = 3 * x**2
    for values, grads in (
        (x, right * np.nan),
        (x * np.nan, right),
        (x * 1e200, right),
        (x, np.where(np.arange(many) == 1, np.inf, right)),
    ):
        r = grad_check(cube, [values], grads=[grads])
        assert not r and r.max_rel == np.inf
        str(r)
    assert [f.index for f in r.failures] == [(1,)]
    assert not grad_check(lambda v: float("nan"), [x], grads=[right])
    assert not grad_check(cube, [x], grads=[right], eps=1e-320)  # no step at all
    assert grad_check(lambda v: 1.0, [x], grads=[0 * x])
    assert not grad_check(lambda v: 1.0, [x], grads=[right])


# ---- bad input ------------------------------------------------------------------------------------------------------------------------

X = np.ones(3)
T = xt.ones(3).requires_grad_()


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: grad_check(cube, [X]), ValueError, "grad_check: grads must be given for inputs that are not Tensors"),
        (lambda: grad_check(cube, [X], grads=[X, X]), ValueError, "grads must have 1 entries like inputs, got 2"),
        (lambda: grad_check(cube, [X], grads=[np.ones(4)]), ValueError, r"gradient 0 must have shape \(3,\), got \(4,\)"),
        (lambda: grad_check(cube, [X.astype(int)], grads=[X]), TypeError, "input 0 must be float32 or float64, got int64"),
        (lambda: grad_check(cube, [np.ones((0, 2))], grads=[np.ones((0, 2))]), ValueError, r"input 0 must not be empty, got shape \(0, 2\)"),
        (lambda: grad_check(cube, [X], grads=[None]), ValueError, "grads must hold an array, got none"),
        (lambda: grad_check(cube, [], grads=[]), ValueError, "grads must hold an array, got none"),
        (lambda: grad_check(lambda x: x, [X], grads=[X]), ValueError, r"fn must return one number, got shape \(3,\)"),
        (lambda: grad_check(cube, [[1.0]], grads=[X]), TypeError, "input 0 must be a Tensor or an array, got list"),
        (lambda: grad_check(cube, [X], grads=[X], eps=0.0), ValueError, "eps must be positive and finite, got 0.0"),
        (lambda: grad_check(cube, [X], grads=[X], projections=-1), ValueError, "projections must be None or an int of at least 0, got -1"),
        (lambda: grad_check(xt.exp, [xt.ones(3)]), ValueError, "inputs must hold a tensor with requires_grad, got none"),
        (lambda: grad_check(xt.exp, [xt.ones(3).bfloat16().requires_grad_()]), TypeError, "input 0 must be float32 or float64, got bfloat16"),
        (lambda: grad_check(xt.exp, [T * 2]), ValueError, "input 0 must be a leaf, got the result of mul"),
        (lambda: grad_check(xt.exp, [xt.empty(0).requires_grad_()]), ValueError, r"input 0 must not be empty, got shape \(0,\)"),
        (lambda: grad_check(xt.exp, [T], grads=[T]), ValueError, "grads must be None for Tensors"),
        (lambda: grad_check(lambda x: x.detach(), [T]), ValueError, "fn must return a tensor that depends on the inputs"),
        (lambda: grad_check(cube, [X], grads=[X + 1j]), TypeError, "gradient 0 must hold real numbers, got complex128"),
        (lambda: grad_check(lambda x: None, [X], grads=[X]), TypeError, "fn must return one number, got None"),
        (lambda: grad_check(cube, [X], grads=[X], eps="a"), ValueError, "eps must be positive and finite, got 'a'"),
        (lambda: grad_check(xt.mul, [T, T]), ValueError, "inputs must be different tensors, got one of them twice"),
        (lambda: grad_check(None, [X], grads=[X]), TypeError, "fn must be callable, got NoneType"),
        (lambda: grad_check(cube, X, grads=[X]), TypeError, "inputs must be a list of Tensors or arrays, got ndarray"),
        (lambda: grad_check(cube, [X], grads=5), TypeError, "grads must be a list of arrays, got int"),
        (lambda: grad_check(cube, [X], grads=[[1, [2], 3]]), ValueError, r"gradient 0 must have shape \(3,\), got rows of different"),
        (lambda: grad_check(lambda x: "3", [X], grads=[X]), TypeError, "fn must return one number, got str"),
        (lambda: grad_check(cube, [X], grads=[X], seed="a"), ValueError, "seed must be an int of at least 0, got 'a'"),
        (lambda: grad_check(lambda x: x[:0], [T]), ValueError, r"fn must return elements, got shape \(0,\)"),
        (lambda: grad_check(lambda x: 3.0, [T]), TypeError, "fn must return a Tensor or a tuple of Tensors, got float"),
    ],
)  # fmt: skip
def test_bad_input(call, error, match):
    with pytest.raises(error, match=match):
        call()


@pytest.mark.parametrize("projections", [None, 1])
def test_a_tensor_without_dimensions(projections) -> None:
    x, y = (xt.tensor(v, dtype=xt.float64).requires_grad_() for v in (2.0, 3.0))
    for fn in (lambda x, y: x * x * y, lambda x, y: (x * y.reshape(1, 1), y.exp())):
        assert grad_check(fn, [x, y], projections=projections).checked >= 2
    assert (x.item(), y.item(), x.shape, x.grad) == (2.0, 3.0, (), None)
    wrong = grad_check(lambda x, y: x * x.detach() * y, [x, y], projections=projections)
    assert not wrong and (wrong.worst.input, wrong.worst.index) == (0, ())


def test_a_refused_function_leaves_the_gradient():
    x = xt.ones(3).requires_grad_()
    x.grad = xt.ones(3)
    with pytest.raises(ValueError):
        grad_check(lambda x: x.detach(), [x])
    assert x.grad.tolist() == [1, 1, 1]


def test_inside_no_grad_is_one_sentence() -> None:
    x = xt.randn(3, dtype=xt.float64).requires_grad_()
    with xt.no_grad():
        with pytest.raises(RuntimeError, match=r"^grad_check: gradients of Tensors must be recorded, .* no_grad\(\)"):
            grad_check(lambda x: x * x, [x])
        assert grad_check(lambda x: float((x * x).sum()), [np.ones(3)], grads=[np.full(3, 2.0)])
    assert grad_check(lambda x: x * x, [x])


def test_more_than_ten_failures_are_counted() -> None:
    x = RNG(4).uniform(0.5, 2, 11)
    text = str(grad_check(cube, [x], grads=[-3 * x**2]))
    assert text.startswith("11 of 11 gradients") and text.endswith("and 1 more")
    assert "more" not in str(grad_check(cube, [x[:10]], grads=[-3 * x[:10] ** 2])).splitlines()[-1]


def test_the_resolution_is_that_of_the_input_that_is_seen_worst() -> None:
    small, large = (xt.ones(4, dtype=xt.float64, requires_grad=True) for _ in range(2))
    for inputs, fn in (
        ([small, large], lambda s, t: (s * 1e-3 + t).sum()),
        ([large, small], lambda t, s: (s * 1e-3 + t).sum()),
    ):
        assert grad_check(fn, inputs).typical < 0.1


def test_values_come_back_after_an_error_at_any_call() -> None:
    x = xt.ones(3, requires_grad=True)
    calls = []

    def broken(a):
        calls.append(a.tolist())
        if len({tuple(call) for call in calls}) > 1:
            raise RuntimeError("in the middle")
        return a * 2

    with pytest.raises(RuntimeError, match="in the middle"):
        grad_check(broken, [x])
    assert x.tolist() == [1.0] * 3 != calls[-1]
