"""Implementations of some products alone. bf16, in AVX512-BF16 instructions: the bits of the instruction's definition in plain NumPy, and
what test_gemm.py asks of every backend. A CPU without the instructions runs the next implementation under this name, which must pass what
does not need them all the same. So does amx, whose bits tests/gemm has, beside attention. At the end: few, products of at most 8 rows."""

from __future__ import annotations

import numpy as np
import pytest
import test_gemm as gemm
from test_gemm import LAYOUTS, SHAPES, bits, name_of, rounded, stored, values

import xtrain as xt
import xtrain.functional as F
from xtrain import _C

pytestmark = pytest.mark.on_cpu
LOW = ["amx", "bf16"]
HAS = _C.explain_gemm((4, 4, 4), "bfloat16", backend="bf16")[0][2] is None
needs_instruction = pytest.mark.skipif(not HAS, reason="this CPU has no AVX512-BF16 instructions")

# M x N x K: each height of a tile, each number of vectors and their tails, K that is odd, ends a block and begins the next;
# at last op(B) in two chunks
EXACT = [(m, 16 * m - 3, 2 * m + 1) for m in range(1, 8)]
EXACT += [
    (13, 65, 33),
    (25, 130, 31),
    (193, 70, 6),
    (7, 257, 1024),
    (5, 40, 1025),
    (14, 3, 2051),
    (391, 17, 64),
    (1, 1, 1),
    (8, 4200, 1100),
]


def flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < 2.0**-126, np.float32(0), x)


def defined(a: np.ndarray, b: np.ndarray, start: np.ndarray | None = None) -> np.ndarray:
    """float32 [M, N]: pairs of k, the odd one first, one rounding each. A product of bfloat16 is exact in float64, and so is its sum
    with a float32, but for numbers 2^29 times as large as another, which rounding twice may change."""
    a, b = (flushed(np.pad(x, p)) for x, p in ((a, ((0, 0), (0, a.shape[1] % 2))), (b, ((0, b.shape[0] % 2), (0, 0)))))
    total = np.zeros((len(a), b.shape[1]), np.float32)
    for pair in range(0, len(b), 2):
        for k in (pair + 1, pair):
            total = flushed((total + a[:, k : k + 1].astype(np.float64) * b[k]).astype(np.float32))
    return total


@needs_instruction
@pytest.mark.parametrize("shape", EXACT, ids=name_of)
def test_bits_are_those_of_the_instruction(shape) -> None:
    """Every layout, and a second gradient that is added to the first before it is rounded."""
    m, n, k = shape
    random = np.random.default_rng([31, m, n, k])
    ta, a = rounded(random.standard_normal((m, k)), "bfloat16")
    tb, b = rounded(random.standard_normal((k, n)), "bfloat16")
    sums = defined(a.astype(np.float32), b.astype(np.float32))
    want = bits(xt.tensor(sums).to(xt.bfloat16))
    for layout in LAYOUTS:
        assert bits(xt.matmul(stored(ta, layout[0]), stored(tb, layout[1]), backend="bf16")) == want, layout
    identity = xt.tensor(np.eye(k)).to(xt.bfloat16)
    w = xt.zeros(k, n, dtype=xt.bfloat16)
    w.requires_grad = True
    xt.matmul(identity, w, backend="bf16").backward(tb)  # the gradient is B
    xt.matmul(ta, w, backend="bf16").backward(xt.ones(m, n, dtype=xt.bfloat16))
    column = defined(a.T.astype(np.float32), np.ones((m, 1), np.float32))
    assert bits(w.grad) == bits(xt.tensor((column + b.astype(np.float32)).astype(np.float32)).to(xt.bfloat16))


@needs_instruction
def test_subnormals_count_as_zero() -> None:
    tiny = xt.full((2, 2), 2.0**-130, dtype=xt.bfloat16)
    small = xt.full((2, 2), 2.0**-70, dtype=xt.bfloat16)
    large = xt.full((2, 2), 2.0**100, dtype=xt.bfloat16)
    assert (values(xt.matmul(tiny, large, backend="bf16")) == 0).all()
    assert (values(xt.matmul(small, small, backend="bf16")) == 0).all()
    assert (values(xt.matmul(small, large, backend="bf16")) == 2.0**31).all()


@pytest.mark.parametrize("name", LOW)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_every_backend_promises(layout: str, name: str, monkeypatch) -> None:
    """Small integers are exact and sums stay in float32, for every shape; strides, batches, empty sides, NaN and gradients."""
    monkeypatch.setattr(gemm, "BACKENDS", [name])
    monkeypatch.setattr(gemm, "LAYOUTS", [layout])
    for shape in SHAPES:
        gemm.test_small_integers_are_exact(shape, "bfloat16", 1, 256)
    for shape in [(64, 64, 64), (65, 33, 97), (33, 1, 31), (1, 33, 31)]:
        gemm.test_transposes(shape, "bfloat16", name, layout)
        gemm.test_gradients(shape, "bfloat16", name, layout)
    for left, right in gemm.BATCHES:
        gemm.test_batches_broadcast(left, right, layout, "bfloat16", name)
    gemm.test_low_precision_accumulates_in_float32("bfloat16", 256)


@pytest.mark.parametrize("name", LOW)
def test_edges(name: str) -> None:
    gemm.test_strides("bfloat16", name)
    gemm.test_batch_equals_its_products("bfloat16", name)
    gemm.test_accumulation_in_place("bfloat16", name)
    gemm.test_1024("bfloat16", name)
    for shape in [(0, 4, 3), (4, 0, 3), (4, 3, 0), (0, 0, 0)]:
        gemm.test_empty(shape, "bfloat16", name)
    a = np.ones((33, 65), np.float32)
    a[1, 2], a[3, 4] = np.nan, np.inf
    out = values(xt.matmul(xt.tensor(a).to(xt.bfloat16), xt.ones(65, 17, dtype=xt.bfloat16), backend=name))
    assert np.isnan(out[1]).all() and np.isposinf(out[3]).all() and (np.delete(out, [1, 3], 0) == 65).all()


@needs_instruction
def test_memory_stays_that_of_the_operands() -> None:
    """A panel packs 64 columns of all K, also where op(B) has one: past 2^18 another backend computes the product."""
    for k, names in ((1 << 18, LOW), ((1 << 18) + 1, ["blas"])):
        found = next(row for row in _C.explain_gemm((1, 1, k), "bfloat16") if row[2] is None)
        assert found[0] in names, found


@pytest.mark.parametrize("name", LOW)
def test_threads_change_no_bit(name: str) -> None:
    """Also of a batch, whose matrices go to threads whole when they are small."""
    before = _C.get_num_threads()
    try:
        gemm.check_threads("bfloat16", [(257, 513, 1031), (25, 3000, 300), (100, 65, 4099)], backend=name)
        for size, count in ((40, 9), (300, 9)):
            a, b = (xt.randn(count, size, size).to(xt.bfloat16) for _ in range(2))
            alone = b"".join(bits(xt.matmul(a[i], b[i], backend=name)) for i in range(count))
            for threads in gemm.THREADS:
                xt.set_num_threads(threads)
                assert bits(xt.matmul(a, b, backend=name)) == alone, f"{threads} threads"
    finally:
        xt.set_num_threads(before)


# ---- few --------------------------------------------------------------------------------------------------------------------------------


def few_is_chosen(m: int, n: int, k: int, dtype: str) -> bool:
    return next(row for row in _C.explain_gemm((m, n, k), dtype, layout="nt") if row[2] is None)[0] == "few"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("k", [1, 7, 8, 17, 31, 515])
def test_the_bits_of_few_rows_are_those_of_each_alone(k: int, dtype: str) -> None:
    """Of each row of A, also where rows lie apart, N is cut for threads, or there is a batch. (One row of B is no transposed matrix.)"""
    random = np.random.default_rng(k)
    a, exact = rounded(random.standard_normal((8, k + 3)), dtype)
    b, weights = rounded(random.standard_normal((601, k + 5)), dtype)
    a, b, exact, weights = a[:, :k], b[:, :k], exact[:, :k], weights[:, :k]
    alone = np.concatenate([values(F.linear(a[i : i + 1], b)) for i in range(8)])
    gemm.check(xt.tensor(alone), exact, weights.T, dtype)
    before = xt.get_num_threads()
    try:
        for m, n, threads in ((2, 2, 1), (3, 3, 2), (4, 5, 3), (5, 601, 2), (7, 601, 3), (8, 600, 1)):
            xt.set_num_threads(threads)
            assert few_is_chosen(m, n, k, dtype)
            assert np.array_equal(values(F.linear(a[:m], b[601 - n :])), alone[:m, 601 - n :])
    finally:
        xt.set_num_threads(before)
    batch = xt.matmul(a.contiguous().view(2, 4, k), b[:18].contiguous().view(2, 9, k).transpose(1, 2))
    assert np.array_equal(values(batch), np.stack([alone[:4, :9], alone[4:, 9:18]]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_few_rows_add_to_what_is_there_and_write_beside_others(dtype: str) -> None:
    """Sums of small integers, exact: gradients that are added up, and outputs that are columns of a larger matrix."""
    random = np.random.default_rng(7)
    kind = getattr(xt, dtype)
    x, u, v = (random.integers(-2, 3, shape).astype(np.float32) for shape in ((3, 10), (10, 6), (10, 7)))
    parts = [xt.tensor(np.ascontiguousarray(w.T)).to(kind) for w in (u, v)]
    joined = _C.linear_joined(xt.tensor(x).to(kind), parts)
    assert np.array_equal(values(joined), np.concatenate([x @ u, x @ v], 1))
    t = xt.tensor(x).to(kind)
    t.requires_grad = True
    for w in (u, v):  # dA = dC B^T
        xt.matmul(t, xt.tensor(w).to(kind)).sum().backward()
    assert np.array_equal(values(t.grad), np.ones((3, 1)) * (u.sum(1) + v.sum(1)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_lies_behind_k_enters_no_sum(dtype: str) -> None:
    """Neither NaN of the product before, nor weights of the last whole vector."""
    kind = getattr(xt, dtype)
    w = np.ones((5, 17), np.float32)
    w[:, 3] = np.inf
    F.linear(xt.full((8, 64), float("nan"), dtype=kind), xt.ones(5, 64, dtype=kind))
    assert np.isposinf(values(F.linear(xt.ones(8, 17, dtype=kind), xt.tensor(w).to(kind)))).all()
    assert np.isnan(values(F.linear(xt.full((8, 17), float("nan"), dtype=kind), xt.ones(5, 17, dtype=kind)))).all()
