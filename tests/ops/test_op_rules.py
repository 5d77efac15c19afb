"""What ops promise around their kernels: checks of options, who gets which gradient, what a change in place is counted as."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

import xtrain as xt
import xtrain.functional as F
from xtrain import _C

pytestmark = pytest.mark.on_cpu


def test_nan_is_no_option() -> None:
    """Each comparison with it is false, so a rule must be asked the right way round."""
    nan, x = float("nan"), xt.ones((2, 4))
    for call, name in (
        (lambda: F.rms_norm(x, (4,), None, nan), "rms_norm: eps must be at least 0, got nan"),
        (lambda: F.layer_norm(x, (4,), None, None, nan), "layer_norm: eps must be at least 0, got nan"),
        (lambda: F.rope(x.reshape(1, 2, 4), theta=nan), "rope: theta must be positive, got nan"),
        (lambda: _C.clip_grad_norm_([x], nan), "clip_grad_norm_: max_norm must be at least 0, got nan"),
        (lambda: F.sinkhorn(xt.ones((2, 2)), eps=nan), r"sinkhorn: eps must be in \[0, 1\], got nan"),
        (lambda: _C.uniform((2,), nan, 1.0), "uniform: low must not be above high, they and their difference finite"),
        (lambda: _C.normal((2,), 0.0, nan), "normal: std must be at least 0"),
        (lambda: _C.arange(0.0, nan, 1.0), "arange: step must not be 0 and the bounds must be finite"),
    ):
        with pytest.raises(ValueError, match=name):
            call()


# ---- products


def test_the_backward_of_attention_keeps_the_choice_of_the_call() -> None:
    """The gradients of the reference are not those of the other one, bit for bit."""
    values = [np.random.default_rng(i).standard_normal((1, 2, 40, 16)).astype(np.float32) for i in range(3)]

    def bits(backend: str, scope: str | None) -> list[list[float]]:
        parts = [xt.tensor(v).requires_grad_() for v in values]
        out = F.scaled_dot_product_attention(*parts, is_causal=True, backend=backend)
        _C.use_attention_backend(scope)
        out.square().sum().backward()
        _C.use_attention_backend(None)
        return [p.grad.tolist() for p in parts]

    assert bits("reference", None) == bits("reference", "reference") != bits("materialized", "materialized")


def test_a_batch_with_gaps_is_not_folded() -> None:
    """Rows of the matrices of a batch that do not follow each other: every second matrix, and the first rows of each."""
    x, w = np.arange(6 * 5 * 3.0).reshape(6, 5, 3), np.arange(12.0).reshape(3, 4)
    for part in (np.s_[::2], np.s_[:, :4], np.s_[1::3, 1:]):
        assert np.array_equal((xt.tensor(x)[part] @ xt.tensor(w)).numpy(), x[part] @ w)


def test_a_second_broadcast_gradient() -> None:
    """The first one makes .grad, the second could be added by the product itself: not where it must be summed."""
    a = xt.ones((2, 3)).requires_grad_()
    for turn in (1, 2):
        (a @ xt.ones((4, 3, 5))).sum().backward()
        assert a.grad.tolist() == [[20.0 * turn] * 3] * 2


@pytest.mark.usefixtures("steady_memory")
def test_the_gradient_of_a_shared_matrix_is_one_product() -> None:
    """Over all rows of the batch: not a product a matrix, in memory of its own, and a sum."""
    x, w = xt.ones((64, 8, 32)), xt.ones((32, 128)).requires_grad_()
    y = (x @ w).sum()
    _C.memory_reset_peak("cpu")
    before = _C.memory_stats("cpu")["allocated"]
    y.backward()
    one = 64 * 8 * 128 * 4  # the gradient of the result
    assert _C.memory_stats("cpu")["peak"] - before < 2 * one


# ---- elements


def test_powers_of_zero() -> None:
    """d/da a^0 = 0 and d/db 0^b = 0 for b >= 0: the limits, not NaN."""
    a, b = xt.tensor([0.0, 0.0, 2.0, 0.0]).requires_grad_(), xt.tensor([0.0, 2.0, 3.0, 0.5]).requires_grad_()
    (a**b).sum().backward()
    assert a.grad.tolist()[:3] == [0.0, 0.0, 12.0]
    assert (
        b.grad.tolist()[:2] == [0.0, 0.0] and b.grad[3].item() == 0.0 and abs(b.grad[2].item() - 8 * np.log(2)) < 1e-5
    )
    for exponent, slope in ((0.0, 0.0), (1.0, 1.0), (2.0, 0.0)):
        x = xt.zeros((1,)).requires_grad_()
        (x**exponent).backward()
        assert x.grad.tolist() == [slope]


def test_ties_share_the_gradient() -> None:
    for f in (xt.maximum, xt.minimum):
        a, b = xt.ones((2,)).requires_grad_(), xt.ones((2,)).requires_grad_()
        f(a, b).sum().backward()
        assert a.grad.tolist() == b.grad.tolist() == [0.5, 0.5]
    for name in ("amax", "amin"):
        x = xt.tensor([[1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0]]).requires_grad_()
        getattr(x, name)(1).sum().backward()
        assert x.grad.tolist() == [[0.25] * 4] * 2


@pytest.mark.parametrize(("name", "ties"), [("bfloat16", 259), ("float16", 2051)])
def test_a_share_of_many_ties_is_rounded_once(name: str, ties: int) -> None:
    """The number of ties has no value of its own in 16 bits."""
    dtype = getattr(xt, name)
    for f in (xt.amax, xt.amin):
        x = xt.zeros((2, ties), dtype=dtype).requires_grad_()
        f(x, 1).backward(xt.tensor([1.0, 3.0]).to(dtype))
        assert x.grad.dtype is dtype
        assert x.grad.amin(1).tolist() == x.grad.amax(1).tolist() == xt.tensor([1 / ties, 3 / ties]).to(dtype).tolist()


def test_bounds_of_slices_are_pythons() -> None:
    values = list(range(7))
    x = xt.tensor(values)
    for start in range(-9, 10):
        for stop in range(-9, 10):
            for step in (1, 2, 3):
                assert _C.slice(x, 0, start, stop, step).tolist() == values[start:stop:step], (start, stop, step)


def test_a_range_of_large_integers() -> None:
    """Beyond 2^53 the bounds have no float64 of their own."""
    start = 2**53
    assert _C.arange(start, start + 3).tolist() == [start, start + 1, start + 2]
    assert _C.arange(start + 3, start, -2).tolist() == [start + 3, start + 1]
    assert _C.arange(start + 1, start + 1).tolist() == []


# ---- changes in place


def test_expanded_memory_is_not_written() -> None:
    x = xt.ones((1, 3)).expand((2, 3))
    for call in (lambda: x.add_(1), lambda: x.copy_(xt.ones((2, 3))), lambda: x.mul_(xt.ones((3,)))):
        with pytest.raises(ValueError, match="input must not repeat elements"):
            call()
    assert x.tolist() == [[1.0] * 3] * 2


def test_every_tensor_that_an_optimizer_changes_gets_a_version() -> None:
    """So that a graph that saved one refuses to use it."""
    p = xt.ones((3,)).bfloat16().requires_grad_()
    p.grad = xt.ones((3,)).bfloat16()
    optimizer = xt.optim.AdamW([p], lr=0.1)
    optimizer.step()
    raw = optimizer.state[p].raw
    kept = {"param": p, **{name: raw[name] for name in ("exp_avg", "exp_avg_sq", "master", "step")}}
    before = {name: tensor._version for name, tensor in kept.items()}
    optimizer.step()
    assert all(tensor._version > before[name] for name, tensor in kept.items())
    version = p.grad._version
    xt.optim.clip_grad_norm_([p], 0.5)
    assert p.grad._version > version


def test_measuring_changes_nothing() -> None:
    """max_norm = inf: neither values nor versions, also of what is not finite."""
    for value in (3.0, float("nan"), float("inf")):
        grad = xt.tensor([value, 4.0])
        version = grad._version
        _C.clip_grad_norm_([grad], float("inf"))
        assert grad._version == version and grad[1].item() == 4.0


def test_every_change_in_place_is_counted() -> None:
    """By each op that returns its input, so that a graph that saved it refuses to use it."""
    texts = {name: text for name, text in _C.op_signatures().items() if text.endswith("-> self")}
    names = list(texts)
    assert {"add_", "copy_", "fill_", "mul_"} <= set(names)
    for name in names:
        x = xt.ones((3,))
        getattr(_C, name)(x, [xt.ones((3,))] if "parts: Tensors" in texts[name] else 2.0)
        assert x._version == 1, name


def test_cat_of_other_sizes() -> None:
    parts = [np.full((n, 2), float(n)) for n in (1, 3, 0, 2)]
    got = _C.cat([xt.tensor(p) for p in parts], 0)
    assert np.array_equal(got.numpy(), np.concatenate(parts))
    leaves = [xt.tensor(p).requires_grad_() for p in parts]
    upstream = np.arange(12.0).reshape(6, 2)
    _C.cat(leaves, 0).backward(xt.tensor(upstream))
    assert np.array_equal(np.concatenate([leaf.grad.numpy() for leaf in leaves if leaf.numel()]), upstream)


def test_a_number_that_does_not_fit_is_compared() -> None:
    """uint8 == 256 is legal, and false; arithmetic with it is not."""
    x = xt.tensor([0, 255], dtype=xt.uint8)
    assert (
        (x == 256).tolist() == [False, False]
        and (x < 256).tolist() == [True, True]
        and (x > -1).tolist() == [True, True]
    )
    with pytest.raises(ValueError, match="add: other must fit into uint8, got 256"):
        x + 256


def test_a_choice_between_numbers_keeps_them() -> None:
    """A number stands for itself in the dtype of the result: no digit is lost, and none that does not fit is changed."""
    mask, x = xt.tensor([True, False]), xt.tensor([1, 2])
    assert xt.where(mask, 2**53 + 1, x).tolist() == [2**53 + 1, 2]
    assert x.masked_fill(mask, 1 - 2**63).tolist() == [1 - 2**63, 2]
    with pytest.raises(ValueError, match="where: other must fit into uint8, got 256"):
        xt.where(mask, x.to(xt.uint8), 256)
    with pytest.raises(ValueError, match="where: input must fit into int32, got -2147483649"):
        xt.where(mask, -(2**31) - 1, x.to(xt.int32))


def test_random_numbers_are_those_of_float32() -> None:
    """In which they are made: bounds, or a span, that it cannot hold are refused, for float64 as well."""
    for call, name in (
        (
            lambda: _C.uniform((2,), -3e38, 3e38),
            "uniform: low must not be above high, they and their difference finite",
        ),
        (
            lambda: _C.uniform((2,), 0.0, 1e39, "float64"),
            "uniform: low must not be above high, they and their difference",
        ),
        (
            lambda: _C.normal((2,), 1e39, 1.0, "float64"),
            "normal: std must be at least 0, both it and mean finite in float32",
        ),
        (
            lambda: _C.normal((2,), 0.0, 1e39, "float64"),
            "normal: std must be at least 0, both it and mean finite in float32",
        ),
    ):
        with pytest.raises(ValueError, match=name):
            call()
    assert _C.uniform((2,), 2.0, 2.0).tolist() == _C.normal((2,), 2.0, 0.0).tolist() == [2.0, 2.0]


@pytest.mark.parametrize("inner", [255, 256, 257, 512])
def test_running_sums_of_many_columns(inner: int) -> None:
    """Columns are added up in tiles, which may end with the last one."""
    x = np.random.default_rng(0).integers(-9, 9, (3, 4, inner))
    for dtype in (xt.float32, xt.int64):
        assert np.array_equal(xt.tensor(x).to(dtype).cumsum(1).cpu().numpy(), np.cumsum(x, 1))


def test_edges_of_what_is_allowed() -> None:
    """One step this side of what is refused."""
    constant = xt.ones(2)
    leaf = xt.ones(3, requires_grad=True)
    (xt.cat([constant, leaf]) * xt.arange(5).float()).sum().backward()
    assert leaf.grad.tolist() == [2, 3, 4]
    assert [part.shape for part in xt.zeros(0, 2).split(2)] == [(0, 2)] and len(_C.split(xt.zeros(64), 1, 0)) == 64
    assert _C.uniform((2,), 3.0, 3.0).tolist() == [3, 3] == _C.normal((2,), 3.0, 0.0).tolist()
    assert _C.randint(2**53 - 1, 2**53, (1,)).item() == 2**53 - 1
    assert _C.randint(-(2**53), 1 - 2**53, (1,)).item() == -(2**53)
    for value, whole in ((255.9, 255), (-0.9, 0)):
        assert xt.full((1,), value, dtype=xt.uint8).item() == whole


def test_counting_and_random_integers_fit_their_dtype() -> None:
    """Else they would be other numbers, without a word."""
    refused: list[tuple[Callable[[], xt.Tensor], str]] = [
        (lambda: xt.arange(0, 257, dtype=xt.uint8), "arange: the last number must fit into uint8, got 256"),
        (lambda: xt.arange(-1, 3, dtype=xt.uint8), "arange: start must fit into uint8, got -1"),
        (lambda: xt.arange(2, -2, -1, dtype=xt.uint8), "arange: the last number must fit into uint8, got -1"),
        (lambda: xt.arange(2**31, 2**31 + 1, dtype=xt.int32), "arange: start must fit into int32, got 2147483648"),
        (
            lambda: xt.arange(0.0, 300.0, 0.75, dtype=xt.uint8),
            "arange: the last number must fit into uint8, got 299.25",
        ),
        (
            lambda: _C.arange(2**62, 9.5e18, 2**60),
            "arange: the last number must fit into int64, got 9.2233720368547758e+18",
        ),
        (lambda: xt.randint(0, 257, (2,), dtype=xt.uint8), "randint: high - 1 must fit into uint8, got 256"),
        (lambda: xt.randint(-1, 3, (2,), dtype=xt.uint8), "randint: low must fit into uint8, got -1"),
        (
            lambda: xt.randint(0, 2**31 + 1, (2,), dtype=xt.int32),
            "randint: high - 1 must fit into int32, got 2147483648",
        ),
    ]
    for call, text in refused:
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            call()
    assert xt.arange(254, 256, dtype=xt.uint8).tolist() == [254, 255]
    assert xt.arange(300, 300, dtype=xt.uint8).tolist() == []
    assert xt.arange(1, -1, -1, dtype=xt.uint8).tolist() == [1, 0]
    assert xt.arange(2**31 - 2, 2**31, dtype=xt.int32).tolist() == [2**31 - 2, 2**31 - 1]
    assert xt.arange(2**63 - 2, 2**63 - 1).tolist() == [2**63 - 2]
    assert xt.randint(255, 256, (1,), dtype=xt.uint8).item() == 255
    assert xt.randint(2**31 - 1, 2**31, (1,), dtype=xt.int32).item() == 2**31 - 1
    assert xt.randint(0, 2, (64,), dtype=xt.bool).dtype is xt.bool


def test_results_that_the_tensor_cannot_hold() -> None:
    whole, mask = xt.ones(2, dtype=xt.int64), xt.tensor([True, False])
    for call, text in (
        (lambda: whole.div_(2), "div_: a floating point result cannot be stored in int64"),
        (lambda: whole.div_(whole), "div_: a floating point result cannot be stored in int64"),
        (lambda: whole.add_(0.5), "add_: a floating point result cannot be stored in int64"),
        (lambda: mask.add_(1), "add_: a number cannot be stored in bool"),
        (lambda: mask.mul_(whole), "mul_: a number cannot be stored in bool"),
        (lambda: mask**mask, "pow: bool tensors cannot be combined so"),
        (lambda: mask - mask, "sub: bool tensors cannot be combined so"),
        (lambda: mask.sub_(mask), "sub_: bool tensors cannot be combined so"),
        (lambda: mask.__isub__(True), "sub_: bool tensors cannot be combined so"),
    ):
        with pytest.raises(TypeError, match=text):
            call()
    assert mask.tolist() == [True, False] and mask.add_(True).tolist() == [True, True] and whole.tolist() == [1, 1]
    with pytest.raises(
        ValueError, match=r"expand: shape must extend \(2,\) .*, got \(-1, 2\)"
    ):  # no size is there to keep
        whole.expand(-1, 2)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_quotients_and_remainders_of_zero_have_a_sign(dtype: type) -> None:
    a, b = np.array([-4, 4, 0.0, -0.0, 0.0, 3], dtype), np.array([2, -2, -2, 2, 2, 5], dtype)
    for got, want in (
        (xt.tensor(a) // xt.tensor(b), np.floor_divide(a, b)),
        (xt.remainder(xt.tensor(a), xt.tensor(b)), np.remainder(a, b)),
    ):
        assert got.cpu().numpy().tobytes() == want.tobytes()


def test_a_dim_that_is_squeezed_has_size_1() -> None:
    x = xt.ones(1, 2, 1)
    for dim, shape in ((0, (2, 1)), (1, (1, 2, 1)), (-1, (1, 2)), (None, (2,))):
        assert (x.squeeze() if dim is None else x.squeeze(dim)).shape == shape


def test_the_named_product_computes_the_gradients_too() -> None:
    """Its sums have an order of their own, which bits show."""

    def gradients(of: str | None, in_use: str | None) -> list[bytes]:
        xt.manual_seed(1)
        a, b = xt.randn(33, 257).requires_grad_(), xt.randn(257, 65).requires_grad_()
        before = _C.use_gemm_backend(in_use)
        try:
            y = _C.matmul(a, b, backend=of)
            y.backward(xt.randn(33, 65))
        finally:
            _C.use_gemm_backend(before)
        return [x.numpy().tobytes() for x in (a.grad, b.grad)]

    assert gradients("naive", None) == gradients(None, "naive")
    assert all(a != b for a, b in zip(gradients("naive", None), gradients(None, None), strict=True))
