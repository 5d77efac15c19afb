"""Methods that are made of other ops, and creation functions: a test for each clause, against NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest

import xtrain as xt
from xtrain import _C

pytestmark = pytest.mark.on_cpu
A = np.array([[1.0, 3.0, 3.0, -2.0], [0.0, -5.0, -5.0, -5.0]])


def a(**options) -> xt.Tensor:
    return xt.tensor(A, **options)


# ---- extremes


def test_values_and_indices() -> None:
    for op, index in ((xt.max, np.argmax), (xt.min, np.argmin)):
        reduce = getattr(np, op.__name__)
        for dim in (0, 1, -1):
            for keep in (False, True):
                found = op(a(), dim, keep)
                want = index(A, dim, keepdims=keep)
                assert (
                    found.indices.tolist() == want.tolist()
                    and found.values.tolist() == reduce(A, dim, keepdims=keep).tolist()
                )
        assert (
            op(a()).item() == reduce(A)
            and op(a(), a() * -1).tolist() == getattr(np, f"{op.__name__}imum")(A, -A).tolist()
        )
        values, indices = op(xt.tensor(4.0), 0)
        assert (values.item(), indices.item(), values.shape, indices.dtype) == (4.0, 0, (), xt.int64)
        with pytest.raises(IndexError, match=rf"{op.__name__}: dim must be in \[-2, 1\], got 2"):
            op(a(), 2)


def test_the_gradient_of_an_extreme_goes_to_one_element() -> None:
    """The first of equals, whereas amax shares it."""
    x = a(requires_grad=True)
    x.max(1).values.sum().backward()
    assert x.grad.tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]
    y = a(requires_grad=True)
    y.min(1, True).values.sum().backward()
    assert y.grad.tolist() == [[0, 0, 0, 1], [0, 1, 0, 0]]


def test_argmin() -> None:
    assert a().argmin(1).tolist() == [3, 1] and a().argmin(1, True).shape == (2, 1) and a().argmin().item() == 5
    for dtype, values in ((xt.int64, [3, -(2**63), 2**63 - 1]), (xt.uint8, [3, 0, 255])):
        assert xt.tensor(values, dtype=dtype).argmin().item() == 1


# ---- joining and cutting


def test_stacks() -> None:
    parts = [xt.full((2, 3), float(i)) for i in range(4)]
    for dim in (0, 1, 2, -1, -3):
        assert xt.stack(parts, dim).tolist() == np.stack([p.numpy() for p in parts], dim).tolist()
    with pytest.raises(ValueError, match="stack: tensors must hold at least one tensor, got none"):
        xt.stack([])
    with pytest.raises(ValueError, match=r"stack: tensors must have shape \(2, 3\), got \(3, 2\)"):
        xt.stack([parts[0], parts[1].T])


def test_splits_into_many_pieces() -> None:
    """More than one call of the core takes, with a rest, and by a long list; pieces are views."""
    x = xt.arange(200)
    pieces = x.split(3)
    assert len(pieces) == 67 and [p.tolist() for p in pieces] == [
        list(range(i, min(i + 3, 200))) for i in range(0, 200, 3)
    ]
    assert len(xt.arange(198).split(3)) == 66
    sizes = [10, 20, 0, 30, 40, 5, 15, 25, 35, 20]
    assert [p.shape[0] for p in x.split(sizes)] == sizes and x.split(sizes)[-1].tolist() == list(range(180, 200))
    for wrong in ([*sizes[:-1], 19], [*sizes[:-1], 21], [*sizes, -1, 1]):
        with pytest.raises(ValueError, match="split: split_size must add up to 200 along dimension 0"):
            x.split(wrong)
    pieces[1].fill_(-1)
    assert x[2:7].tolist() == [2, -1, -1, -1, 6]


def test_chunks_and_parts() -> None:
    x = xt.arange(10)
    assert [c.tolist() for c in x.chunk(4)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]] and len(x.chunk(20)) == 10
    assert len(xt.zeros(0, 2).chunk(3)) == 3
    with pytest.raises(ValueError, match="chunk: chunks must be at least 1, got 0"):
        x.chunk(0)
    assert x.narrow(0, 2, 3).tolist() == [2, 3, 4] and x.narrow(0, 10, 0).shape == (0,)
    for start, length in ((8, 3), (-1, 2), (3, -1), (11, 0)):
        with pytest.raises(
            IndexError, match=f"narrow: start and length must lie in dimension 0, got {start} and {length}"
        ):
            x.narrow(0, start, length)


def test_flatten_and_t() -> None:
    x = xt.zeros(2, 3, 4)
    assert x.flatten().shape == (24,) and x.flatten(1).shape == (2, 12) and x.flatten(0, 1).shape == (6, 4)
    assert xt.tensor(3.0).flatten().shape == (1,)
    with pytest.raises(ValueError, match="flatten: start_dim must not come after end_dim, got 2 and 1"):
        x.flatten(2, 1)
    assert x[0].t().shape == (4, 3) and x[0, 0].t().shape == (4,)
    with pytest.raises(ValueError, match="t: input must have at most 2 dims, got 3"):
        x.t()


# ---- statistics


def test_variances() -> None:
    for dim in (None, 0, 1, (0, 1), (-1,)):
        for keep in (False, True):
            for options, ddof in (
                ({}, 1),
                ({"unbiased": False}, 0),
                ({"correction": 0}, 0),
                ({"correction": 1.5}, 1.5),
            ):
                got = a().var(dim, keepdim=keep, **options).numpy()
                assert np.allclose(got, A.var(axis=dim, ddof=ddof, keepdims=keep), rtol=1e-14), (dim, keep, options)
                assert np.allclose(
                    a().std(dim, keepdim=keep, **options).numpy(), A.std(axis=dim, ddof=ddof, keepdims=keep)
                )
    assert math.isnan(xt.tensor([3.0]).var().item()), "of one element: 0 / 0"
    assert xt.tensor([1.0, 3.0]).var(correction=5).item() == math.inf, "never a negative divisor"


def test_clamps() -> None:
    """min first: where it is above max, max wins, as in PyTorch."""
    x = xt.tensor([-2.0, 0.5, 3.0])
    assert x.clamp(0, 1).tolist() == [0.0, 0.5, 1.0] and x.clamp(max=1).tolist() == [-2.0, 0.5, 1.0]
    assert x.clamp(min=1).tolist() == [1.0, 1.0, 3.0] and x.clamp(2, 1).tolist() == [1.0] * 3
    with pytest.raises(ValueError, match="clamp: min or max must be given, got None for both"):
        x.clamp()


def test_kinds_of_numbers() -> None:
    x = xt.tensor([math.nan, math.inf, -math.inf, 1.0])
    assert x.isnan().tolist() == [True, False, False, False] and x.isinf().tolist() == [False, True, True, False]
    assert x.isfinite().tolist() == [False, False, False, True]


def test_any_and_all() -> None:
    """Of numbers that cancel, and of 256 ones in a type of 8 bits; of nothing they are False and True."""
    assert (
        xt.tensor([1.0, -1.0]).any().item()
        and xt.ones(256, dtype=xt.uint8).any().item()
        and not xt.zeros(3).any().item()
    )
    x = xt.tensor([[1, 0], [2, 3]])
    assert x.all(1).tolist() == [False, True] and x.all(1, True).shape == (2, 1) and x.any(0, True).shape == (1, 2)
    assert not xt.zeros(0).any().item() and xt.zeros(0).all().item() and xt.tensor([math.nan]).all().item()
    assert x.any(1).dtype is xt.bool


# ---- masks


def test_masks() -> None:
    x, mask = xt.tensor([1.0, 2.0]), xt.tensor([True, False])
    assert x.masked_fill(mask, 9.0).tolist() == [9.0, 2.0]
    with pytest.raises(TypeError):
        x.masked_fill(x, 1.0)
    assert (mask & True).tolist() == [True, False] == (mask | False).tolist() and (True ^ mask).tolist() == [
        False,
        True,
    ] == (~mask).tolist()
    held = mask
    mask &= False
    assert held is mask and held.tolist() == [False, False]
    for call, name in ((lambda: x & mask, "and"), (lambda: mask | x, "or"), (lambda: ~xt.tensor([1]), "invert")):
        with pytest.raises(TypeError, match=f"{name}: .* must have dtype bool"):
            call()
    with pytest.raises(TypeError):
        mask & 1


def test_like_another_tensor() -> None:
    x, y = xt.arange(6), xt.zeros(2, 3, dtype=xt.float64)
    assert x.view_as(y).shape == (2, 3) and xt.ones(3).expand_as(y).shape == (2, 3) and x.type_as(y).dtype is xt.float64
    for name in ("view_as", "expand_as", "type_as"):
        with pytest.raises(TypeError, match=f"{name}: other must be a Tensor, got int"):
            getattr(x, name)(3)


# ---- creation


def test_dtypes_of_new_tensors() -> None:
    for value, dtype in ((True, xt.bool), (3, xt.int64), (3.0, xt.float32)):
        assert xt.full((2,), value).dtype is dtype and xt.full(2, value, dtype=xt.float64).dtype is xt.float64
    assert (
        xt.arange(3).dtype is xt.int64
        and xt.arange(0, 3, 1.0).dtype is xt.float32
        and xt.arange(0, 1.5).dtype is xt.float32
    )
    assert xt.randint(5, (2,)).dtype is xt.int64 and xt.randint(0, 5, (2,), dtype=xt.int32).dtype is xt.int32
    for make in (xt.empty, xt.zeros, xt.ones, xt.rand, xt.randn):
        assert make(2, 3).shape == make((2, 3)).shape == make([2, 3]).shape == (2, 3) and make(2).dtype is xt.float32
        assert make(2, dtype=xt.float64).dtype is xt.float64 and make(2, requires_grad=True).requires_grad
    for make in (xt.rand, xt.randn):
        with pytest.raises(TypeError):
            make(2, dtype=xt.int64)


def test_tensors_like_others() -> None:
    base = xt.zeros(2, 3, dtype=xt.float64)
    for make, value in ((xt.zeros_like, 0), (xt.ones_like, 1), (lambda t, **k: xt.full_like(t, 7, **k), 7)):
        found = make(base)
        assert found.dtype is xt.float64 and found.tolist() == [[value] * 3] * 2 and not found.requires_grad
        assert make(base, dtype=xt.float32).dtype is xt.float32 and make(base, requires_grad=True).requires_grad
    for like, make in ((xt.rand_like, xt.rand), (xt.randn_like, xt.randn)):
        _C.manual_seed(5)
        found = like(base, requires_grad=True)
        _C.manual_seed(5)
        assert (
            found.tolist() == make(2, 3, dtype=xt.float64).tolist()
            and found.dtype is xt.float64
            and found.requires_grad
        )
    assert xt.empty_like(base).dtype is xt.float64 and xt.empty_like(base).shape == (2, 3)
    assert xt.randint(3, 4, (2,)).tolist() == [3, 3] and set(xt.randint(2, (200,)).tolist()) == {0, 1}


# ---- choices of this process


def test_choices_of_implementations_end_with_their_block() -> None:
    for use, current in (
        (xt.use_gemm_backend, _C.use_gemm_backend),
        (xt.use_attention_backend, _C.use_attention_backend),
    ):
        names = xt.gemm_backends() if use is xt.use_gemm_backend else xt.attention_backends()
        with use(names[-1]):
            with use("auto"):
                assert current(None) is None
                current(None)
            assert current(names[-1]) == names[-1]
        assert current(None) is None
        with pytest.raises(
            ValueError, match=f"{use.__name__}: name must be one of auto, {', '.join(names)}.*got 'none such'"
        ):
            use("none such")


def test_words_for_the_precision_of_products() -> None:
    assert xt.get_float32_matmul_precision() == "highest"
    for word, seen in (("high", "high"), ("medium", "high"), ("highest", "highest")):
        xt.set_float32_matmul_precision(word)
        assert xt.get_float32_matmul_precision() == seen
    with pytest.raises(ValueError, match="precision must be 'highest', 'high' or 'medium', got 'low'"):
        xt.set_float32_matmul_precision("low")


def test_dimensions_reversed() -> None:
    x = xt.arange(2 * 3 * 5 * 7).reshape(2, 3, 5, 7)
    assert x.T.shape == (7, 5, 3, 2) and np.array_equal(x.T.numpy(), x.numpy().T)


def test_a_gradient_can_be_deleted() -> None:
    x = xt.ones(2).requires_grad_()
    x.grad = xt.ones(2)
    del x.grad
    assert x.grad is None


def test_a_part_is_a_record_of_its_own() -> None:
    """Also where it is all of a tensor."""
    for x in (xt.tensor(1.0), xt.ones(2)):
        for part in (x[...], x[()]):
            part.requires_grad_()
            assert part.data_ptr() == x.data_ptr() and not x.requires_grad


def test_a_value_that_requires_a_gradient_is_written_where_nothing_is_recorded() -> None:
    x, value = xt.zeros(2), xt.tensor(1.0).requires_grad_()
    with pytest.raises(RuntimeError, match="^setitem: a value that requires a gradient cannot be recorded in place"):
        x[0] = value
    with xt.no_grad():
        x[0] = value
    assert x.tolist() == [1, 0]


def test_a_tensor_formats_like_its_number_where_a_format_is_given() -> None:
    x = xt.tensor(1.5)
    assert (f"{x}", f"{x:.3f}") == (repr(x), "1.500")
    with pytest.raises(TypeError):
        f"{xt.ones(2):.3f}"


def test_to_the_device_and_dtype_of_another() -> None:
    like = xt.ones(2, dtype=xt.int64, device="meta")
    moved = xt.ones(3).to(like)
    assert (moved.dtype, moved.device) == (xt.int64, xt.device("meta"))


def test_statistics_without_a_finite_element() -> None:
    for values, nans, infinite in (([], 0, 0), ([float("nan"), float("inf"), float("-inf")], 1, 2)):
        low, high, mean, *counts = _C.stats(xt.tensor(values, dtype=xt.float32))
        assert np.isnan([low, high, mean]).all() and counts == [nans, infinite]
