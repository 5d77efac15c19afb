"""grad_check: right gradients pass, planted faults are named, for tensors and for plain NumPy functions."""

from __future__ import annotations

import numpy as np
import pytest

import xtrain as xt
from xtrain.testing import grad_check

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


# ---- random directions ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_projections(dtype):
    x = RNG(1).uniform(0.5, 2, (200, 100)).astype(dtype)
    calls = []

    def counted(values):
        calls.append(1)
        return cube(values)

    r = grad_check(counted, [x], grads=cube_gradient)
    assert r and r.checked == 32 and len(calls) == 64
    for wrong in (cube_gradient(x)[0] * 1.2, cube_gradient(x.T.reshape(x.shape))[0], np.zeros_like(x)):
        assert not grad_check(cube, [x], grads=[wrong])


def test_projections_find_the_element_at_fault():
    x = RNG(2).uniform(0.5, 2, (100, 100))
    wrong = 3 * x**2
    wrong[31, 77] *= 1.5
    calls = []
    r = grad_check(lambda v: calls.append(1) or cube(v), [x], grads=[wrong])
    assert not r and [f.index for f in r.failures] == [(31, 77)]
    assert r.worst.analytic == pytest.approx(1.5 * r.worst.numeric, rel=1e-6)
    assert len(calls) < 120


def test_projections_by_number():
    x = RNG(3).uniform(0.5, 2, 50)
    assert grad_check(cube, [x], grads=cube_gradient, projections=5).checked == 5
    assert grad_check(cube, [x], grads=cube_gradient, projections=500).checked == 50
    assert grad_check(cube, [x], grads=cube_gradient, projections=0).checked == 50
    big = xt.tensor(RNG(4).standard_normal((80, 80))).requires_grad_()
    assert grad_check(lambda a: a @ a, [big]).checked == 32


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
        (lambda: grad_check(lambda x: 3.0, [T]), TypeError, "fn must return a Tensor or a tuple of Tensors, got float"),
    ],
)  # fmt: skip
def test_bad_input(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_a_refused_function_leaves_the_gradient():
    x = xt.ones(3).requires_grad_()
    x.grad = xt.ones(3)
    with pytest.raises(ValueError):
        grad_check(lambda x: x.detach(), [x])
    assert x.grad.tolist() == [1, 1, 1]
