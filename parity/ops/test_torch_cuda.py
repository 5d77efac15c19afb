"""On a GPU: memory shared with PyTorch both ways and in order, and matrix products against PyTorch's cuBLAS."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

import xtrain as xt
import xtrain.functional as F
from xtrain.optable.table import array

pytestmark = [
    pytest.mark.on_cpu,
    pytest.mark.skipif(not xt.cuda.is_available(), reason="needs an NVIDIA GPU (make test-gpu)"),
]
DTYPES = ("float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8", "bool")


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_is_shared_both_ways(dtype: str) -> None:
    theirs = (torch.randn(5, 7, device="cuda") * 3).to(getattr(torch, dtype)).t()
    ours = xt.from_dlpack(theirs)
    assert ours.data_ptr() == theirs.data_ptr() and ours.dtype.name == dtype and ours.stride() == tuple(theirs.stride())
    assert np.array_equal(array(ours), array(xt.from_dlpack(theirs.cpu())))
    back = torch.from_dlpack(ours)
    assert back.data_ptr() == theirs.data_ptr() and torch.equal(back, theirs)


def test_work_of_both_sides_stays_in_order() -> None:
    """Long chains on both streams, each reading what the other has just queued."""
    n = 1 << 22
    for _ in range(20):
        x = torch.randn(n, device="cuda")
        want = x.double()
        for _ in range(10):
            y = xt.from_dlpack(x) * 1.0 + 1.0
            x = torch.from_dlpack(y) * 0.5
            want = (want + 1.0) * 0.5
        assert (x.double() - want).abs().max().item() < 1e-5


def test_memory_given_back_is_not_used_too_early() -> None:
    n = 1 << 20
    for i in range(50):
        x = torch.full((n,), float(i), device="cuda")
        y = xt.from_dlpack(x)
        del x
        z = y + 1.0
        for _ in range(5):
            z = z + 0.0
        del y
        torch.full((n,), -1.0, device="cuda")  # PyTorch takes the same block again
        assert z.sum().item() == (i + 1.0) * n


def test_another_stream() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.randn(1 << 20, device="cuda")
        for _ in range(20):
            x = x * 1.01
        ours = xt.from_dlpack(x) + 0.0
        back = torch.from_dlpack(ours) - x
    stream.synchronize()
    assert back.abs().max().item() == 0.0


def test_a_copy_for_another_library_is_waited_for_too() -> None:
    """The copy itself is queued on our stream, behind a long chain; the consumer's stream has to wait for it."""
    n = 1 << 22
    for i in range(20):
        x = xt.zeros(n, device="cuda")
        for _ in range(50):
            x = x + 1.0
        capsule = x.__dlpack__(stream=1, max_version=(1, 0), copy=True)  # the legacy default stream, which is PyTorch's
        assert (torch.from_dlpack(capsule) - 50.0).abs().max().item() == 0.0, i


@pytest.mark.parametrize(
    "n", [1 << 20, 1 << 22]
)  # 4 MiB, kept in a free list, and 16 MiB, which go through the driver's pool
def test_memory_given_back_by_a_side_stream_is_not_used_too_early(n: int) -> None:
    """PyTorch's streams keep no step with the default stream, and nobody says which of them used the memory last."""
    stream = torch.cuda.Stream()
    xt.cuda.empty_cache()
    for i in range(10):
        x = xt.full((n,), float(i), device="cuda")
        with torch.cuda.stream(stream):
            theirs = torch.from_dlpack(x)
            torch.cuda._sleep(20_000_000)  # some 10 ms in which the memory is not read yet
            result = theirs + 1.0
        place = x.data_ptr()
        del x, theirs
        y = xt.full((n,), -1.0, device="cuda")
        assert y.data_ptr() == place or n > 1 << 20  # the same block again
        stream.synchronize()
        assert (result == i + 1.0).all(), i
        del y


@pytest.mark.parametrize("blocking", [True, False])
def test_the_consumers_stream_may_be_gone_when_the_memory_comes_back(blocking: bool) -> None:
    """With work still under way, and with another stream made since, perhaps at its address."""
    driver, n = ctypes.CDLL("libcuda.so.1"), 1 << 22
    torch.ones(1, device="cuda")  # makes the context current
    for i in range(10):
        stream, other = ctypes.c_void_p(), ctypes.c_void_p()
        assert driver.cuStreamCreate(ctypes.byref(stream), 0 if blocking else 1) == 0
        x = xt.full((n,), float(i), device="cuda")
        theirs = torch.from_dlpack(x.__dlpack__(stream=stream.value, max_version=(1, 0)))
        with torch.cuda.stream(torch.cuda.ExternalStream(stream.value)):
            torch.cuda._sleep(20_000_000)
            result = theirs + 1.0
        assert driver.cuStreamDestroy_v2(stream) == 0
        assert driver.cuStreamCreate(ctypes.byref(other), 1) == 0
        del x, theirs
        y = xt.full((n,), -1.0, device="cuda")
        torch.cuda.synchronize()
        assert (result == i + 1.0).all(), i
        assert driver.cuStreamDestroy_v2(other) == 0
        del y
    assert (xt.ones(3, device="cuda") + 1.0).tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("shape", [(256, 256, 256), (1024, 1024, 1024), (65, 33, 97), (50, 50257, 64), (3, 1, 513)])
def test_products_against_pytorch(shape, dtype: str) -> None:
    m, n, k = shape
    a, b = (torch.randn(s, device="cuda").to(getattr(torch, dtype)) for s in ((m, k), (k, n)))
    theirs = a @ b
    for backend in xt.gemm_backends("cuda"):
        ours = torch.from_dlpack(xt.matmul(xt.from_dlpack(a), xt.from_dlpack(b), backend=backend))
        exact = a.double() @ b.double()
        size = exact.abs().max()
        error, peer = ((t.double() - exact).abs().max() / size for t in (ours, theirs))
        unit = {"float32": 2e-7, "float64": 4e-16, "bfloat16": 2**-8, "float16": 2**-11}[dtype]
        assert error <= 2 * peer + unit * (4 + k**0.5 if dtype in ("float32", "float64") else 2), (backend, error, peer)


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
def test_a_head_with_an_odd_vocabulary(precision: str) -> None:
    """linear_cross_entropy with 50257 words: padded rows, and products that are cut at the edge for the matrix units."""
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    x = torch.randn(600, 384, device="cuda").to(dtype).requires_grad_()
    w = torch.randn(50257, 384, device="cuda") * 0.05
    w[50256] *= 4  # what is cut off, and the target of every second row: nobody can leave it out unseen
    w = w.to(dtype).requires_grad_()
    targets = torch.randint(0, 50257, (600,), device="cuda")
    targets[::7] = -100
    targets[1::2] = 50256
    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    exact = torch.nn.functional.cross_entropy(wide[0] @ wide[1].t(), targets)
    exact.backward()
    torch.nn.functional.cross_entropy((x @ w.t()).float(), targets).backward()
    ours = [xt.from_dlpack(t.detach()).requires_grad_() for t in (x, w)]
    xt.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        loss = F.linear_cross_entropy(ours[0], ours[1], xt.from_dlpack(targets))
        loss.backward()
        once = [torch.from_dlpack(mine.grad).double() for mine in ours]
        F.linear_cross_entropy(ours[0], ours[1], xt.from_dlpack(targets)).backward()  # added to what is there
    finally:
        xt.set_float32_matmul_precision("highest")
    unit = {"float32": 1e-6, "tf32": 2e-3, "bfloat16": 1e-2}[precision]
    assert loss.item() == pytest.approx(exact.item(), rel=unit / 10)
    for mine, first, theirs, want in zip(ours, once, (x, w), wide, strict=True):
        size = want.grad.abs().max()
        error = (first - want.grad).abs().max() / size
        peer = (theirs.grad.double() - want.grad).abs().max() / size
        assert error <= 2 * peer + unit, (error, peer)
        assert (torch.from_dlpack(mine.grad).double() - 2 * first).abs().max() <= unit * size


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "tf32"])
@pytest.mark.parametrize("odd", ["rows", "terms", "terms, transposed", "rows and terms"])
def test_products_that_are_cut_at_an_edge(odd: str, dtype: str) -> None:
    """Whole numbers with whole results: exact, whatever is cut off. A is a part of padded rows, so that only an extent is odd."""
    rng = np.random.default_rng(len(odd))
    m, n, k = 1032 + ("rows" in odd), 1024, 1032 + 3 * ("terms" in odd)
    a, b = (rng.choice([-1.0, 0.0, 1.0], size=s, p=[0.02, 0.96, 0.02]) for s in ((m, k), (k, n)))
    a[:, -5:], b[-5:], a[-3:] = 1, rng.integers(-2, 3, (5, n)), rng.choice([-1.0, 0, 1], size=(3, k), p=[0.1, 0.8, 0.1])
    exact = a @ b
    assert np.abs(exact).max() < 256
    of = getattr(torch, "float32" if dtype == "tf32" else dtype)

    def padded(values: np.ndarray) -> torch.Tensor:
        rows, cols = values.shape
        wide = torch.full((rows, (cols + 7) // 8 * 8 + 8), float("nan"), device="cuda", dtype=of)
        wide[:, :cols] = torch.tensor(values, dtype=of)
        return wide[:, :cols]

    left = padded(a.T).t() if "rows" in odd else padded(a)
    right = padded(b.T).t() if "transposed" in odd else torch.tensor(b, device="cuda", dtype=of)
    left, right = xt.from_dlpack(left), xt.from_dlpack(right)
    before = xt.cuda.counters()["launches"]
    xt.set_float32_matmul_precision("high")
    try:
        found = xt.matmul(left, right, backend="cublas")
    finally:
        xt.set_float32_matmul_precision("highest")
    assert xt.cuda.counters()["launches"] - before == 2 + (odd == "rows and terms")  # cut, and nothing was copied
    assert np.array_equal(array(found), exact)


def test_a_sum_that_is_cut_is_rounded_once() -> None:
    """Even columns: the last term is no bfloat16 and cancels against another. Odd ones: the sum before it is none and cancels against it.
    With either rounded to bfloat16 before they meet, nothing would be left."""
    a, b = torch.ones(1024, 1040, device="cuda").bfloat16(), torch.zeros(1033, 1024, device="cuda").bfloat16()
    a[:, 1032] = 129 / 128
    b[0, ::2], b[1032, ::2] = -130, 129
    b[0, 1::2], b[1, 1::2], b[1032, 1::2] = 129, 1 / 128, -128
    found = xt.matmul(xt.from_dlpack(a[:, :1033]), xt.from_dlpack(b), backend="cublas")
    assert (array(found) == 1 / 128).all()
