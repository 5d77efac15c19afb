"""tolerance: the formula, against what real sums in each format lose."""

from __future__ import annotations

import math

import numpy as np
import pytest

import xtrain as xt
from xtrain.testing import FORMATS, tolerance

FLOATING = [name for name, f in FORMATS.items() if not f.exact and name != "float64"]


def rounded(x, name):
    """x (float64) to the nearest number of a format, ties to even; no overflow."""
    f = FORMATS[name]
    x = np.asarray(x, np.float64)
    exponent = np.maximum(np.frexp(np.where(x == 0, 1.0, x))[1] - 1, f.min_exponent)
    unit = np.ldexp(1.0, exponent - f.mantissa)
    return np.rint(x / unit) * unit


def test_rounded_is_what_the_hardware_does():
    x = np.random.default_rng(0).standard_normal(10000) * 10.0 ** np.random.default_rng(1).integers(-9, 5, 10000)
    assert (rounded(x, "float32") == x.astype(np.float32)).all()
    assert (rounded(x[np.abs(x) < 6e4], "float16") == x[np.abs(x) < 6e4].astype(np.float16)).all()
    assert rounded(x, "bfloat16").tolist() == xt.tensor(x).to(xt.bfloat16).to(xt.float64).tolist()


@pytest.mark.parametrize(
    ("name", "roundoff"),
    [("float32", 2**-24), ("tf32", 2**-11), ("float16", 2**-11), ("bfloat16", 2**-8), ("float8_e4m3", 2**-4),
     ("float8_e5m2", 2**-3), ("float4_e2m1", 2**-2), ("float64", 2**-53)],
)  # fmt: skip
def test_formats(name, roundoff):
    acc = "float64" if name == "float64" else "float32"
    assert tolerance(name, acc=acc) == (roundoff, roundoff)
    assert tolerance(name, magnitude=6.0)[1] == 4 * roundoff  # 6 lies in [4, 8)


def test_maximum_over_formats():
    assert tolerance("bfloat16", out="float32") == tolerance("bfloat16")
    assert tolerance("float32", out="bfloat16") == tolerance("bfloat16")
    assert tolerance("float16", acc="float16", accumulations=100)[0] == 100 * 2**-11
    assert (
        tolerance("float16", accumulations=100)[0] == 2**-11
    )  # float32 sums: 100 roundings are still below one of float16
    assert tolerance("float16", accumulations=2**14)[0] == 2**14 * 2**-24


def test_integers_are_exact():
    for name in ("int8", "int32", "int64", "uint8", "bool"):
        assert tolerance(name, accumulations=1000, magnitude=1e9) == (0.0, 0.0)
    assert tolerance("int8", out="float16", acc="int32") == (2**-11, 2**-11)


def test_subnormals():
    """Below the smallest normal number the spacing no longer shrinks."""
    assert tolerance("float16", magnitude=1e-7)[1] == 2.0**-25
    assert tolerance("float8_e4m3", magnitude=0.0)[1] == 2.0**-10
    assert tolerance("float4_e2m1", magnitude=0.5)[1] == 0.25


@pytest.mark.parametrize("name", FLOATING)
def test_one_rounding_is_covered_and_reached(name):
    """Numbers of all sizes from subnormal to large: no error above the tolerance, some above half of it."""
    f = FORMATS[name]
    rng = np.random.default_rng(2)
    for exponent in (f.min_exponent - 1, f.min_exponent, 0, 2):
        x = np.ldexp(rng.uniform(1, 2, 100000), exponent) * rng.choice([-1, 1], 100000)
        rtol, atol = tolerance(name, acc="float64", magnitude=float(np.abs(x).max()))
        error = np.abs(rounded(x, name) - x)
        assert (error <= rtol * np.abs(x) + atol).all()
        assert error.max() > 0.4 * atol


@pytest.mark.parametrize("terms", [1, 7, 64, 1024])
@pytest.mark.parametrize(
    ("compute", "acc"), [(c, a) for c in FLOATING for a in ("float32", c) if FORMATS[a].mantissa >= 7]
)
def test_sums_of_products(compute, acc, terms):
    """Dot products in a chain of roundings to `acc`, operands and result in `compute`: signed, all positive, and all equal,
    which rounds in one direction again and again and so comes near the bound."""
    rng = np.random.default_rng(terms)
    ones = np.full((200, terms), 1.0)
    equal = rng.uniform(1, 2, (200, 1)) * ones
    worst = 0.0
    for a, b in [
        (rng.standard_normal((200, terms)), rng.standard_normal((200, terms))),
        (rng.uniform(0, 1, (200, terms)), ones),
        (equal, ones),
    ]:
        a, b = rounded(a, compute), rounded(b, compute)
        total, size = np.zeros(200), 0.0
        for k in range(terms):
            total = rounded(total + a[:, k] * b[:, k], acc)
            size = max(size, float(np.abs(total).max()))
        exact = np.array([math.fsum(row) for row in a * b])
        rtol, atol = tolerance(compute, acc=acc, accumulations=terms, magnitude=size)
        ratio = np.abs(rounded(total, compute) - exact) / (atol + rtol * np.abs(exact))
        worst = max(worst, float(ratio.max()))
    assert worst <= 1, f"error is {worst:.2f} of the tolerance"
    assert worst > 0.01, f"the tolerance is {1 / worst:.0f} times too wide"


@pytest.mark.parametrize("name", ["tf32", "bfloat16", "float16"])
def test_operands_rounded_on_the_way(name):
    """float32 operands that the multiplier rounds, as tensor cores do with tf32."""
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((300, 256)), rng.standard_normal((300, 256))
    got, want = (rounded(a, name) * rounded(b, name)).sum(1), (a * b).sum(1)
    rtol, atol = tolerance(name, out="float32", accumulations=256, magnitude=float(np.abs(a * b).sum(1).max()))
    ratio = np.abs(got - want) / (atol + rtol * np.abs(want))
    assert 0.01 < ratio.max() <= 1


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("backend", xt.gemm_backends(xt.get_default_device()))
def test_our_matrix_products(dtype, backend):
    """Real kernels: sums of 300 in every named backend, float32 accumulation."""
    xt.manual_seed(1)
    a, b = xt.randn(40, 300).to(getattr(xt, dtype)), xt.randn(300, 50).to(getattr(xt, dtype))
    exact = a.to(xt.float64).cpu().numpy() @ b.to(xt.float64).cpu().numpy()
    size = float((np.abs(a.to(xt.float64).cpu().numpy()) @ np.abs(b.to(xt.float64).cpu().numpy())).max())
    rtol, atol = tolerance(dtype, acc="float32", accumulations=300, magnitude=size)
    got = xt.matmul(a, b, backend=backend).to(xt.float64).cpu().numpy()
    assert (np.abs(got - exact) <= atol + rtol * np.abs(exact)).all()


def test_names_of_other_libraries():
    assert tolerance(xt.float32) == tolerance(np.float32) == tolerance(np.dtype("float32")) == tolerance("fp32")
    assert tolerance("bf16") == tolerance(xt.bfloat16)
    assert tolerance("fp8_e4m3") == tolerance("float8_e4m3fn")


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"compute": "float12"}, ValueError, "tolerance: compute must be one of float64, .*, got float12"),
        ({"compute": "float32", "acc": "fp8"}, ValueError, "tolerance: acc must be one of .*, got fp8"),
        ({"compute": 32}, TypeError, "tolerance: compute must be a dtype or its name, got 32"),
        ({"compute": "float32", "accumulations": 0}, ValueError, "accumulations must be a number of at least 1, got 0"),
        ({"compute": "float32", "accumulations": math.nan}, ValueError, "accumulations must be a number"),
        ({"compute": "float32", "magnitude": -1.0}, ValueError, "magnitude must be finite and not negative, got -1.0"),
        ({"compute": "float32", "magnitude": math.inf}, ValueError, "magnitude must be finite"),
    ],
)
def test_bad_input(arguments, error, match):
    with pytest.raises(error, match=match):
        tolerance(**arguments)


def test_numbers_of_numpy():
    assert tolerance("float32", accumulations=np.int64(5), magnitude=np.float32(3)) == tolerance(
        "float32", accumulations=5, magnitude=3.0
    )
