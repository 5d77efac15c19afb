"""Operators, promotion, special values, reductions and printing, against NumPy and against PyTorch's written rules."""

from __future__ import annotations

import itertools
import math
import operator

import numpy as np
import pytest

import xtrain as xt
from xtrain.optable.table import array, exact

rng = np.random.default_rng(11)


def test_broadcasting_like_numpy() -> None:
    for _ in range(400):
        shape = [int(n) for n in rng.integers(0, 4, rng.integers(0, 5))]
        sides = [[1 if rng.integers(3) == 0 else n for n in shape][rng.integers(0, len(shape) + 1) :] for _ in range(2)]
        a, b = (rng.standard_normal(s) for s in sides)
        got = xt.tensor(a) + xt.tensor(b)
        assert got.shape == (a + b).shape
        assert np.array_equal(got.cpu().numpy(), a + b)


def test_operators() -> None:
    a, b = np.array([1.0, -2.0, 3.0]), np.array([2.0, 2.0, -1.0])
    x, y = xt.tensor(a), xt.tensor(b)
    for f in (
        operator.add,
        operator.sub,
        operator.mul,
        operator.truediv,
        operator.eq,
        operator.ne,
        operator.lt,
        operator.le,
        operator.gt,
        operator.ge,
    ):
        assert np.array_equal(f(x, y).cpu().numpy(), f(a, b))
        assert np.array_equal(f(x, 2).cpu().numpy(), f(a, 2))
        assert np.array_equal(f(2.5, x).cpu().numpy(), f(2.5, a))
    assert np.array_equal((x**2).cpu().numpy(), a**2)
    assert np.array_equal((2**x).cpu().numpy(), 2**a)
    assert np.array_equal((-x).cpu().numpy(), -a)
    assert np.array_equal(abs(x).cpu().numpy(), abs(a))
    assert (x @ y).item() == a @ b
    x += y
    x -= 1
    x *= 2
    x /= 4
    assert np.array_equal(x.cpu().numpy(), (a + b - 1) * 2 / 4)
    for bad in (None, "a", [1], object(), 1j):
        with pytest.raises(TypeError):
            x + bad
        with pytest.raises(TypeError):
            bad * x
    assert (x == x).dtype is xt.bool


def test_in_place_with_overlap() -> None:
    """x[1:] += x[:-1] reads old values, whatever the order of the loop."""
    t = xt.arange(300, dtype=xt.float32)
    want = t.cpu().numpy().copy()
    want[1:] += want[:-1].copy()
    t[1:].add_(t[:-1])
    assert np.array_equal(t.cpu().numpy(), want)
    m = xt.arange(16, dtype=xt.float32).reshape(4, 4)
    want = m.cpu().numpy() + m.cpu().numpy().T
    m.add_(m.T)
    assert np.array_equal(m.cpu().numpy(), want)
    m = xt.arange(16, dtype=xt.float32).reshape(4, 4)
    want = m.cpu().numpy().T.copy()
    m.copy_(m.T)
    assert np.array_equal(m.cpu().numpy(), want)


@pytest.mark.parametrize("again", [xt.from_dlpack, lambda t: xt.from_numpy(t.numpy())], ids=["dlpack", "numpy"])
@pytest.mark.on_cpu
def test_in_place_with_overlap_through_another_door(again) -> None:
    """Memory that came back through DLPack or NumPy has a storage of its own, and still overlaps."""
    t = xt.arange(300, dtype=xt.float32)
    want = t.numpy().copy()
    want[1:] += want[:-1].copy()
    t[1:].add_(again(t)[:-1])
    assert np.array_equal(t.numpy(), want)


LATTICE = ["bool", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
PROMOTION = [  # PyTorch's table for two tensors with dimensions, rows and columns in the order of LATTICE
    "bool uint8 int32 int64 float16 bfloat16 float32 float64",
    "uint8 uint8 int32 int64 float16 bfloat16 float32 float64",
    "int32 int32 int32 int64 float16 bfloat16 float32 float64",
    "int64 int64 int64 int64 float16 bfloat16 float32 float64",
    "float16 float16 float16 float16 float16 float32 float32 float64",
    "bfloat16 bfloat16 bfloat16 bfloat16 float32 bfloat16 float32 float64",
    "float32 float32 float32 float32 float32 float32 float32 float64",
    "float64 float64 float64 float64 float64 float64 float64 float64",
]


def test_promotion() -> None:
    for i, j in itertools.product(range(8), repeat=2):
        a, b = (xt.ones(2, dtype=getattr(xt, LATTICE[k])) for k in (i, j))
        want = PROMOTION[i].split()[j]
        assert (a * b).dtype.name == want, (LATTICE[i], LATTICE[j])
        assert (a == b).dtype is xt.bool
        floating = xt.float32 if want in ("bool", "uint8", "int32", "int64") else getattr(xt, want)
        assert (a / b).dtype is floating


def test_promotion_with_numbers_and_0d_tensors() -> None:
    kind = {"bool": 0, "uint8": 1, "int32": 1, "int64": 1}
    for name in LATTICE:
        t = xt.ones(2, dtype=getattr(xt, name))
        assert (t * 2).dtype.name == ("int64" if name == "bool" else name)
        assert (t * 2.0).dtype.name == ("float32" if name in kind else name)
        assert (2.0 * t).dtype.name == ("float32" if name in kind else name)
        for other in LATTICE:
            scalar = xt.ones((), dtype=getattr(xt, other))
            higher = kind.get(other, 2) > kind.get(name, 2)
            assert (t * scalar).dtype.name == (other if higher else name), (name, other)
    assert (xt.ones((), dtype=xt.float64) * 2.0).dtype is xt.float64
    assert (xt.ones((), dtype=xt.int64) * 2.5).dtype is xt.float32


def test_integer_arithmetic() -> None:
    t = xt.tensor([250, 3], dtype=xt.uint8)
    assert (t + 10).tolist() == [4, 13]
    assert (xt.tensor([2**62], dtype=xt.int64) * 2).tolist() == [-(2**63)]
    assert (xt.tensor([7, -7]) / 2).tolist() == [3.5, -3.5]
    assert (xt.tensor([2, 3]) ** 3).tolist() == [8, 27]
    big = 2**53 + 1
    assert (xt.tensor([big]) + 0).tolist() == [big]
    assert (xt.tensor([big]) == big).tolist() == [True]
    assert (xt.tensor([0]) + big).tolist() == [big]
    assert xt.full((1,), big).tolist() == [big]
    assert xt.tensor([big, 1]).sum().item() == big + 1


def test_nan_and_infinity() -> None:
    x = xt.tensor([float("nan"), float("inf"), -float("inf"), 1.0])
    assert xt.isnan(x).tolist() == [True, False, False, False]
    assert xt.isinf(x).tolist() == [False, True, True, False]
    assert xt.isfinite(x).tolist() == [False, False, False, True]
    for whole in (xt.tensor([True, False]), xt.tensor([0, 2**62]), xt.tensor([7, 255], dtype=xt.uint8)):
        assert whole.isfinite().tolist() == [True, True] and whole.isinf().tolist() == [False, False]
    ones = xt.tensor([True, False])
    assert ones.square().dtype is xt.int64 and ones.square().tolist() == [1, 0] and (ones * ones).dtype is xt.bool
    assert math.isnan(x.amax().item())
    assert math.isnan(x.amin().item())
    assert x.argmax().item() == 0
    assert math.isnan(xt.maximum(x, xt.zeros(4))[0].item())
    assert math.isnan(xt.minimum(xt.zeros(4), x)[0].item())
    assert np.isnan(x.relu().cpu().numpy()).tolist() == [True, False, False, False]
    assert (x == x).tolist() == [False, True, True, True]
    assert np.isnan(x.exp().cpu().numpy()).tolist() == [True, False, False, False]
    assert x.exp().tolist()[1:3] == [math.inf, 0.0]
    assert x.sigmoid().tolist()[1:3] == [1.0, 0.0]
    assert np.isnan(xt.softmax(x, -1).cpu().numpy()).all()
    for name in ("exp", "log", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "tanh", "sigmoid", "erf", "abs", "neg"):
        special = np.array(
            [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, 3e38, -3e38, 100.0, -100.0, 88.9, -104.0], np.float32
        )
        with np.errstate(all="ignore"):
            s = special.astype(np.float64)
            want = {
                "rsqrt": lambda v: 1 / np.sqrt(v),
                "reciprocal": lambda v: 1 / v,
                "sigmoid": lambda v: 1 / (1 + np.exp(-v)),
                "neg": np.negative,
                "erf": np.vectorize(math.erf),
            }.get(name, getattr(np, name, None))(s).astype(np.float32)
            got = getattr(xt.tensor(special), name)().cpu().numpy()
        if name in ("sin", "cos"):
            got, want = np.where(np.abs(s) > 1e6, 0, got), np.where(np.abs(s) > 1e6, 0, want)
        close = np.isclose(got, want, rtol=3e-6, atol=2e-38, equal_nan=True)
        assert close.all(), (name, special[~close], got[~close], want[~close])


def test_reductions_like_numpy() -> None:
    for _ in range(200):
        shape = tuple(int(n) for n in rng.integers(1, 5, rng.integers(0, 5)))
        a = rng.integers(-50, 50, shape).astype(np.float64)  # small integers: sums are exact
        dims = tuple(int(d) for d in rng.permutation(len(shape))[: rng.integers(0, len(shape) + 1)])
        axis = dims or None
        t, keep = xt.tensor(a), bool(rng.integers(2))
        for got, want in [
            (t.sum(axis, keep), a.sum(axis, keepdims=keep)),
            (t.amax(axis, keep), a.max(axis, keepdims=keep)),
            (t.amin(axis, keep), a.min(axis, keepdims=keep)),
        ]:
            assert got.shape == np.shape(want)
            assert np.array_equal(got.cpu().numpy(), want)
        assert np.allclose(t.mean(axis, keep).cpu().numpy(), a.mean(axis, keepdims=keep), rtol=1e-15)


def test_python_side_ops() -> None:
    a = rng.standard_normal((3, 4))
    t = xt.tensor(a, requires_grad=True)
    assert np.allclose(t.var().item(), a.var(ddof=1))
    assert np.allclose(t.std(0).detach().cpu().numpy(), a.std(0, ddof=1))
    values, indices = t.max(1)
    assert np.array_equal(values.detach().cpu().numpy(), a.max(1))
    assert np.array_equal(indices.cpu().numpy(), a.argmax(1))
    values, indices = t.min(0)
    assert np.array_equal(values.detach().cpu().numpy(), a.min(0))
    assert np.array_equal(indices.cpu().numpy(), a.argmin(0))
    assert t.max().item() == a.max()
    assert np.array_equal(t.clamp(-0.5, 0.5).detach().cpu().numpy(), a.clip(-0.5, 0.5))
    assert np.array_equal(xt.stack([t, t], 1).detach().cpu().numpy(), np.stack([a, a], 1))
    assert [c.shape for c in t.chunk(3, 1)] == [(3, 2), (3, 2)]
    assert t.flatten().shape == (12,)
    assert (t > 0).any().item() is bool((a > 0).any())
    assert (t > -100).all().item() is True
    t.max(1).values.sum().backward()
    want = np.zeros((3, 4))
    want[np.arange(3), a.argmax(1)] = 1
    assert np.array_equal(t.grad.cpu().numpy(), want)


def test_low_precision_rounding_is_to_nearest_even() -> None:
    words = np.concatenate(
        [
            rng.integers(0, 2**32, 20000, dtype=np.uint64).astype(np.uint32).view(np.float32),
            np.float32([0, -0.0, 65504, 65519.99, 65520, 6e-8, 2.98e-8, 2.99e-8, 3.4e38]),
        ]
    )
    words = words[np.isfinite(words)]
    with np.errstate(over="ignore"):
        half = words.astype(np.float16)
    assert np.array_equal(xt.tensor(words).half().cpu().numpy().view(np.uint16), half.view(np.uint16))
    big = exact(words, "bfloat16")
    assert np.array_equal(array(xt.tensor(words).bfloat16()), big)
    every = np.arange(65536, dtype=np.uint16)
    floats = xt.from_numpy(every.view(np.float16)).float().cpu().numpy()
    assert np.array_equal(floats, every.view(np.float16).astype(np.float32), equal_nan=True)
    wide = words.astype(np.float64) * (1 + 2.0**-40)  # float64 must not be rounded twice on its way to float16
    with np.errstate(over="ignore"):
        assert np.array_equal(xt.tensor(wide).half().cpu().numpy(), wide.astype(np.float16))


# ---- repr -------------------------------------------------------------------------------------------------------------------------------


def test_repr() -> None:
    assert "1.5" in repr(xt.tensor([1.5, 2.0]))
    assert "requires_grad=True" in repr(xt.tensor([1.5], requires_grad=True))
    assert "mul" in repr(xt.tensor([1.5], requires_grad=True) * 2)
    assert "int64" in repr(xt.tensor([1, 2])) or "1, 2" in repr(xt.tensor([1, 2]))
    big = xt.zeros(1000, 1000)
    big[3, 4] = float("nan")
    big[0, 0] = 7.0
    text = repr(big)
    assert len(text) < 2000
    for part in ("1000", "float32", big.device.type, "7", "nan"):
        assert part in text.lower(), text
    for odd in (
        xt.zeros(0),
        xt.zeros(0, 3),
        xt.zeros(()),
        xt.full((2,), True),
        xt.zeros(2, dtype=xt.bfloat16),
        xt.tensor([float("nan")]),
        xt.zeros(*(1,) * 8),
        xt.zeros(3, 4).T,
    ):
        assert repr(odd)
        assert str(odd)


def test_where_takes_dtypes_as_arithmetic_does() -> None:
    """A number or a 0-dim tensor counts only when it is of a higher kind."""
    mask = xt.tensor([True, False])
    low, whole = xt.ones(2, dtype=xt.bfloat16), xt.tensor([1, 2], dtype=xt.int32)
    for a, b, dtype in [
        (low, xt.tensor(0.0), xt.bfloat16),
        (xt.tensor(0.0, dtype=xt.float64), low, xt.bfloat16),
        (low, 0, xt.bfloat16),
        (whole, 7, xt.int32),
        (whole, 0.5, xt.float32),
        (mask, 5, xt.int64),
        (1, 2, xt.int64),
        (1, 2.0, xt.float32),
        (low, xt.ones(2), xt.float32),
    ]:
        assert xt.where(mask, a, b).dtype == dtype, (a, b)
    assert xt.where(mask, mask, 5).tolist() == [1, 5]


@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64", "bool"])
def test_smallest_of_integers(dtype: str) -> None:
    low, high = (0, 1) if dtype == "bool" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    a = np.array([high, low, high, low], dtype)
    assert xt.argmin(xt.tensor(a)).item() == 1
    values, indices = xt.min(xt.tensor(a), 0)
    assert (values.item(), indices.item()) == (low, 1)


def test_operators_of_masks() -> None:
    a, b = np.array([[True], [False]]), np.array([True, False, True])
    for function in (lambda x, y: x & y, lambda x, y: x | y, lambda x, y: x ^ y):
        for x, y in ((a, b), (a, True), (False, b), (b[:0], b[:0]), (np.array(True), a)):
            got = function(*(xt.tensor(v) if isinstance(v, np.ndarray) else v for v in (x, y)))
            assert got.dtype is xt.bool
            assert np.array_equal(got.cpu().numpy(), function(x, y))
    assert (~xt.tensor(b)).tolist() == (~b).tolist()
    m = alias = xt.tensor(b)
    m &= xt.tensor(~b)
    m |= True
    m ^= xt.tensor(b)
    assert m is alias
    assert m.tolist() == [False, True, False]
    with pytest.raises(ValueError, match="shape"):
        m &= xt.tensor(a)
    for call in (lambda: m & xt.arange(3), lambda: xt.arange(3) | m, lambda: ~xt.arange(3), lambda: xt.ones(3) ^ True):
        with pytest.raises(TypeError, match="must have dtype bool, got"):
            call()
    for call in (lambda: m & 1, lambda: 1.0 | m, lambda: m ^ None, lambda: m & b):
        with pytest.raises(TypeError, match="operand"):
            call()
