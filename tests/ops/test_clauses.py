"""Clauses of the kernel contracts that a tolerance hides: where a value is rounded, what a size of 0 leaves alone, what stays exact."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource

import numpy as np
import pytest

import xtrain as xt
import xtrain.functional as F
from xtrain import _C

pytestmark = pytest.mark.on_cpu  # its clauses are those of the host's kernels and of Python

LOW = ("bfloat16", "float16")


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """The float32 values of `dtype` that are nearest."""
    return xt.tensor(np.asarray(values, np.float32), device="cpu").to(getattr(xt, dtype)).float().numpy()


def agreement(out, *wanted: np.ndarray) -> list[float]:
    """The share of elements that are exactly those of each array."""
    got = out.detach().float().cpu().numpy()
    return [float(np.mean(got == rounded(want, out.dtype.name))) for want in wanted]


# ---- where values are rounded


@pytest.mark.parametrize("dtype", LOW)
def test_a_norm_is_rounded_before_its_weight(dtype: str) -> None:
    """As Hugging Face's models do; a single rounding of the product differs in a third of the elements."""
    random = np.random.default_rng(0)
    x, w = (rounded(random.standard_normal(shape), dtype) for shape in ((64, 96), 96))
    inner = x / np.sqrt(np.mean(np.square(x.astype(np.float64)), -1, keepdims=True) + 1e-6)
    out = F.rms_norm(xt.tensor(x).to(getattr(xt, dtype)), (96,), xt.tensor(w).to(getattr(xt, dtype)), 1e-6)
    twice, once = agreement(out, rounded(inner, dtype).astype(np.float64) * w, inner * w)
    assert twice > 0.995 and once < 0.9


@pytest.mark.parametrize("dtype", LOW)
def test_cosines_and_sines_are_rounded_and_products_are_not(dtype: str) -> None:
    """The table of RoPE has the dtype, as Hugging Face's has; a b and b a are added in float32."""
    random = np.random.default_rng(1)
    x = rounded(random.standard_normal((50, 2, 32)), dtype)
    half = np.float32(10000.0) ** (np.arange(0, 32, 2, dtype=np.float32) / np.float32(32))
    angle = np.arange(50, dtype=np.float32)[:, None] / half
    a, b = x[..., :16], x[..., 16:]

    def turned(table) -> np.ndarray:
        c, s = (table(f(angle.astype(np.float64)))[:, None] for f in (np.cos, np.sin))
        return np.concatenate([a * c - b * s, b * c + a * s], -1)

    table, exact = agreement(
        F.rope(xt.tensor(x).to(getattr(xt, dtype))), turned(lambda v: rounded(v, dtype)), turned(lambda v: v)
    )
    assert table > 0.99 and exact < 0.9


def test_the_loss_of_large_logits_keeps_its_digits() -> None:
    """lse - x would lose what lse has rounded away: 30000 has a last place of 0.002 in float32."""
    x = 30000.0 + np.random.default_rng(2).integers(0, 64, (40, 9)) / 16.0
    target = np.arange(40) % 9
    shifted = x - x.max(-1, keepdims=True)
    want = np.log(np.exp(shifted).sum(-1)) - shifted[np.arange(40), target]
    loss = F.cross_entropy(xt.tensor(x).float(), xt.tensor(target), reduction="none")
    assert np.abs(loss.numpy() - want).max() < 1e-5


def test_a_constant_is_not_rounded_to_the_dtype_of_its_tensor() -> None:
    """A number beside a 16-bit tensor is one of float32: 1 + 2^-10 is none of bfloat16."""
    x = xt.tensor([1024.0, 3.0]).bfloat16()
    assert (x * (1 + 2.0**-10)).tolist() == [1024.0, 3.0]
    assert (x * 1.00390625 - x * 1.0).tolist() == [
        0.0,
        0.015625,
    ]  # 3 * 1.0039 = 3.0117, rounds to 3.015625; 1024 to even


# ---- sizes of 0


def ones(*shape: int):
    return xt.nn.Parameter(xt.full(shape, 1.0))


def uneven(n: int):
    return xt.tensor([[0.0, 1.0, 5.0]]).expand((n, 3))


EMPTY = {
    "linear": (lambda w, n: F.linear(xt.ones((n, 3)), w), (2, 3)),
    "linear:bias": (lambda b, n: F.linear(xt.ones((n, 3)), xt.ones((2, 3)), b), (2,)),
    "matmul": (lambda w, n: xt.ones((n, 3)) @ w, (3, 2)),
    "matmul:batch": (lambda w, n: xt.ones((n, 2, 3)) @ w, (3, 2)),
    "embedding": (lambda w, n: F.embedding(xt.zeros((n,), dtype=xt.int64), w), (4, 3)),
    "rms_norm": (lambda w, n: F.rms_norm(xt.ones((n, 3)), (3,), w), (3,)),
    "layer_norm": (lambda w, n: F.layer_norm(uneven(n), 3, w) * xt.tensor([1.0, 2.0, 3.0]), (3,)),
    "layer_norm:bias": (lambda b, n: F.layer_norm(uneven(n), 3, None, b), (3,)),
    "mul": (lambda w, n: xt.ones((n, 3)) * w, (3,)),
    "expand": (lambda w, n: w.expand((n, 3)), (1, 3)),
    "linear_cross_entropy": (
        lambda w, n: F.linear_cross_entropy(xt.ones((n, 3)), w, xt.zeros((n,), dtype=xt.int64), reduction="sum"), (4, 3)
    ),
    "mhc_pre": (
        lambda w, n: F.mhc_pre(xt.ones((n, 2, 3)), w, xt.ones((3,)), xt.zeros((8,)))[0], (8, 6)
    ),
    "mhc_pre:alpha": (
        lambda a, n: F.mhc_pre(xt.ones((n, 2, 3)), xt.ones((8, 6)), a, xt.zeros((8,)))[0], (3,)
    ),
    "mhc_pre:bias": (
        lambda b, n: F.mhc_pre(xt.ones((n, 2, 3)), xt.ones((8, 6)), xt.ones((3,)), b)[0], (8,)
    ),
    "mhc_pre:gamma": (
        lambda g, n: F.mhc_pre(xt.ones((n, 2, 3)), xt.ones((8, 6)), xt.ones((3,)), xt.zeros((8,)), g)[0], (2, 3)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_batch_leaves_the_gradient_of_the_others(name: str) -> None:
    """It adds nothing, bit for bit, also where a kernel adds to .grad itself; alone it makes zeros."""
    run, shape = EMPTY[name]
    w = ones(*shape)
    run(w, 2).sum().backward()
    before = w.grad.tolist()
    assert np.any(w.grad.numpy())
    run(w, 0).sum().backward()
    assert w.grad.tolist() == before
    alone = ones(*shape)
    junk = [xt.full(shape, float("nan")) for _ in range(8)]
    del junk  # the next blocks of this size
    run(alone, 0).sum().backward()
    assert not np.any(alone.grad.numpy())


def test_a_product_over_nothing_scales_what_is_there() -> None:
    """K = 0: zeros, and where it is added to a gradient, nothing."""
    junk = xt.full((64, 64), float("nan"))
    del junk  # the next block of this size
    assert not (xt.ones((64, 0)) @ xt.ones((0, 64))).numpy().any()
    for backend in xt.gemm_backends(xt.get_default_device()):
        a = xt.full((2, 3), 2.0).requires_grad_()
        a.grad = xt.full((2, 3), 5.0)
        (xt.matmul(a, xt.ones((3, 0)), backend=backend)).sum().backward()
        assert a.grad.tolist() == [[5.0] * 3] * 2


# ---- what the optimizer's kernels promise


def test_a_coefficient_of_one_writes_nothing() -> None:
    """Not even the rounding of x * 1, and no version: the gradients are as they were."""
    grad = xt.tensor(np.array([3.0, 4.0], np.float32))
    norm = _C.clip_grad_norm_([grad], 5.0 + 1e-6 + 1e-12)
    assert norm.item() == 5.0 and grad.tolist() == [3.0, 4.0]
    _C.clip_grad_norm_([grad], 5.0)  # 5 / (5 + 1e-6) is less than 1
    assert grad.tolist() != [3.0, 4.0]


def test_tensors_of_more_than_a_piece() -> None:
    """A piece has 16384 elements: the last one of a tensor ends with it, and its neighbour in memory stays."""
    whole = xt.full((2, 16384 + 100), 3.0)
    first = whole[0, : 16384 + 50]
    assert _C.clip_grad_norm_([first], 1.0).item() == np.float32(3.0 * np.sqrt(16384 + 50))
    scaled = np.float32(3.0 / (3.0 * np.sqrt(16384 + 50)))
    assert np.abs(first.numpy() - scaled).max() < 1e-6
    assert whole[0, 16384 + 50 :].tolist() == [3.0] * 50 and whole[1].tolist() == [3.0] * (16384 + 100)


def test_a_norm_that_is_nan_spoils_the_gradients() -> None:
    """It multiplies as it comes, as PyTorch's does: the caller looks at the norm."""
    grads = [xt.tensor([1.0, float("nan")]), xt.tensor([2.0])]
    assert np.isnan(_C.clip_grad_norm_(grads, 1.0).item()) and np.isnan(grads[1].item())


# ---- sums


def test_rows_of_one_id_are_added_in_order() -> None:
    """1 and 2^25 and -2^25: forwards 0, backwards 1."""
    weight = ones(3, 2)
    F.embedding(xt.tensor([1, 1, 1]), weight).backward(xt.tensor([[1.0] * 2, [2.0**25] * 2, [-(2.0**25)] * 2]))
    assert weight.grad.tolist() == [[0.0] * 2, [0.0] * 2, [0.0] * 2]


@pytest.mark.parametrize("dtype", LOW)
def test_many_rows_of_one_id_lose_nothing(dtype: str) -> None:
    """4000 ones are 4000; added in bfloat16 they stop at 256."""
    weight = xt.ones((2, 3), dtype=getattr(xt, dtype)).requires_grad_()
    F.embedding(xt.ones((4000,), dtype=xt.int64), weight).sum().backward()
    assert weight.grad.tolist() == [[0.0] * 3, rounded(np.full(3, 4000.0), dtype).tolist()]


def test_more_columns_than_a_tile() -> None:
    weight = ones(2, 2 * 256 + 3)
    F.embedding(xt.tensor([1, 0, 1]), weight).sum().backward()
    assert weight.grad.tolist() == [[1.0] * 515, [2.0] * 515]


@pytest.mark.parametrize("name", ["embedding", "rms_norm", "layer_norm", "layer_norm:bias", "linear_cross_entropy"])
def test_a_second_batch_is_added_to_the_gradient(name: str) -> None:
    """By a kernel that writes into .grad: once, also where its rows are many pieces, and also to rows that it does not name."""
    run, shape = {
        "embedding": (lambda w, n: F.embedding(xt.tensor([0, 2, 2][:n]), w), (4, 3)),
        "rms_norm": (lambda w, n: F.rms_norm(xt.ones((n * 9000, 3)), (3,), w, 0.0), (3,)),
        "layer_norm": (
            lambda w, n: F.layer_norm(xt.tensor([[-1.0, 1.0]]).expand((n * 9000, 2)), 2, w, None, 0.0),
            (2,),
        ),
        "layer_norm:bias": (lambda b, n: F.layer_norm(uneven(n * 9000), 3, None, b), (3,)),
        "linear_cross_entropy": EMPTY["linear_cross_entropy"],
    }[name]
    alone = []
    for n in (3, 1):
        w = ones(*shape)
        run(w, n).sum().backward()
        alone.append(w.grad.numpy().copy())
    both = ones(*shape)
    for n in (3, 1):
        run(both, n).sum().backward()
    assert np.allclose(both.grad.numpy(), alone[0] + alone[1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["softmax", "cross_entropy"])
def test_long_rows_are_summed_in_blocks(name: str) -> None:
    """2^18 terms of about 1, one by one in float32, would be wrong in the fifth digit."""
    cols = 2**18
    x = np.random.default_rng(3).uniform(-0.1, 0.0, (1, cols)).astype(np.float32)
    x[0, 0] = 0.0
    total = np.exp(x.astype(np.float64)).sum()
    if name == "softmax":
        got, want = F.softmax(xt.tensor(x), -1)[0, 0].item(), 1 / total
    else:
        got, want = F.cross_entropy(xt.tensor(x), xt.tensor([0])).item(), np.log(total)
    assert abs(got / want - 1) < 2e-6 if name == "softmax" else abs(got - want) < 2e-6


@pytest.mark.parametrize("dtype", LOW)
def test_a_softmax_is_rounded_once(dtype: str) -> None:
    x = rounded(np.random.default_rng(4).standard_normal((64, 40)), dtype)
    e = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    scale = 1 / e.sum(-1, keepdims=True)
    once, twice = agreement(F.softmax(xt.tensor(x).to(getattr(xt, dtype)), -1), e * scale, rounded(e, dtype) * scale)
    assert once > 0.995 and twice < 0.9


@pytest.mark.parametrize("far", [-1000.0, 1000.0])
def test_rows_far_from_zero(far: float) -> None:
    """Shifted by their maximum: exp would overflow, or the sum be 0."""
    x = xt.tensor([[far, far + 1.0], [far, far]])
    assert np.abs(F.softmax(x, -1).numpy() - [[0.26894142, 0.73105858], [0.5, 0.5]]).max() < 1e-6
    assert (
        np.abs(F.cross_entropy(x, xt.tensor([0, 1]), reduction="none").numpy() - [1.31326169, 0.69314718]).max() < 1e-6
    )


def test_the_gap_between_rows_of_logits_is_not_read() -> None:
    """Rows of 9 logits lie 16 apart, in a block that held infinities before."""
    junk = xt.full((256, 16), float("inf"))
    del junk
    x, w = xt.ones((256, 3)).requires_grad_(), xt.ones((9, 3)).requires_grad_()
    loss = F.linear_cross_entropy(x, w, xt.zeros((256,), dtype=xt.int64))
    loss.backward()
    assert abs(loss.item() - np.log(9)) < 1e-6 and np.isfinite(w.grad.numpy()).all()


# ---- values that are not finite, labels that are none, memory that is not theirs


def test_a_row_with_nan_is_nan() -> None:
    """And its neighbours are not."""
    rows = [[1.0, float("nan"), 2.0], [1.0, float("inf"), 2.0], [float("-inf")] * 3, [0.0, float("-inf"), 0.0]]
    out = F.softmax(xt.tensor(rows), -1).numpy()
    assert np.isnan(out[:3]).all() and out[3].tolist() == [0.5, 0.0, 0.5]


def test_ignored_rows_have_no_gradient_whatever_they_hold() -> None:
    x = xt.tensor([[1.0, 2.0], [float("nan"), float("inf")]]).requires_grad_()
    loss = F.cross_entropy(x, xt.tensor([1, -100]))
    loss.backward()
    assert np.isfinite(loss.item()) and x.grad[1].tolist() == [0.0, 0.0] and x.grad[0, 0].item() > 0


@pytest.mark.parametrize("label", [4, -1])
def test_the_first_label_behind_the_vocabulary_is_refused(label: int) -> None:
    """In the forward of each; so is the one before the first."""
    labels = xt.tensor([0, label])
    for call in (
        lambda: F.cross_entropy(xt.zeros((2, 4)), labels),
        lambda: F.linear_cross_entropy(xt.zeros((2, 3)), xt.zeros((4, 3)), labels),
        lambda: F.embedding(labels, xt.zeros((4, 3))),
    ):
        with pytest.raises(IndexError, match=rf"must be in \[0, 4\).*got {label} at position 1"):
            call()


def test_a_long_period_costs_no_memory() -> None:
    """The table has a row per row of x at most: 2^40 positions of 8 numbers would not fit. An address space without limit, as some
    machines have it, would be written for minutes."""
    x = xt.ones((3, 1, 8))
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if not os.environ.get("XTRAIN_SANITIZE"):  # whose shadow takes terabytes of addresses
        room = min(limit for limit in (1 << 42, *limits) if limit != resource.RLIM_INFINITY)
        resource.setrlimit(resource.RLIMIT_AS, (room, limits[1]))
    try:
        assert F.rope(x, period=2**40).tolist() == F.rope(x).tolist()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def before_a_guard(values: np.ndarray) -> np.ndarray:
    """The same values at the end of a page behind which nothing may be read: a process that does is ended by the system."""
    page, nbytes = mmap.PAGESIZE, values.nbytes
    pages = -(-nbytes // page)
    room = mmap.mmap(-1, (pages + 1) * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(room))
    if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(address + pages * page), page, 0):
        pytest.skip("this system does not protect pages")
    out = np.frombuffer(room, values.dtype, values.size, pages * page - nbytes).reshape(values.shape)
    out[...] = values
    return out


def test_no_matrix_behind_the_last_is_read() -> None:
    """Matrices are worked on sixteen at a time, and seventeen are given."""
    logits = xt.from_numpy(before_a_guard(np.zeros((17, 3, 3), np.float32))).requires_grad_()
    out = F.sinkhorn(logits)
    out.backward(xt.from_numpy(before_a_guard(np.ones((17, 3, 3), np.float32))))
    assert np.abs(out.detach().numpy() - 1 / 3).max() < 1e-5 and np.isfinite(logits.grad.numpy()).all()


# ---- conversions


def test_nan_with_few_bits_stays_nan() -> None:
    """A NaN whose only bits are those that a short dtype drops must not become infinity."""
    x = xt.from_numpy(np.array([0x7F800001, 0xFF800001], np.uint32).view(np.float32))
    for dtype in LOW:
        assert np.isnan(x.to(getattr(xt, dtype)).float().numpy()).all()


def test_ties_of_bfloat16() -> None:
    """Half a last place goes to the even neighbour, a little more or less to the nearer one."""
    x = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20, 1 + 3 * 2.0**-8 - 2.0**-20])
    want = [1.0, 1 + 2.0**-6, 1 + 2.0**-7, 1 + 2.0**-7]
    for sign in (1, -1):
        for t in (xt.tensor(sign * x), xt.tensor(sign * x).float()):
            assert t.bfloat16().tolist() == [sign * w for w in want]


def test_subnormals_of_float16() -> None:
    """Every value against NumPy's rounding: subnormals, their ties, the overflow at 65520."""
    steps = np.arange(0, 3000, dtype=np.float64) * 2.0**-25
    x = np.concatenate([steps, [65503.99, 65519.99, 65520.0, 65536.0, 1e6]]).astype(np.float32)
    with np.errstate(over="ignore"):
        want = x.astype(np.float16)
    for sign in (1, -1):
        assert np.array_equal(xt.tensor(sign * x).half().numpy(), sign * want)


def test_exp_keeps_its_precision_to_its_ends() -> None:
    x = np.linspace(-86.9, 88.7, 20001).astype(np.float32)
    want = np.exp(x.astype(np.float64))
    assert np.abs(xt.tensor(x).exp().numpy() / want - 1).max() < 1.2 * 2.0**-23
    assert xt.tensor([-1000.0, -200.0, 89.0]).exp().tolist() == [0.0, 0.0, float("inf")]


def test_floats_beyond_the_range_of_an_integer() -> None:
    """They become its ends, and NaN 0: what C leaves undefined is the same on every machine."""
    x = xt.tensor([np.nan, -np.inf, -1e30, -5.7, 5.7, 1e30, np.inf], dtype=xt.float64)
    for source in (x, x.float()):
        assert source.to(xt.int32).tolist() == [0, -(2**31), -(2**31), -5, 5, 2**31 - 1, 2**31 - 1]
        assert source.to(xt.int64).tolist() == [0, -(2**63), -(2**63), -5, 5, 2**63 - 1, 2**63 - 1]
        assert source.to(xt.uint8).tolist() == [0, 0, 0, 0, 5, 255, 255]


def test_bool_is_not_zero() -> None:
    assert xt.tensor([0, 1, 256, 2**40]).bool().tolist() == [False, True, True, True]
    assert xt.tensor([0.0, 1e-30, np.nan, -0.0]).bool().tolist() == [False, True, True, False]


# ---- one element after the other


def test_a_stretch_of_one_value() -> None:
    """A column beside rows of any length, from either side."""
    for n in (1, 3, 63, 64, 65, 5000):
        x, column = np.arange(3.0 * n).reshape(3, n), np.array([[2.0], [3.0], [5.0]])
        for a, b in ((x, column), (column, x)):
            for f in (lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a * b):
                assert np.array_equal(f(xt.tensor(a), xt.tensor(b)).numpy(), f(a, b))


@pytest.mark.parametrize("dtype", ["uint8", "float16", "int32", "int64"])
def test_large_transposes(dtype: str) -> None:
    """In tiles of 32, into rows that lie apart, whose gaps stay."""
    for rows, cols in ((32, 64), (33, 40), (100, 31), (70, 200)):
        x = (np.arange(rows * cols) % 120).reshape(rows, cols).astype(dtype)
        room = xt.full((cols, rows + 40), 7, dtype=getattr(xt, dtype))
        room[:, :rows] = xt.tensor(x).T
        got = room.numpy()
        assert np.array_equal(got[:, :rows], x.T) and (got[:, rows:] == 7).all()
        assert np.array_equal(xt.tensor(x).T.contiguous().numpy(), x.T)


def test_rows_of_three_dimensions() -> None:
    """Rows that are copied as such, with pieces that begin in the middle of a matrix."""
    x = np.arange(7 * 300 * 80).reshape(7, 300, 80)
    part = xt.tensor(x)[::2, 1:, 5:70]
    assert np.array_equal(part.contiguous().numpy(), x[::2, 1:, 5:70])
    target = xt.zeros((4, 299, 80), dtype=xt.int64)
    target[:, :, 3:68] = part
    assert np.array_equal(target.numpy()[:, :, 3:68], x[::2, 1:, 5:70]) and not target.numpy()[:, :, 68:].any()


def test_a_range_collects_no_error() -> None:
    n = 100001
    got = xt.arange(0.0, n * 0.1, 0.1, dtype=xt.float64).numpy()[:n]
    assert np.array_equal(got, np.arange(n) * 0.1)


def test_no_number_of_a_long_fill_comes_twice() -> None:
    """Each element has a counter of its own, also where threads fill in pieces; and the pieces are those of one fill."""
    for draw in (_C.uniform, _C.normal):
        _C.manual_seed(3)
        x = draw((50000,), 0.0, 1.0, _C.float32).numpy()
        assert len(np.unique(x[:8000])) > 7990 and not np.array_equal(x[:8000], x[16384 : 16384 + 8000])
        _C.manual_seed(3)
        assert np.array_equal(draw((300,), 0.0, 1.0, _C.float32).numpy(), x[:300])


def test_uniform_never_reaches_its_end() -> None:
    """2^24 steps of u: the largest would round to high in a short dtype, and in float32 where high is far from 0."""
    for dtype in (_C.float32, *(getattr(_C, name) for name in LOW)):
        for low, high in ((0.0, 1.0), (1000.0, 1001.0)):
            x = _C.uniform((200000,), low, high, dtype).float().numpy()
            assert x.min() >= low and x.max() < high


def test_randint_of_a_range_beyond_32_bits() -> None:
    x = _C.randint(-(2**52), 2**52, (4000,), _C.int64).numpy()
    assert x.min() < -(2**51) and x.max() > 2**51 and x.min() >= -(2**52) and x.max() < 2**52


def test_integer_powers() -> None:
    base = xt.tensor([1, -1, -1, 2, 0, 3])
    assert (base ** xt.tensor([-3, -3, -2, -1, 0, 5])).tolist() == [1, -1, 1, 0, 1, 243]
    assert (xt.tensor([3.0, -2.0]) ** 2).tolist() == [9.0, 4.0] and (xt.tensor([3.0, -2.0]) ** 3).tolist() == [
        27.0,
        -8.0,
    ]


def test_kinks_have_slope_zero() -> None:
    for f in (xt.Tensor.abs, xt.Tensor.relu):
        x = xt.tensor([-2.0, 0.0, -0.0, 3.0]).requires_grad_()
        f(x).sum().backward()
        assert x.grad.tolist()[1:] == [0.0, 0.0, 1.0]
    assert np.isnan(xt.tensor([np.nan]).relu().item())


def test_slopes_far_out() -> None:
    """Where the sigmoid is almost 1, s (1 - s) would lose all digits."""
    v = np.array([-30.0, -12.0, 12.0, 20.0, 30.0])
    for f, slope in (
        (xt.Tensor.sigmoid, np.exp(-np.abs(v)) / (1 + np.exp(-np.abs(v))) ** 2),
        (xt.Tensor.tanh, 4 * np.exp(-2 * np.abs(v)) / (1 + np.exp(-2 * np.abs(v))) ** 2),
    ):
        x = xt.tensor(v).float().requires_grad_()
        f(x).sum().backward()
        assert np.abs(x.grad.numpy() / slope - 1).max() < 1e-5


@pytest.mark.parametrize("x", [1e5, 3.3e6, 1e8, 1e12, 1e30])
def test_sines_of_large_numbers(x: float) -> None:
    """Alone, and in a block of small ones."""
    for many in (np.float32([x, -x]), np.float32([*np.linspace(-3, 3, 400), x])):
        assert np.abs(xt.tensor(many).sin().numpy() - np.sin(many.astype(np.float64))).max() < 1e-6
        assert np.abs(xt.tensor(many).cos().numpy() - np.cos(many.astype(np.float64))).max() < 1e-6


@pytest.mark.parametrize("dtype", ["float64", "float32", *LOW])
def test_nan_on_either_side(dtype: str) -> None:
    nan, n = float("nan"), 70
    a, b = (
        xt.tensor([pair[i] for pair in [(nan, 1.0), (1.0, nan), (nan, nan), (2.0, 1.0)] * n]).to(getattr(xt, dtype))
        for i in (0, 1)
    )
    for f, want in ((xt.maximum, 2.0), (xt.minimum, 1.0)):
        got = f(a, b).float().numpy().reshape(n, 4)
        assert np.isnan(got[:, :3]).all() and (got[:, 3] == want).all()
        assert np.isnan(f(a, 1.0).float().numpy().reshape(n, 4)[:, [0, 2]]).all()


# ---- reductions


def test_the_first_of_equals() -> None:
    """And the first NaN, along rows and columns, in one segment of 8192 elements and over several."""
    for n in (5, 100, 8192, 20000):
        x = np.zeros(n, np.float32)
        x[n // 2] = x[n - 2] = 1.0
        nan = x.copy()
        nan[n // 3] = nan[n - 1] = np.nan
        for values, place in ((x, n // 2), (nan, n // 3)):
            rows = np.stack([values] * 3)
            assert xt.tensor(values).argmax().item() == place
            assert xt.tensor(rows).argmax(1).tolist() == [place] * 3
            assert xt.tensor(np.ascontiguousarray(rows.T)).argmax(0).tolist() == [place] * 3
        assert np.isnan(xt.tensor(nan).amax().item()) and np.isnan(xt.tensor(nan).amin().item())


def test_sums_of_many_elements() -> None:
    """Blocks in float32, their totals in float64: half a million tenths, where float32 loses the third digit; any length of tail."""
    for n in (1, 7, 255, 257, 8191, 8193, 500001):
        x = np.full(n, 0.1, np.float32)
        want = float(np.float32(0.1)) * n
        assert abs(xt.tensor(x).sum().item() / want - 1) < 1e-6
        assert abs(xt.tensor(x).mean().item() / float(np.float32(0.1)) - 1) < 1e-6
        assert abs(xt.tensor(np.stack([x, x], 1)).sum(0)[1].item() / want - 1) < 1e-6
    ends = before_a_guard(np.full(8192 + 3, 1.0, np.float32))
    assert xt.from_numpy(ends).sum().item() == 8195.0


def test_totals_of_blocks_are_float64() -> None:
    """Blocks of 256 quarters are 64, half a last place of 2^30 in float32: they add up, in rows and columns."""
    x = np.full(8192, 0.25, np.float32)
    x[0] = 2.0**30
    for got in (xt.tensor(x).sum(), xt.tensor(np.stack([x, x], 1)).sum(0)[1]):
        assert got.item() - 2.0**30 in (1920.0, 2048.0)


def test_the_first_of_the_worst() -> None:
    """Also where equals lie in other segments of 16384 elements."""
    out = np.zeros(50000)
    out[[17000, 40000]] = 2.0
    got = _C.compare(xt.tensor(out), xt.zeros((50000,), dtype=xt.float64), 0.0, 1.0)
    assert (got["worst"], got["errors"], got["worst_ratio"]) == (17000, 2, 2.0)


# ---- products


def test_a_product_does_not_read_what_it_overwrites() -> None:
    """Fresh memory may hold NaN: blocks of the cache are filled with it first."""
    for dtype in ("float32", "bfloat16", "float64"):
        for backend in xt.gemm_backends(xt.get_default_device()):
            for m, n, k in ((40, 50, 60), (1, 3000, 40)):
                junk = xt.full((m, n), float("nan"), dtype=getattr(xt, dtype))
                del junk  # the next block of this size
                out = xt.matmul(
                    xt.ones((m, k), dtype=getattr(xt, dtype)),
                    xt.ones((k, n), dtype=getattr(xt, dtype)),
                    backend=backend,
                )
                assert (out.float().numpy() == k).all()


def test_products_with_strided_vectors() -> None:
    """Columns and rows of larger matrices, on either side."""
    a, b = np.arange(35.0).reshape(5, 7), np.arange(21.0).reshape(7, 3)
    x, y = xt.tensor(a), xt.tensor(b)
    for backend in xt.gemm_backends(xt.get_default_device()):
        for j in range(3):
            assert np.array_equal(xt.matmul(x, y[:, j : j + 1], backend=backend).numpy(), a @ b[:, j : j + 1])
            assert np.array_equal(xt.matmul(x, y[:, j], backend=backend).numpy(), a @ b[:, j])
        for i in range(5):
            assert np.array_equal(
                xt.matmul(x.T.contiguous()[:, i : i + 1].T, y, backend=backend).numpy(), a[i : i + 1] @ b
            )
            assert np.array_equal(xt.matmul(y.T, x.T[:, i], backend=backend).numpy(), b.T @ a.T[:, i])


def test_a_cut_product_is_added_to_a_gradient() -> None:
    """Sums over a long K are cut into parts: what is in .grad stays in the sum."""
    x, w = xt.ones((8192, 64)), xt.ones((64, 64)).requires_grad_()
    for turn in (1, 2, 3):
        F.linear(x, w).sum().backward()
        assert (w.grad.numpy() == 8192.0 * turn).all()
