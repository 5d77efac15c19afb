"""verify, assert_close, reduce_max_abs: what they count, and that a wrong answer cannot pass."""

from __future__ import annotations

import math

import numpy as np
import pytest

import xtrain as xt
from xtrain import _C
from xtrain.testing import assert_close, reduce_max_abs, tolerance, verify

FLOATS = [xt.float64, xt.float32, xt.bfloat16, xt.float16]


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.name)
def test_equal_tensors(dtype):
    x = xt.randn(30, 40).to(dtype)
    r = verify(x, x.clone())
    assert r and r.ok and (r.errors, r.count, r.nonfinite) == (0, 1200, 0)
    assert (r.max_abs, r.max_rel, r.worst_ratio, r.percent) == (0, 0, 0, 0)
    assert r.max_ref == reduce_max_abs(x)


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.name)
def test_automatic_tolerance(dtype):
    """One rounding passes, three units in the last place do not."""
    ref = (xt.rand(50, 50) + 1.0).to(xt.float64)
    assert verify(ref.to(dtype), ref)
    epsilon = 4 * tolerance(dtype)[0]
    far = (ref.to(dtype).to(xt.float64) * (1 + 1.5 * epsilon)).to(dtype)
    assert verify(far, ref).errors > 0
    assert verify(far, ref, accumulations=100, rtol=2 * epsilon)


def test_what_is_counted():
    ref = xt.full((4, 5), 2.0)
    out = ref.clone()
    out[1, 2], out[3, 4] = 2.5, 1.0
    r = verify(out, ref, rtol=0.0, atol=0.25)
    assert not r
    assert (r.errors, r.count, r.percent, r.worst, r.max_abs, r.max_rel) == (2, 20, 10.0, (3, 4), 1.0, 0.5)
    assert r.worst_ratio == 4.0
    text = r.report()
    assert "2 of 20 elements (10 %)" in text and "(1, 2): got 2.5, expected 2.0, difference 0.5" in text
    assert "(3, 4): got 1.0" in text
    assert "and 1 more" in r.report(most=1)
    assert "\n" not in verify(ref, ref).report()


def test_nan_never_passes():
    for where in ("out", "ref", "both"):
        out, ref = xt.ones(7), xt.ones(7)
        if where != "ref":
            out[3] = math.nan
        if where != "out":
            ref[3] = math.nan
        r = verify(out, ref, rtol=1e30, atol=1e30)
        assert not r and (r.errors, r.worst) == (1, (3,)), where
        assert "nan" in r.report()
        with pytest.raises(AssertionError):
            assert_close(out, ref, rtol=1.0, atol=1.0)


def test_no_difference_is_not_a_difference_of_zero():
    """Where a number stands beside NaN or Inf, the largest difference is no number either."""
    ref = xt.tensor([1.0, 2.0, 4.0])
    for out in (ref * math.nan, xt.tensor([1.0, math.nan, 4.5]), xt.tensor([1.0, math.inf, 4.5])):
        r = verify(out, ref)
        assert not r and math.isnan(r.max_abs) and math.isnan(r.max_rel) and r.worst_ratio == math.inf
        with pytest.raises(AssertionError, match="largest difference nan, relative nan"):
            assert_close(out, ref)
    same = xt.tensor([math.inf, 1.0, -math.inf])
    r = verify(same, same.clone())
    assert r and (r.max_abs, r.max_rel) == (0, 0)
    r = verify(xt.tensor([math.inf, 1.5, -math.inf]), same)
    assert not r and (r.max_abs, r.max_rel) == (0.5, 0.5), "the same infinity is no difference"
    far = verify(xt.tensor([1e200], dtype=xt.float64), xt.tensor([0.0], dtype=xt.float64), rtol=0.0, atol=0.0)
    assert (far.max_abs, far.worst_ratio) == (1e200, math.inf), "a ratio may overflow where nothing is infinite"


def test_infinity_equals_only_itself():
    ref = xt.tensor([1.0, math.inf, -math.inf])
    assert verify(ref.clone(), ref)
    for wrong in ([1.0, math.inf, math.inf], [1.0, 1e38, -math.inf], [math.inf, math.inf, -math.inf]):
        assert verify(xt.tensor(wrong), ref).errors == 1
    assert verify(xt.tensor([1.0, math.inf, 3.0]), ref).nonfinite == 1


def test_integers_must_be_equal():
    ref = xt.arange(10)
    assert verify(ref.clone(), ref)
    out = ref.clone()
    out[7] = 8
    r = verify(out, ref)
    assert (r.errors, r.worst, r.rtol, r.atol) == (1, (7,), 0, 0)
    assert verify(ref == 3, ref == 3)
    assert verify(out.to(xt.uint8), ref.to(xt.uint8)).errors == 1


def test_strides_and_scalars():
    x = xt.randn(6, 7)
    assert verify(x.T, x.clone().T)
    y = x.clone()
    y[2, 5] = 99.0
    assert verify(y.T, x.T).worst == (5, 2)
    assert verify(xt.tensor(2.0), xt.tensor(2.0)).worst == ()


@pytest.mark.usefixtures("steady_memory")
def test_only_statistics_are_made():
    """Nothing of the size of the tensors is allocated."""
    out, ref = xt.randn(300, 1000), xt.randn(300, 1000)
    _C.memory_reset_peak("cpu")
    before = _C.memory_stats("cpu")["allocated"]
    verify(out, ref)
    reduce_max_abs(out)
    assert _C.memory_stats("cpu")["peak"] - before < 10000


def test_reduce_max_abs():
    assert reduce_max_abs(xt.tensor([1.0, -3.0, 2.0])) == 3.0
    assert reduce_max_abs(xt.tensor([-4, 3])) == 4
    assert math.isnan(reduce_max_abs(xt.tensor([math.nan, 1.0])))
    assert reduce_max_abs(xt.tensor([-math.inf, 1.0])) == math.inf


def test_assert_close_takes_arrays_and_numbers():
    assert_close(xt.tensor([1.0, 2.0]), np.array([1.0, 2.0]))
    assert_close(xt.tensor([1.0, 2.0]), [1, 2])
    assert_close(3, 3)
    assert_close(1.0, 1.0 + 1e-17)
    assert_close(np.arange(3), xt.arange(3))
    assert_close(xt.tensor([1.0]).requires_grad_(), [1.0])
    with pytest.raises(
        AssertionError, match=r"(?s)assert_close: 1 of 2 elements.*\(1,\): got 2\.0, expected 2\.1.*here"
    ):
        assert_close(xt.tensor([1.0, 2.0]), [1.0, 2.1], msg="here")
    with pytest.raises(AssertionError):
        assert_close(3, 4)
    assert_close(xt.tensor([1.0]), [1.1], rtol=0.0, atol=0.2)


def test_assert_close_fails_where_nothing_can_be_compared():
    """A bad argument is a ValueError; in a test it has to be a failed assertion too."""
    for actual, expected in ((xt.ones(2), xt.ones(3)), ([1.0], [math.nan]), (xt.empty(0), xt.empty(0))):
        for error in (AssertionError, ValueError):
            with pytest.raises(error, match=r"(?s)^assert_close: .*here"):
                assert_close(actual, expected, msg="here")


ONE = xt.ones(2, 3)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: verify(ONE, xt.ones(3, 2)), ValueError, r"verify: out must have shape \(3, 2\), got \(2, 3\)"),
        (lambda: verify(xt.empty(0, 3), xt.empty(0, 3)), ValueError, r"verify: out must not be empty, got shape \(0, 3\)"),
        (lambda: verify(ONE, ONE * math.nan), ValueError, "verify: ref must hold a value that is not NaN, got NaN in all 6"),
        (lambda: verify(ONE, ONE.to(xt.int64)), TypeError, "verify: out must be an integer dtype like ref, got float32"),
        (lambda: verify(np.ones(1), ONE), TypeError, "verify: out must be a Tensor, got ndarray"),
        (lambda: verify(ONE, None), TypeError, "verify: ref must be a Tensor, got NoneType"),
        (lambda: verify(ONE, ONE, rtol=-1.0), ValueError, "verify: rtol must be finite and not negative, got -1.0"),
        (lambda: verify(ONE, ONE, rtol="a"), ValueError, "verify: rtol must be finite and not negative, got 'a'"),
        (lambda: verify(ONE, ONE, atol=math.nan), ValueError, "verify: atol must be finite and not negative, got nan"),
        (lambda: verify(ONE, ONE, rtol=0.0, atol=0.0, accumulations=0.5), ValueError, "verify: accumulations must be .*, got 0.5"),
        (lambda: verify(ONE, ONE, accumulations=0), ValueError, "accumulations must be a number of at least 1, got 0"),
        (lambda: assert_close(ONE, [1.0, 2.0]), ValueError, r"assert_close: actual must have shape \(2,\), got \(2, 3\)"),
        (lambda: assert_close([1.0], [math.nan]), ValueError, "assert_close: expected must hold a value that is not NaN"),
        (lambda: assert_close([], []), ValueError, "assert_close: actual must not be empty"),
        (lambda: assert_close(xt.arange(2), [0.5, 1.5]), TypeError, "assert_close: actual must be floating point like expected"),
        (lambda: verify(ONE, ONE, rtol=0.0, atol=0.0, accumulations="x"), ValueError, "verify: accumulations must be a number of at least 1, got 'x'"),
        (lambda: assert_close(1.0, 1.0, rtol=0.0, atol=0.0, accumulations=-1), ValueError, "assert_close: accumulations must be a number"),
        (lambda: assert_close([[1, 2], [3]], [1, 2]), ValueError, "assert_close: actual must be a rectangle of numbers, got a list"),
        (lambda: assert_close([1, 2], ((1, 2), (3,))), ValueError, "assert_close: expected must be a rectangle of numbers, got a tuple"),
        (lambda: assert_close([1, None], [1, 2]), TypeError, "^assert_close: actual must hold numbers, got None$"),
        (lambda: assert_close(ONE, None), TypeError, "^assert_close: expected must hold numbers, got None$"),
        (lambda: assert_close(ONE, np.array(["2026"], "M8[Y]")), TypeError, r"expected must hold numbers, got datetime64\[Y\]"),
        (lambda: assert_close(1, 1j), TypeError, "^assert_close: expected must hold real numbers, got complex128$"),
        (lambda: assert_close(2**70, 1), TypeError, "^assert_close: actual must hold integers of 64 bits, got 1180591620717411303424"),
        (lambda: assert_close(2**63, 1), TypeError, "^assert_close: actual must hold integers of 64 bits, got 9223372036854775808"),
        (lambda: verify(ONE, ONE).report("x"), TypeError, "report: most must be an int, got str"),
        (lambda: assert_close("one", 1), TypeError, "^assert_close: actual must hold numbers, got 'one'$"),
        (lambda: reduce_max_abs(xt.empty(0)), ValueError, r"reduce_max_abs: tensor must not be empty, got shape \(0,\)"),
        (lambda: reduce_max_abs([1.0]), TypeError, "reduce_max_abs: tensor must be a Tensor, got list"),
    ],
)  # fmt: skip
def test_bad_input(call, error, match):
    with pytest.raises(error, match=match) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_report_of_large_integers():
    """Neighbours that one float64 stands for: the report lists what the kernel counts."""
    a, b = xt.tensor([2**62, 1], dtype=xt.int64), xt.tensor([2**62 + 1, 1], dtype=xt.int64)
    found = verify(a, b, rtol=0.0, atol=0.5)
    assert found.errors == 1
    assert "(0,): got 4611686018427387904, expected 4611686018427387905, difference 1" in found.report()
    assert found.report(-1).endswith("and 1 more")


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.uint16, np.uint64, np.longdouble, np.float16])
def test_assert_close_takes_every_numpy_number(dtype):
    assert_close(np.ones(3, dtype), np.ones(3, dtype))
    assert_close(np.ones((), dtype), xt.ones(3).sum() / 3)
    with pytest.raises(AssertionError):
        assert_close(np.ones(3, dtype), [1.0, 1.0, 2.0])


def test_more_roundings_make_more_room() -> None:
    """The default tolerance grows with the roundings that one element collects."""
    ref = xt.ones(4)
    out = ref * (1 + 2.0**-21)
    assert not verify(out, ref) and verify(out, ref, accumulations=100)


def test_a_result_holds_no_graph() -> None:
    x = xt.ones(3, requires_grad=True)
    found = verify(x * 1, xt.ones(3))
    assert found and not found.out.requires_grad and not found.ref.requires_grad


def test_the_largest_absolute_value_tells_nan_before_infinity() -> None:
    for values, want in (([1.0, -3.0], 3.0), ([math.inf, 1.0], math.inf), ([-math.inf], math.inf)):
        assert reduce_max_abs(xt.tensor(values)) == want
    assert math.isnan(reduce_max_abs(xt.tensor([math.inf, math.nan])))


def test_a_tolerance_that_is_given_alone_is_the_one() -> None:
    assert verify(ONE, ONE, atol=0.0).atol == 0.0 and verify(ONE, ONE, rtol=0.0).rtol == 0.0
    near = ONE + 1e-7
    assert verify(near, ONE) and not verify(near, ONE, rtol=0.0, atol=0.0)
    assert not verify(near - ONE, xt.zeros(2, 3) + 1e-30, atol=1e-9), "the default is far above"
