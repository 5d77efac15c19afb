"""fill: what each kind holds, in every dtype and any strides, and that a seed fixes it."""

from __future__ import annotations

import numpy as np
import pytest

import xtrain as xt
from xtrain import _C
from xtrain.testing import fill

pytestmark = pytest.mark.on_cpu

INTEGERS = [397, 114, 203, 587]  # of seed 7 in [0, 1000)
DTYPES = [xt.float64, xt.float32, xt.bfloat16, xt.float16, xt.int64, xt.int32, xt.uint8]


def values(t):
    return t.to(xt.float64).numpy()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 4), (6,), (), (0, 3)], ids=str)
def test_patterns(dtype, shape):
    def made(kind, **options):
        t = _C.full(shape, 77, dtype)
        assert fill(t, kind, **options) is t
        return values(t)

    grid = np.indices(shape)
    assert (made("zero") == 0).all() and (made("constant", value=3) == 3).all()
    assert (made("sequential") == np.arange(grid[0].size if shape else 1).reshape(shape)).all()
    assert (made("sequential", start=2, step=3) == 2 + 3 * np.arange(np.prod(shape, dtype=int)).reshape(shape)).all()
    assert (made("checkerboard", value=5, other=2) == np.where(sum(grid, np.zeros(shape, int)) % 2 == 0, 5, 2)).all()
    if len(shape) >= 2:
        assert (made("diagonal", value=4) == np.where(grid[-1] == grid[-2], 4, 0)).all()


@pytest.mark.parametrize("dtype", DTYPES[:4], ids=lambda d: d.name)
def test_random_numbers(dtype):
    u, n = (
        values(fill(_C.empty((300, 100), dtype), "uniform", 3, low=-2.0, high=5.0)),
        values(fill(_C.empty((300, 100), dtype), "normal", 3, mean=1.0, std=2.0)),
    )
    assert u.min() >= -2 and u.max() < 5 and abs(u.mean() - 1.5) < 0.05
    assert abs(n.mean() - 1) < 0.05 and abs(n.std() - 2) < 0.05
    half = fill(_C.empty((4,), dtype), "sequential", start=0.5, step=0.25)
    assert half.to(xt.float64).tolist() == [0.5, 0.75, 1.0, 1.25]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_random_integers(dtype):
    low = 0 if dtype == xt.uint8 else -3
    v = values(fill(_C.empty((2000,), dtype), "uniform_int", 5, low=low, high=4))
    assert set(v) == set(range(low, 4))
    assert len(set(values(fill(_C.empty((100,), xt.int64), "uniform_int", 1, low=-(2**40), high=2**40)))) == 100


@pytest.mark.parametrize("kind", ["uniform", "uniform_int", "normal"])
def test_seed(kind):
    a, b, c = (values(fill(xt.empty(50, 20), kind, seed)) for seed in (1, 1, 2))
    assert (a == b).all() and (a != c).any()
    strided = fill(xt.empty(20, 50).T, kind, 1)
    assert (values(strided) == a).all()


def test_values_are_fixed_for_ever():
    """The same on every device and in every release: these are Philox's numbers for seed 7."""
    assert fill(xt.empty(4, dtype=xt.int64), "uniform_int", 7, low=0, high=1000).tolist() == INTEGERS
    first = fill(xt.empty(3), "uniform", 7, low=0.0, high=1.0).tolist()
    before = _C.get_rng_state()
    _C.set_rng_state((7, 0))
    assert _C.uniform((3,), 0.0, 1.0, xt.float32).tolist() == first
    _C.set_rng_state(before)


def test_the_default_generator_is_left_alone():
    xt.manual_seed(11)
    want = xt.rand(5).tolist()
    xt.manual_seed(11)
    fill(xt.empty(100), "normal", 4)
    assert xt.rand(5).tolist() == want
    state = _C.get_rng_state()
    with pytest.raises(ValueError):
        fill(xt.empty(3), "uniform", low=2.0, high=1.0)
    assert _C.get_rng_state() == state


def test_parameters_may_be_filled():
    p = xt.ones(3, 3).requires_grad_()
    fill(p, "diagonal")
    assert p.tolist() == np.eye(3).tolist() and p.is_leaf and p.grad is None


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: fill(xt.empty(2), "noise"), ValueError, "fill: kind must be one of uniform, .*, got 'noise'"),
        (lambda: fill([1.0], "zero"), TypeError, "fill: tensor must be a Tensor, got list"),
        (lambda: fill(xt.empty(2), "normal", low=1), ValueError, "fill: options of normal must be of mean, std, got low"),
        (lambda: fill(xt.empty(2), "zero", value=1), ValueError, "fill: options of zero must be of nothing, got value"),
        (lambda: fill(xt.empty(2), "constant", value=float("nan")), ValueError, "fill: value must be a finite number, got nan"),
        (lambda: fill(xt.arange(3), "uniform"), TypeError, "fill: tensor must be floating point for uniform, got int64"),
        (lambda: fill(xt.arange(3), "constant", value=0.5), ValueError, "value must be a whole number for constant in int64, got 0.5"),
        (lambda: fill(xt.empty(3), "diagonal"), ValueError, r"at least 2 dims for diagonal, got shape \(3,\)"),
        (lambda: fill(xt.empty(2), "normal", "a"), TypeError, "fill: seed must be an int, got str"),
        (lambda: fill(xt.empty(2), "normal", -1), ValueError, "fill: seed must be at least 0, got -1"),
        (lambda: fill(xt.empty(2), "uniform_int", low=3, high=3), ValueError, "randint: low must be below high"),
        (lambda: fill(xt.empty(2).to(xt.uint8), "uniform_int"), ValueError, r"fill: uniform_int must stay in \[0, 255\] for uint8, got -5"),
        (lambda: fill(xt.empty(300).to(xt.uint8), "sequential"), ValueError, r"fill: sequential must stay in \[0, 255\] for uint8, got 299"),
        (lambda: fill(xt.empty(2).half(), "constant", value=1e9), ValueError, "fill: constant must stay in .* for float16, got 1000000000.0"),
        (lambda: fill(xt.empty(2), "constant", value=10**400), ValueError, "fill: value must be a finite number"),
        (lambda: fill(xt.empty(2), "normal", std=-1.0), ValueError, "normal: std must be at least 0"),
    ],
)  # fmt: skip
def test_bad_input(call, error, match):
    with pytest.raises(error, match=match):
        call()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (dict(seed=2**70), "fill: seed must fit in 64 bits, got 1180591620717411303424"),
        (dict(low=-3e38, high=3e38), r"fill: uniform must stay in .* for float32, got 6e\+38"),
    ],
)
def test_what_the_generator_cannot_hold(options, match):
    with pytest.raises(ValueError, match=match):
        fill(xt.empty(3), "uniform", **options)


def test_a_seed_is_no_bool_and_whole_numbers_are_whole() -> None:
    for kind in ("uniform", "uniform_int"):
        with pytest.raises(TypeError, match="fill: seed must be an int, got bool"):
            fill(xt.zeros(2), kind, True)
    with pytest.raises(ValueError, match=r"fill: low must be a whole number for uniform_int in float32, got 0\.5"):
        fill(xt.zeros(2), "uniform_int", low=0.5)


def test_sequences_of_integers_are_exact() -> None:
    start = 2**60 + 1
    got = fill(xt.empty(3, dtype=xt.int64), "sequential", start=start, step=3).tolist()
    assert got == [start, start + 3, start + 6]
