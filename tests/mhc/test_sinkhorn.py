"""Sinkhorn at the ends of the formats: logits far apart, elements that vanish between stages, many iterations."""

from __future__ import annotations

import numpy as np
import pytest
from arrays import f64

import xtrain.functional as F
from xtrain.optable.table import array, tensor


@pytest.mark.parametrize("eps", [1e-6, 0.0, 1e-40])
@pytest.mark.parametrize("form", ["P", "D"])
def test_huge_logits(form: str, eps: float) -> None:
    """Differences that overflow the format count as infinite: the winners share, and a row nobody wants is left empty."""
    unwanted = np.zeros((4, 4))
    unwanted[2] = -200
    # One entry of the row left, which exp and the column's sum make the least that a format can tell, or less.
    least = np.zeros((8, 8))
    least[2] = -1e5
    last = {"float32": -86.9, "float64": -708.3}
    for z in (
        np.diag([1e4] * 4),
        np.full((4, 4), 1e30),
        np.full((4, 4), -1e30),
        f64(4, 4, scale=1e6),
        f64(4, 4, scale=200),
        f64(500, 4, 4, scale=60),
        f64(500, 3, 3, scale=400),
        f64(500, 8, 8, scale=100),
        unwanted if form == "P" else unwanted.T.copy(),
        least,
    ):
        for dtype in ("float32", "float64"):
            if z is least:
                least[2, 5] = last[dtype]
            logits = tensor(z.T.copy() if z is least and form == "D" else z, dtype).requires_grad_()
            a = F.sinkhorn(logits, form=form, eps=eps)
            a.backward(tensor(f64(*z.shape), dtype))
            assert np.isfinite(array(a)).all() and np.isfinite(array(logits.grad)).all()
            assert (array(a) >= 0).all() and (array(a) <= 1 + 1e-6).all()
    assert np.allclose(array(F.sinkhorn(tensor(np.diag([1e4] * 4), "float32"), form=form)), np.eye(4), atol=3e-6)
    assert np.allclose(array(F.sinkhorn(tensor(np.full((4, 4), 1e30), "float32"), form=form)), 0.25, atol=2e-6)
    empty = array(F.sinkhorn(tensor(unwanted if form == "P" else unwanted.T.copy(), "float32"), form=form, eps=0.0))
    if form == "D":
        empty = empty.T
    assert (empty[2] == 0).all() and np.allclose(np.delete(empty, 2, 0).sum(-1), 1)


@pytest.mark.parametrize("form", ["P", "D"])
def test_what_would_be_subnormal_is_0(form: str) -> None:
    """Eight numbers as small as that, exp(-88) say, add up to a normal one: divided by it, they would share as others do. The least
    that counts is 2^-125.5."""
    for n in (2, 4, 8):
        for low in (-87.2, -88.0, -95.0, -103.0, -104.0):
            z = np.zeros((n, n), np.float32)
            z[1] = low
            out = array(F.sinkhorn(tensor(z if form == "P" else z.T.copy(), "float32"), iters=3, eps=0.0, form=form))
            assert ((out if form == "P" else out.T)[1] == 0).all(), (n, low)


def test_a_divisor_is_inverted_to_its_last_bit() -> None:
    """A matrix of one element: the two stages divide 1 by 1 + eps, and y by y + eps. Another eps gives other divisors."""
    zero, one = tensor(np.zeros((1, 1, 1)), "float32"), np.float32(1)
    for eps in np.linspace(0.001, 0.999, 500, dtype=np.float32):
        y = one / (one + eps)
        want = y * (one / (y + eps))  # a product with the inverse, rounded as the inverse is
        assert F.sinkhorn(zero, iters=1, eps=float(eps)).item() == want, eps


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("n", "deviation", "iters", "options"),
    [
        (4, 50, 100, {}),
        (4, 100, 1000, {}),
        (7, 50, 300, {"eps": 0.0}),
        (8, 100, 300, {"eps": 0.0, "transpose": True}),
        (7, 1000, 200, {"eps": 0.0, "form": "D"}),
        (4, 2000, 1000, {}),
    ],
)
def test_elements_that_vanish_on_the_way_spoil_no_gradient(
    n: int, deviation: float, iters: int, options: dict, dtype: str
) -> None:
    """Going back through the stages, an element of which only some last digits were left would come out too large, and the gradient
    would grow at every stage, to 1e5 and to NaN. Where nothing is lost it is no larger than that of M."""
    slow = [[-34.0, -21, 89, 137], [-68, -4, -92, 13], [-46, 26, -66, -27], [-60, 87, -65, 7]]
    logits = f64(3000, n, n, scale=deviation)
    if n == 4:
        logits[0] = slow
    d = f64(3000, n, n)
    z = tensor(logits, dtype).requires_grad_()
    F.sinkhorn(z, iters=iters, **options).backward(tensor(d, dtype))
    found = array(z.grad)
    assert np.isfinite(found).all() and np.abs(found).max() <= np.abs(d).max()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("n", "iters"), [(4, 100), (7, 40), (8, 100)])
def test_a_matrix_that_is_done_again_has_its_gradient(n: int, iters: int, dtype: str) -> None:
    """Some elements of a few matrices are too small to come back on the way back, but not so small that the next wider format, which
    loses nothing, has another gradient."""
    reach, tolerance, wider = {"float32": (43, 5e-6, np.float64), "float64": (350, 1e-12, np.longdouble)}[dtype]
    rng = np.random.default_rng(n)
    z, d = rng.uniform(-reach, reach, (1000, n, n)), f64(1000, n, n)
    z, d = z.astype(dtype), d.astype(dtype)
    logits = tensor(z, dtype).requires_grad_()
    F.sinkhorn(logits, iters=iters, eps=0.0).backward(tensor(d, dtype))
    assert np.abs(array(logits.grad) - gradient_of_p(z.astype(wider), d.astype(wider), iters)).max() <= tolerance


def gradient_of_p(z: np.ndarray, d: np.ndarray, iters: int) -> np.ndarray:
    """That of form P without eps, from what every stage gave."""
    y = np.exp(z - z.max(-2, keepdims=True))
    stages = []
    for s in range(2 * iters):
        y = y / y.sum(-1 if s % 2 else -2, keepdims=True)
        stages.append(y)
    e = d * y
    for s in range(2 * iters)[::-1]:
        e = e - stages[s] * e.sum(-1 if s % 2 else -2, keepdims=True)
    return e


@pytest.mark.parametrize(
    ("n", "deviation", "iters", "dtype"), [(4, 50, 100, "float32"), (8, 100, 100, "float32"), (4, 2000, 300, "float64")]
)
def test_a_matrix_that_is_done_again_does_not_depend_on_the_neighbours(
    n: int, deviation: float, iters: int, dtype: str
) -> None:
    z, d, found = f64(3000, n, n, scale=deviation), f64(3000, n, n), []
    for every in (1, 13):
        logits = tensor(z[::every].copy(), dtype).requires_grad_()
        F.sinkhorn(logits, iters=iters).backward(tensor(d[::every].copy(), dtype))
        found.append(array(logits.grad))
    assert np.array_equal(found[0][::13], found[1])


SMALL = pytest.mark.parametrize(
    ("form", "eps", "iters"), [("P", 1e-6, 20), ("P", 1e-6, 100), ("P", 0.0, 20), ("P", 0.0, 100), ("D", 0.0, 100)]
)


def small_rows(dtype: str, form: str, eps: float, iters: int, neighbours: bool) -> np.ndarray:
    """Gradients of matrices with two rows (D: columns) of elements that are subnormal after columns (D: rows) have been divided for the
    first time, and normal after the next division."""
    z, d = f64(300, 4, 4, scale=50), f64(300, 4, 4)
    z[::16] = [[0.0] * 4, [0.0] * 4, [-86.9, -86.7, -86.8, -86.75], [-86.7, -86.9, -86.75, -86.8]]
    z, d = (z, d) if neighbours else (z[::16].copy(), d[::16].copy())
    if form == "D":
        z, d = z.swapaxes(1, 2).copy(), d.swapaxes(1, 2).copy()
    logits = tensor(z, dtype).requires_grad_()
    F.sinkhorn(logits, iters=iters, eps=eps, form=form).backward(tensor(d, dtype))
    found = array(logits.grad)[::16] if neighbours else array(logits.grad)
    return found if form == "P" else found.swapaxes(1, 2)


@SMALL
def test_a_gradient_does_not_depend_on_the_neighbours(form: str, eps: float, iters: int) -> None:
    assert np.array_equal(*(small_rows("float32", form, eps, iters, neighbours) for neighbours in (True, False)))


@SMALL
def test_a_row_that_is_small_and_recovers_has_its_gradient(form: str, eps: float, iters: int) -> None:
    found, wide = (small_rows(dtype, form, eps, iters, False) for dtype in ("float32", "float64"))
    assert np.abs(found - wide).max() <= 1e-4 and np.abs(wide[:, 2]).min() > 1e-4


def test_many_iterations_do_not_depend_on_the_batch() -> None:
    """The most that are allowed, where a GPU works on few matrices at a time."""
    z, dout = f64(70, 4, 4), f64(70, 4, 4, seed=1)
    found = []
    for part in (slice(0, 70), slice(68, 70)):
        logits = tensor(z[part], "float32").requires_grad_()
        out = F.sinkhorn(logits, iters=100000)
        out.backward(tensor(dout[part], "float32"))
        found.append([array(t)[-2:] for t in (out, logits.grad)])
        assert np.isfinite(array(logits.grad)).all()
    assert all(np.array_equal(a, b) for a, b in zip(*found))


def test_the_first_of_equal_maxima_is_the_shift() -> None:
    """The gradient is that of logits whose first one is larger by next to nothing."""
    found = []
    for more in (0.0, 1e-9):
        z = np.zeros((1, 3, 3))
        z[0, 0] = more
        leaf = tensor(z).requires_grad_()
        F.sinkhorn(leaf, iters=2, eps=0.3, form="P").backward(tensor(np.arange(9.0).reshape(1, 3, 3)))
        found.append(array(leaf.grad))
    assert np.abs(found[0] - found[1]).max() <= 1e-7


@pytest.mark.parametrize("form", ["P", "D"])
def test_a_bad_logit_spoils_all_of_its_matrix(form: str) -> None:
    z = np.random.default_rng(3).standard_normal((3, 4, 4))
    z[0, 1], z[1, 1, 3] = -1000.0, np.nan  # beside a row that vanishes
    out = array(F.sinkhorn(tensor(z), iters=1, eps=0.0, form=form))
    assert np.isnan(out[1]).all() and np.isfinite(out[[0, 2]]).all()
