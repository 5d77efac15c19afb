"""Matrix products and attention beyond the table: exact products of small integers over random shapes and strides, backends against each other."""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest
from runs import python

import xtrain as xt
from xtrain import _C
from xtrain.optable.references import attention
from xtrain.optable.table import array, check_close, tensor

EDGES = [1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 255, 256, 257]


def laid_out(a: np.ndarray, dtype: str, kind: int):
    """The matrix (or batch) as dense, transposed in memory, a window of a larger one, or with steps between columns."""
    if kind == 1:
        return tensor(a.swapaxes(-1, -2), dtype).transpose(-1, -2)
    if kind in (2, 3):
        step = kind - 1
        big = np.full((*a.shape[:-2], a.shape[-2] + 3, a.shape[-1] * step + 5), 99.0)
        big[..., 1 : 1 + a.shape[-2], 2 : 2 + a.shape[-1] * step : step] = a
        return tensor(big, dtype)[..., 1 : 1 + a.shape[-2], 2 : 2 + a.shape[-1] * step : step]
    return tensor(a, dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("backend", _C.gemm_backends(_C.get_default_device()))
def test_products_of_small_integers_are_exact(backend: str, dtype: str) -> None:
    """Sums stay below 2^8, which every format holds: any wrong index, tail or stride changes the result."""
    rng = np.random.default_rng(17)
    for _ in range(60):
        m, n, k = (int(rng.choice(EDGES)) for _ in range(3))
        a, b = (rng.choice([-1.0, 0.0, 1.0], s, p=[p, 1 - 2 * p, p]) for s, p in [((m, k), 0.3), ((k, n), 0.2)])
        want = a @ b
        assert np.abs(want).max() <= 256
        x, y = laid_out(a, dtype, int(rng.integers(4))), laid_out(b, dtype, int(rng.integers(4)))
        xt.full((m, n), float("nan"), dtype=getattr(xt, dtype))  # the next block of this size: it is not read
        assert np.array_equal(array(_C.matmul(x, y, backend=backend)), want), (m, n, k)


@pytest.mark.parametrize("backend", _C.gemm_backends(_C.get_default_device()))
def test_batches_broadcast_exactly(backend: str) -> None:
    rng = np.random.default_rng(18)
    for _ in range(40):
        m, n, k = (int(rng.choice([1, 3, 17, 33, 65])) for _ in range(3))
        batch = [int(i) for i in rng.integers(1, 4, rng.integers(0, 4))]
        shapes = [
            [1 if rng.integers(3) == 0 else d for d in batch][rng.integers(0, len(batch) + 1) :] for _ in range(2)
        ]
        a, b = (
            rng.integers(-2, 3, (*shapes[0], m, k)).astype(np.float64),
            rng.integers(-2, 3, (*shapes[1], k, n)).astype(np.float64),
        )
        x, y = laid_out(a, "float32", int(rng.integers(4))), laid_out(b, "float32", int(rng.integers(4)))
        out = _C.matmul(x, y, backend=backend)
        assert np.array_equal(array(out), a @ b), (shapes, m, n, k)


@pytest.mark.parametrize("backend", _C.gemm_backends(_C.get_default_device()))
def test_gradients_of_small_integers_are_exact(backend: str) -> None:
    rng = np.random.default_rng(19)
    with xt.use_gemm_backend(backend):
        for _ in range(25):
            m, n, k, batch = (int(rng.choice([1, 5, 31, 33, 64])) for _ in range(4))
            a, b = (rng.integers(-1, 2, s).astype(np.float32) for s in [(3, m, k), (k, n)])
            dy = rng.integers(-1, 2, (3, m, n)).astype(np.float32)
            x, y = xt.tensor(a, requires_grad=True), xt.tensor(b, requires_grad=True)
            (x @ y).backward(xt.tensor(dy))
            assert np.array_equal(x.grad.cpu().numpy(), dy @ b.T)
            assert np.array_equal(y.grad.cpu().numpy(), np.einsum("bmk,bmn->kn", a, dy))
            w, c = xt.tensor(b.T.copy(), requires_grad=True), xt.tensor(np.ones(n, np.float32), requires_grad=True)
            x.grad = None
            xt.functional.linear(x, w, c).backward(xt.tensor(dy))
            assert np.array_equal(w.grad.cpu().numpy(), np.einsum("bmk,bmn->nk", a, dy))
            assert np.array_equal(c.grad.cpu().numpy(), dy.sum((0, 1)))
            assert np.array_equal(x.grad.cpu().numpy(), dy @ b.T)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", _C.gemm_backends(_C.get_default_device()))
def test_each_product_adds_its_own_bias(backend: str, dtype: str) -> None:
    """Of products of one shape, whose biases are there at once."""
    kind = getattr(xt, dtype)
    x, w = xt.ones(32, 64, dtype=kind), xt.ones(64, 64, dtype=kind)
    biases = [xt.full((64,), float(i), dtype=kind) for i in range(3)]
    with xt.use_gemm_backend(backend):
        for i, bias in enumerate(biases):
            assert (array(xt.functional.linear(x, w, bias)) == 64 + i).all()


@pytest.mark.parametrize("backend", _C.gemm_backends(_C.get_default_device()))
def test_batches_of_more_than_32768_matrices(backend: str) -> None:
    """Evenly spaced ones, and two dimensions in another order than in memory."""
    a, b = np.random.default_rng(20).integers(-2, 3, (2, 200, 200, 2, 2)).astype(np.float32)
    flat = [xt.tensor(x.reshape(-1, 2, 2)) for x in (a, b)]
    assert np.array_equal(array(_C.matmul(*flat, backend=backend)), (a @ b).reshape(-1, 2, 2))
    turned = _C.matmul(xt.tensor(a).transpose(0, 1), xt.tensor(b), backend=backend)
    assert np.array_equal(array(turned), a.swapaxes(0, 1) @ b)


def sparse(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Of -1, 0 and 1, so few that sums of a thousand products stay far below 2^8."""
    return rng.choice([-1.0, 0.0, 1.0], shape, p=[0.05, 0.9, 0.05])


def twice(x: xt.Tensor, w: xt.Tensor, dy: np.ndarray, backend: str | None) -> xt.Tensor:
    """x @ w after two backwards."""
    for _ in range(2):
        out = _C.matmul(x, w, backend=backend)
        out.backward(tensor(dy, "bfloat16"))
    return out


def test_the_last_row_and_the_last_term_of_large_products() -> None:
    """Of 1,025, which a GPU's library computes apart from the others; the second backward adds to the first."""
    rng = np.random.default_rng(21)
    backend = "cublas" if "cublas" in _C.gemm_backends(_C.get_default_device()) else None
    a, b, dy = sparse(rng, 1024, 1032), sparse(rng, 1025, 1024), sparse(rng, 1024, 1024)
    x, w = tensor(a, "bfloat16")[:, :1025], tensor(b, "bfloat16").requires_grad_()
    assert np.array_equal(array(twice(x, w, dy, backend)), a[:, :1025] @ b)  # the last term
    assert np.array_equal(array(w.grad), 2 * a[:, :1025].T @ dy)  # the last row
    a, b, dy = sparse(rng, 1025, 1024), sparse(rng, 1024, 1024), sparse(rng, 1025, 1024)
    w = tensor(b, "bfloat16").requires_grad_()
    twice(tensor(a, "bfloat16"), w, dy, backend)
    assert np.array_equal(array(w.grad), 2 * a.T @ dy)  # the last term, and what was there


@pytest.mark.parametrize("backend", _C.gemm_backends(_C.get_default_device()))
def test_few_rows_are_added_to_a_gradient(backend: str) -> None:
    """dx of eight rows: the weight lies as a product of few rows takes it."""
    rng = np.random.default_rng(22)
    a, b, dy = sparse(rng, 8, 64), sparse(rng, 64, 64), sparse(rng, 8, 64)
    x = tensor(a, "bfloat16").requires_grad_()
    twice(x, tensor(b, "bfloat16"), dy, backend)
    assert np.array_equal(array(x.grad), 2 * dy @ b.T)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", _C.gemm_backends(_C.get_default_device()))
def test_a_gradient_that_begins_at_any_element(backend: str, dtype: str) -> None:
    """Products add to it where it is, and write nothing beside it."""
    rng, size = np.random.default_rng(23), 96 if backend == "naive" else 512
    a, b, dy = (sparse(rng, size, size) for _ in range(3))
    x, w, dy_ = (tensor(v, dtype) for v in (a, b, dy))
    w.requires_grad_()
    _C.matmul(x, w, backend=backend).backward(dy_)  # into memory of its own: aligned
    room = xt.full((size * size + 9,), 3.0, dtype=getattr(xt, dtype))
    room[1:-8] = 0.0
    w.grad = room[1:-8].view(size, size)
    for times in (1, 2):
        _C.matmul(x, w, backend=backend).backward(dy_)
        assert np.array_equal(array(room[1:-8]).reshape(size, size), times * a.T @ dy)
    assert array(room[:1]).tolist() == [3.0] and array(room[-8:]).tolist() == [3.0] * 8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_large_gradient_that_begins_at_any_element(dtype: str) -> None:
    """Of so many tiles that a GPU's library does not split its sums: its own kernels add to it where it is."""
    on_gpu = "cublas" in _C.gemm_backends(_C.get_default_device())
    backend, size, terms = ("cublas", 2048, 1024) if on_gpu else (None, 256, 128)
    rng = np.random.default_rng(24)
    a, b, dy = sparse(rng, terms, size), sparse(rng, size, size), sparse(rng, terms, size)
    x, w, dy_ = tensor(a, dtype), tensor(b, dtype).requires_grad_(), tensor(dy, dtype)
    want = a.T @ dy
    for offset in (0, 1, 2, 4):
        room = xt.full((size * size + 8,), 3.0, dtype=getattr(xt, dtype))
        inside = room[offset : size * size + offset]
        inside.fill_(0.0)
        w.grad = inside.view(size, size)
        _C.matmul(x, w, backend=backend).backward(dy_)
        assert np.array_equal(array(inside).reshape(size, size), want), offset
        assert array(room[:offset]).tolist() == [3.0] * offset
        assert array(room[size * size + offset :]).tolist() == [3.0] * (8 - offset)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_nan_and_infinity_reach_the_result(dtype: str) -> None:
    """0 * NaN is NaN: no backend may skip zeros of a factor."""
    for backend in _C.gemm_backends(_C.get_default_device()):
        a = np.zeros((3, 40))
        b = np.ones((40, 3))
        b[7, 1] = np.nan
        b[8, 2] = np.inf
        out = array(_C.matmul(tensor(a, dtype), tensor(b, dtype), backend=backend))
        assert np.isnan(out).tolist() == [[False, True, True]] * 3, backend


# ---- attention ----------------------------------------------------------------------------------------------------------


def heads_view(a: np.ndarray, dtype: str, kind: int):
    """[B, H, S, D] as the model has it: dense, or a view of [B, S, H, D], or of a fused [B, S, H, 2D]."""
    if kind == 0:
        return tensor(a, dtype)
    rows = a.transpose(0, 2, 1, 3)
    if kind == 1:
        return tensor(rows, dtype).transpose(1, 2)
    return tensor(np.concatenate([rows * 0 + 9, rows], -1), dtype)[..., a.shape[-1] :].transpose(1, 2)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_backends_agree_over_random_shapes(dtype: str) -> None:
    rng = np.random.default_rng(23)
    unit = {"float32": 2.0**-22, "float64": 2.0**-50, "bfloat16": 2.0**-7}[dtype]
    for _ in range(25):
        b, kv, group = (int(n) for n in rng.integers(1, 4, 3))
        s, d, causal = int(rng.choice([1, 2, 31, 32, 33, 65])), 2 * int(rng.integers(1, 20)), bool(rng.integers(2))
        skv = s + int(rng.integers(0, 20)) if rng.integers(2) else s
        arrays = [rng.standard_normal(shape) for shape in [(b, kv * group, s, d), (b, kv, skv, d), (b, kv, skv, d)]]
        arrays = [array(tensor(a, dtype)) for a in arrays]
        want = attention(*arrays, is_causal=causal)
        dy = rng.standard_normal(want.shape)
        grads = {}
        for backend in _C.attention_backends(_C.get_default_device()):
            q, k, v = (heads_view(a, dtype, int(rng.integers(3))).detach().requires_grad_() for a in arrays)
            out = _C.scaled_dot_product_attention(q, k, v, causal, None, group > 1, backend)
            check_close(
                array(out),
                want,
                unit * (4 + np.sqrt(d + skv)) * np.abs(arrays[2]).max(),
                f"{backend} {b, kv, group, s, skv, d}",
            )
            out.backward(tensor(dy, dtype))
            grads[backend] = [array(t.grad) for t in (q, k, v)]
        base = grads.pop("reference")
        for backend, found in grads.items():
            for got, ref in zip(found, base):
                check_close(
                    got,
                    ref,
                    unit * (8 + np.sqrt(d + skv)) * (np.abs(ref).max() + np.abs(dy).max()),
                    f"{backend} gradients",
                )


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_heads_of_one_query_may_lie_apart(dtype: str) -> None:
    """Rows twice as wide as a head, whose left halves are far from zero: the heads that share keys are read where they are."""
    rng = np.random.default_rng(24)
    unit = {"float32": 2.0**-22, "float64": 2.0**-50, "bfloat16": 2.0**-7}[dtype]
    arrays = [array(tensor(rng.standard_normal((2, n, s, 16)), dtype)) for n, s in ((6, 1), (2, 19), (2, 19), (6, 1))]
    want = attention(*arrays[:3])
    for backend in _C.attention_backends(_C.get_default_device()):
        found = []
        for kind in (0, 2):
            q, dy = (heads_view(arrays[i], dtype, kind) for i in (0, 3))
            leaves = [x.detach().requires_grad_() for x in (q, tensor(arrays[1], dtype), tensor(arrays[2], dtype))]
            out = _C.scaled_dot_product_attention(*leaves, False, None, True, backend)
            check_close(array(out), want, unit * (4 + np.sqrt(16 + 19)) * np.abs(arrays[2]).max(), f"{backend} {kind}")
            out.backward(dy)
            found.append([array(x.grad) for x in leaves])
        for name, dense, apart in zip(("dq", "dk", "dv"), *found, strict=True):
            largest = np.abs(dense).max() + np.abs(arrays[3]).max()
            check_close(apart, dense, unit * (8 + np.sqrt(16 + 19)) * largest, f"{backend} {name}")


def test_the_last_key_has_the_factor_of_the_others() -> None:
    """Of 1,025 keys, which the product for dq adds apart from the others. Only that one and its value are not 0."""
    q = xt.zeros(1, 1, 8192, 128, dtype=xt.bfloat16, requires_grad=True)
    k, v = (xt.zeros(1, 1, 1025, 128, dtype=xt.bfloat16) for _ in range(2))
    k[0, 0, 1024], v[0, 0, 1024] = 8.0, 1.0
    out = _C.scaled_dot_product_attention(q, k, v, False, 0.5, False, "materialized")
    out.backward(xt.ones_like(out.detach()))
    want = 0.5 * 8 * 128 * (1 / 1025 - 1 / 1025**2)
    assert np.abs(array(q.grad) / want - 1).max() < 2**-6


def test_large_scores_do_not_overflow() -> None:
    q = xt.full((1, 1, 4, 8), 50.0)
    v = xt.randn(1, 1, 4, 8)
    for backend in _C.attention_backends(_C.get_default_device()):
        out = _C.scaled_dot_product_attention(q, q, v, True, None, False, backend)
        want = np.cumsum(v.cpu().numpy()[0, 0], 0) / np.arange(1, 5)[:, None]
        assert np.allclose(out.cpu().numpy()[0, 0], want, atol=1e-6)


def test_rows_that_see_nothing_are_zero() -> None:
    """More queries than keys, causal: the first queries see no key at all."""
    for backend in _C.attention_backends(_C.get_default_device()):
        q, k, v = (xt.randn(1, 2, n, 4).requires_grad_() for n in (5, 3, 3))
        out = _C.scaled_dot_product_attention(q, k, v, True, None, False, backend)
        assert (out.detach().cpu().numpy()[:, :, :2] == 0).all()
        out.sum().backward()
        assert (q.grad.cpu().numpy()[:, :, :2] == 0).all()
        assert all(np.isfinite(t.grad.cpu().numpy()).all() for t in (q, k, v))


@pytest.mark.on_cpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_threads_change_no_bit_of_a_backward_in_parts(dtype: str) -> None:
    """One kv head, whose blocks of rows several threads take; a second call finds the memory of the first."""
    rng = np.random.default_rng(23)
    rows = [tensor(rng.standard_normal((1, 170, h, 24)), dtype).transpose(1, 2) for h in (8, 1, 1, 8)]
    before, found = _C.get_num_threads(), set()
    for threads in (1, 2, 5, 2):
        xt.set_num_threads(threads)
        q, k, v = (x.detach().requires_grad_() for x in rows[:3])
        _C.scaled_dot_product_attention(q, k, v, True, None, True).backward(rows[3])
        found.add(b"".join(bytes(_C.to_bytes(x.grad.contiguous())) for x in (q, k, v)))
    xt.set_num_threads(before)
    assert len(found) == 1


@pytest.mark.on_cpu
@pytest.mark.parametrize(("skv", "dim", "shares"), [(8, 4, 16), (4096, 128, 8)])
def test_sums_of_shares_take_32_mib_at_most(skv: int, dim: int, shares: int) -> None:
    """128 blocks of a kv head are cut into 16 shares, or as many as have room for their sums. Share i adds up blocks i, i + n, ...: those of
    1e30 and -1e30 are in one of 8 shares, and lose what others have beside them where they are in two."""
    dy = np.ones((1, 128, 1, dim), np.float32)
    dy[0, 0], dy[0, 8] = 1e30, -1e30
    q, k, v = (xt.zeros(1, heads, rows, dim, requires_grad=True) for heads, rows in ((128, 1), (1, skv), (1, skv)))
    _C.scaled_dot_product_attention(q, k, v, False, None, True, "materialized").backward(xt.tensor(dy))
    # Of 16 shares the first 8 are added to 1e30, and are gone when share 8 brings -1e30.
    want = {16: 7 * 8, 8: 14 + 7 * 16}[shares] / skv
    assert np.allclose(v.grad.numpy(), want, rtol=1e-5)


@pytest.mark.on_cpu
@pytest.mark.skipif(
    not sys.platform.startswith("linux") or bool(os.environ.get("XTRAIN_SANITIZE")),
    reason="reads the largest size of a process, to which a sanitizer adds",
)
def test_sums_of_documents_take_32_mib_at_most() -> None:
    """Four documents whose shares have sums of 16 MiB each, beside documents without."""
    code = """
import re
from pathlib import Path
import numpy as np
import xtrain as xt
from xtrain import _C
xt.set_num_threads(2)
def largest(length):
    starts = np.arange(4096, dtype=np.int32) // length * length
    documents = xt.tensor(np.stack([starts, starts + length])[None])
    for row in (q, k, v):
        row.grad = None
    out = xt.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True, window=1, documents=documents, backend="materialized")
    out.backward(dy)
    return int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024  # not its parent's, as ru_maxrss is
q, k, v = (xt.ones(1, heads, 4096, 128, requires_grad=True) for heads in (8, 1, 1))
dy = xt.ones(1, 8, 4096, 128)
print(-largest(64) + largest(1024))
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert 24 < float(done.stdout) < 48, done.stdout


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_many_rows_that_see_nothing_are_zero_in_any_memory(dtype: str) -> None:
    """Whole blocks of queries before the first key, whose results and gradients lie where NaN was."""
    shape = (1, 2, 200, 16)

    def spoil() -> None:
        spoilt = [xt.full(shape, float("nan"), dtype=getattr(xt, dtype)) for _ in range(6)]
        del spoilt

    for backend in _C.attention_backends(_C.get_default_device()):
        q, k, v = (xt.randn(1, 2, n, 16).to(getattr(xt, dtype)).detach().requires_grad_() for n in (200, 40, 40))
        dy = xt.ones_like(q.detach())
        spoil()
        out = _C.scaled_dot_product_attention(q, k, v, True, None, False, backend)
        spoil()
        out.backward(dy)
        for rows in (out.detach(), q.grad):
            assert (array(rows)[:, :, :160] == 0).all(), backend
            assert np.isfinite(array(rows)).all(), backend


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rows_may_lie_on_top_of_each_other(dtype: str) -> None:
    """Queries, keys and values that are one row, expanded: what their copies give, and the gradients of those, added up."""
    unit = {"float32": 2.0**-22, "float64": 2.0**-50}[dtype]
    rng = np.random.default_rng(4)
    shape = (2, 2, 33, 16)
    for backend in _C.attention_backends(_C.get_default_device()):
        for expanded in range(3):
            arrays = [rng.standard_normal((*shape[:2], 1 if i == expanded else 33, 16)) for i in range(3)]
            found = []
            for copied in (False, True):
                leaves = [tensor(a, dtype).requires_grad_() for a in arrays]
                rows = [leaf.expand(*shape) for leaf in leaves]
                out = _C.scaled_dot_product_attention(
                    *(row.contiguous() if copied else row for row in rows), True, None, False, backend
                )
                out.backward(xt.ones_like(out.detach()))
                found.append([array(t) for t in (out, *(leaf.grad for leaf in leaves))])
            for got, want in zip(*found):
                largest = np.abs(want).max() + max(np.abs(a).max() for a in arrays)
                check_close(got, want, unit * (8 + np.sqrt(16 + 33)) * largest, f"{backend} {expanded}")
