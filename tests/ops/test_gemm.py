"""Matrix products: every backend against a float64 sum with a computed tolerance, against each other, and exactly on small integers."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

import xtrain as xt
from xtrain import _C

KNOWN = xt.gemm_backends("cpu")
CPU_BACKENDS = [name for name in KNOWN if name not in ("few", "amx", "bf16")]  # those of any problem
BACKENDS = [name for name in xt.gemm_backends(xt.get_default_device()) if name not in ("amx", "bf16")]
DTYPES = ("float32", "bfloat16")
ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
# M x N x K: squares, nothing a multiple of anything, inner products, matrix times vector, K around a tile's edge
SHAPES = [(4, 4, 4), (64, 64, 64), (256, 256, 256), (65, 33, 97)]
SHAPES += (
    [(1, 1, k) for k in (1, 31, 257, 4099)] + [(m, 1, 257) for m in (2, 33, 511)] + [(1, n, 257) for n in (33, 511)]
)
SHAPES += [(31, 33, k) for k in (1, 2, 31, 32, 33, 255, 513, 1031)] + [
    (1, 1, 1),
    (33, 1, 1),
    (257, 129, 3),
    (130, 70, 2049),
]
LAYOUTS = ("nn", "nt", "tn", "tt")


def name_of(shape) -> str:
    return "x".join(map(str, shape))


def rounded(a, dtype: str):
    """(tensor of `dtype`, float64 array of the same values)."""
    t = xt.tensor(np.asarray(a, np.float64)).to(getattr(xt, dtype))
    return t, values(t)


def values(t) -> np.ndarray:
    return t.detach().to(xt.float64).cpu().numpy()


def drawn(shape, dtype: str, seed: int = 0):
    """A, B as tensors and as arrays; normal random."""
    m, n, k = shape
    random = np.random.default_rng([seed, m, n, k])
    return (*rounded(random.standard_normal((m, k)), dtype), *rounded(random.standard_normal((k, n)), dtype))


def stored(t, layout: str):
    """The same matrix, with its columns in one piece when `layout` is t."""
    return t.transpose(-1, -2).contiguous().transpose(-1, -2) if layout == "t" else t


def bound(a, b, dtype: str, accumulator: str | None = None) -> np.ndarray:
    """What rounding may do to a @ b: K additions and multiplications in the accumulator, one rounding to the format."""
    accumulator = accumulator or ("float64" if dtype == "float64" else "float32")
    sums = np.abs(a) @ np.abs(b)
    return ROUNDOFF[dtype] * np.abs(a @ b) + (a.shape[-1] + 2) * ROUNDOFF[accumulator] * sums


def check(got, a, b, dtype: str) -> None:
    got = values(got)
    assert got.shape == (a @ b).shape
    assert np.isfinite(got).all()
    error, limit = np.abs(got - a @ b), bound(a, b, dtype)
    assert (error <= limit).all(), (
        f"error {error.max():.3e}, worst {np.max(error / (limit + 1e-300)):.2f} x its tolerance"
    )


# ---- values ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", (*DTYPES, "float16", "float64"))
@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_values(shape, dtype: str, backend: str) -> None:
    ta, a, tb, b = drawn(shape, dtype)
    check(xt.matmul(ta, tb, backend=backend), a, b, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_1024(dtype: str, backend: str) -> None:
    """1024^3. Three plain loops would need seconds: `naive` computes the rows 0, 1, 511 and 1020 to 1023 only, over all of K and N."""
    ta, a, tb, b = drawn((1024, 1024, 1024), dtype)
    if backend == "naive":
        rows = [0, 1, 511, 1020, 1021, 1022, 1023]
        ta, a = rounded(a[rows], dtype)
    check(xt.matmul(ta, tb, backend=backend), a, b, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 64, 64), (65, 33, 97), (1, 1, 4099), (130, 70, 2049)], ids=name_of)
def test_backends_agree(shape, dtype: str) -> None:
    """Any two backends differ by no more than the sum of what each may err."""
    ta, a, tb, b = drawn(shape, dtype, seed=1)
    results = {name: values(xt.matmul(ta, tb, backend=name)) for name in BACKENDS}
    limit = 2 * bound(a, b, dtype)
    for first in BACKENDS:
        for second in BACKENDS:
            assert (np.abs(results[first] - results[second]) <= limit).all(), f"{first} and {second}"


# float16 counts to 2048 and bfloat16 to 256 without rounding: the inputs are so small that no sum goes beyond.
@pytest.mark.parametrize(
    ("dtype", "high", "most_k"), [("float64", 9, 2000), ("float32", 9, 2000), ("float16", 2, 512), ("bfloat16", 1, 256)]
)
@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_small_integers_are_exact(shape, dtype: str, high: int, most_k: int) -> None:
    m, n, k = shape
    k = min(k, most_k)
    random = np.random.default_rng([m, n, k])
    a, b = random.integers(-high, high + 1, (m, k)), random.integers(-high, high + 1, (k, n))
    ta, tb, want = rounded(a, dtype)[0], rounded(b, dtype)[0], a @ b
    for layout in LAYOUTS:
        left, right = stored(ta, layout[0]), stored(tb, layout[1])
        for backend in BACKENDS:
            assert np.array_equal(values(xt.matmul(left, right, backend=backend)), want), f"{layout}, {backend}"


# ---- accumulation ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "stuck"), [("bfloat16", 256), ("float16", 2048)])
def test_low_precision_accumulates_in_float32(dtype: str, stuck: int) -> None:
    """Adding ones in the format itself never gets beyond 2^mantissa, where x + 1 rounds to x. In float32 8192 ones are 8192."""
    total = np.float64(0)
    for _ in range(8192):  # what a sum in the format does
        total = values(rounded(total + 1, dtype)[0])[()]
    assert total == stuck
    a, b = (xt.ones(*shape, dtype=getattr(xt, dtype)) for shape in [(3, 8192), (8192, 5)])
    for layout in LAYOUTS:
        left, right = stored(a, layout[0]), stored(b, layout[1])
        for backend in BACKENDS:
            assert (values(xt.matmul(left, right, backend=backend)) == 8192).all(), f"{layout}, {backend}"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_low_precision_gradients_accumulate_in_float32(dtype: str, backend: str) -> None:
    kind = getattr(xt, dtype)
    a, b = xt.ones(8192, 3, dtype=kind), xt.ones(3, 2, dtype=kind)
    b.requires_grad = True
    xt.matmul(a, b, backend=backend).backward(xt.ones(8192, 2, dtype=kind))
    assert (values(b.grad) == 8192).all()


# ---- layouts, strides, batches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 64, 64), (65, 33, 97), (33, 1, 31), (1, 33, 31)], ids=name_of)
def test_transposes(shape, dtype: str, backend: str, layout: str) -> None:
    ta, a, tb, b = drawn(shape, dtype)
    check(xt.matmul(stored(ta, layout[0]), stored(tb, layout[1]), backend=backend), a, b, dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_transposes_copy_nothing(layout: str) -> None:
    """A transposed view reaches the kernel as a flag: no byte is allocated but the result, forward or backward."""
    a, b = stored(xt.randn(256, 256), layout[0]), stored(xt.randn(256, 256), layout[1])
    device, one = _C.get_default_device(), 256 * 256 * 4

    def grown(work) -> int:
        before = _C.memory_stats(device)["allocated"]
        _C.memory_reset_peak(device)
        work()
        return _C.memory_stats(device)["peak"] - before

    for backend in BACKENDS:
        assert grown(lambda name=backend: xt.matmul(a, b, backend=name)) == one
    x, w = a.detach(), b.detach()
    x.requires_grad = w.requires_grad = True
    y, dy = xt.matmul(x, w), xt.ones(256, 256)
    assert grown(lambda: y.backward(dy)) <= 2 * one  # the two gradients


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides(dtype: str, backend: str) -> None:
    """Rows of a wider matrix, every second row, every second column, a repeated row and a repeated column."""
    random = np.random.default_rng(7)
    wide, a_wide = rounded(random.standard_normal((70, 130)), dtype)
    other, b_wide = rounded(random.standard_normal((130, 70)), dtype)
    one, a_one = rounded(random.standard_normal((1, 65)), dtype)
    views = [
        (wide[2:35, 3:68], a_wide[2:35, 3:68]),
        (wide[1:70:2, 3:68], a_wide[1:70:2, 3:68]),
        (wide[2:35, 0:130:2], a_wide[2:35, 0:130:2]),
        (other.T[2:35, 3:68], b_wide.T[2:35, 3:68]),
        (one.expand(33, 65), np.broadcast_to(a_one, (33, 65))),
        (one.T.expand(65, 65), np.broadcast_to(a_one.T, (65, 65))),
    ]
    rights = [
        (other[5:70, 1:32], b_wide[5:70, 1:32]),
        (other[0:130:2, 1:32], b_wide[0:130:2, 1:32]),
        (wide.T[5:70, 0:70:3], a_wide.T[5:70, 0:70:3]),
    ]
    for ta, a in views:
        for tb, b in rights:
            check(xt.matmul(ta, tb, backend=backend), a, b, dtype)


BATCHES = [
    ((3,), (3,)),
    ((3,), ()),
    ((), (3,)),
    ((2, 3), (2, 3)),
    ((2, 1), (3,)),
    ((1, 3), (2, 1)),
    ((2, 1, 3), (1, 4, 1)),
    ((2, 3, 2), (2, 1, 2)),
    ((0,), (0,)),
    ((2, 0), (1,)),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("left", "right"), BATCHES, ids=str)
def test_batches_broadcast(left, right, layout: str, dtype: str, backend: str) -> None:
    random = np.random.default_rng(11)
    ta, a = rounded(random.standard_normal((*left, 5, 33)), dtype)
    tb, b = rounded(random.standard_normal((*right, 33, 7)), dtype)
    check(xt.matmul(stored(ta, layout[0]), stored(tb, layout[1]), backend=backend), a, b, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_equals_its_products(dtype: str, backend: str) -> None:
    """The same bits as the products one by one; cuBLAS, which also computes what hopper and few refuse, may choose another kernel for a batch."""
    a, b = xt.randn(3, 65, 97).to(getattr(xt, dtype)), xt.randn(3, 97, 33).to(getattr(xt, dtype))
    together = values(xt.matmul(a, b, backend=backend))
    for i in range(3):
        alone = values(xt.matmul(a[i], b[i], backend=backend))
        if backend in ("hopper", "few", "cublas"):
            assert (np.abs(together[i] - alone) <= 2 * bound(values(a[i]), values(b[i]), dtype)).all()
        else:
            assert np.array_equal(together[i], alone)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 4, 3), (4, 0, 3), (4, 3, 0), (0, 0, 0), (0, 3, 0)], ids=name_of)
def test_empty(shape, dtype: str, backend: str) -> None:
    """M, N or K = 0, forward and backward; a sum over nothing is 0, also where memory held something else before."""
    m, n, k = shape
    kind = getattr(xt, dtype)

    def spoil() -> None:
        """0 times what is in the next blocks is not 0."""
        spoilt = [xt.full((16,), float("nan"), dtype=kind) for _ in range(6)]
        del spoilt

    a, b, dc = (xt.ones(*sizes, dtype=kind) for sizes in ((m, k), (k, n), (m, n)))
    a.requires_grad = b.requires_grad = True
    spoil()
    c = xt.matmul(a, b, backend=backend)
    assert c.shape == (m, n) and (values(c) == 0).all()
    spoil()
    c.backward(dc)
    assert a.grad.shape == (m, k) and b.grad.shape == (k, n)
    assert (values(a.grad) == n).all() and (values(b.grad) == m).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_and_infinity_pass_through(backend: str) -> None:
    a = np.ones((33, 65), np.float32)
    a[1, 2], a[3, 4] = np.nan, np.inf
    out = xt.matmul(xt.tensor(a), xt.ones(65, 17), backend=backend).cpu().numpy()
    assert np.isnan(out[1]).all() and np.isposinf(out[3]).all()
    assert (np.delete(out, [1, 3], 0) == 65).all()


# ---- gradients --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", (*DTYPES, "float64"))
@pytest.mark.parametrize("shape", [(4, 4, 4), (65, 33, 97), (1, 1, 257), (33, 1, 31)], ids=name_of)
def test_gradients(shape, dtype: str, backend: str, layout: str) -> None:
    """dA = dC B^T and dB = A^T dC, whatever the layout of A, B and dC."""
    ta, a, tb, b = drawn(shape, dtype)
    ta, tb = stored(ta, layout[0]).detach(), stored(tb, layout[1]).detach()
    ta.requires_grad = tb.requires_grad = True
    tdc, dc = rounded(np.random.default_rng(3).standard_normal((shape[0], shape[1])), dtype)
    xt.matmul(ta, tb, backend=backend).backward(stored(tdc, layout[0]))
    check(ta.grad, dc, b.T, dtype)
    check(tb.grad, a.T, dc, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_finite_differences(backend: str) -> None:
    """Central differences in float64; a product is linear in each operand, so that they are right up to rounding."""
    random = np.random.default_rng(5)
    a, b, dc = random.standard_normal((2, 3, 5)), random.standard_normal((5, 4)), random.standard_normal((2, 3, 4))
    ta, tb = xt.tensor(a), xt.tensor(b)
    ta.requires_grad = tb.requires_grad = True
    xt.matmul(ta, tb, backend=backend).backward(xt.tensor(dc))

    def loss(x, y) -> float:
        return float((xt.matmul(xt.tensor(x), xt.tensor(y), backend=backend).cpu().numpy() * dc).sum())

    for base, grad, run in (
        (a, ta.grad.cpu().numpy(), lambda x: loss(x, b)),
        (b, tb.grad.cpu().numpy(), lambda y: loss(a, y)),
    ):
        for place in np.ndindex(base.shape):
            step = np.zeros(base.shape)
            step[place] = 0.5
            assert abs(run(base + step) - run(base - step) - grad[place]) <= 1e-12 * (1 + abs(grad[place]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_accumulation_in_place(dtype: str, backend: str) -> None:
    """beta = 1: a second backward adds inside the product, to the same memory; small integers stay exact."""
    kind = getattr(xt, dtype)
    random = np.random.default_rng(9)
    a, w = (random.integers(-1, 2, s) for s in ((33, 31), (31, 5)))
    tw = xt.tensor(w.astype(np.float64)).to(kind)
    tw.requires_grad = True
    expected = np.zeros(w.shape)
    address = None
    for turn in range(3):
        x = xt.tensor((a * (turn != 1)).astype(np.float64)).to(kind)
        xt.matmul(x, tw, backend=backend).backward(xt.ones(33, 5, dtype=kind))
        expected += (a * (turn != 1)).T @ np.ones((33, 5))
        assert np.array_equal(values(tw.grad), expected)
        assert address in (None, tw.grad.data_ptr()), "the sum moved"
        address = tw.grad.data_ptr()


@pytest.mark.parametrize("backend", BACKENDS)
def test_broadcast_gradients_are_summed(backend: str) -> None:
    random = np.random.default_rng(13)
    a, b = random.integers(-3, 4, (2, 1, 5, 7)).astype(np.float32), random.integers(-3, 4, (3, 7, 4)).astype(np.float32)
    ta, tb = xt.tensor(a), xt.tensor(b)
    ta.requires_grad = tb.requires_grad = True
    dc = random.integers(-3, 4, (2, 3, 5, 4)).astype(np.float32)
    xt.matmul(ta, tb, backend=backend).backward(xt.tensor(dc))
    assert np.array_equal(ta.grad.cpu().numpy(), (dc @ b.swapaxes(-1, -2)).sum(1, keepdims=True))
    assert np.array_equal(tb.grad.cpu().numpy(), (a.swapaxes(-1, -2) @ dc).sum(0))


@pytest.fixture
def threads_back():
    before = _C.get_num_threads()
    yield
    xt.set_num_threads(before)


THREADS = (1, 2, 3, 4, 8, 16)


def bits(t) -> bytes:
    return bytes(_C.to_bytes(t.detach().cpu().contiguous()))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_no_bit(dtype: str, backend: str, threads_back) -> None:
    a, b = xt.randn(257, 513).to(getattr(xt, dtype)), xt.randn(513, 130).to(getattr(xt, dtype))
    want = bits(xt.matmul(a, b, backend=backend))
    for threads in THREADS:
        xt.set_num_threads(threads)
        assert bits(xt.matmul(a, b, backend=backend)) == want, f"{threads} threads"


# Where the blas backend cuts rows, columns and K, alone and together, also close to where calls would become too small, and more rows
# than one call takes.
CUT = [(1024, 1024, 256), (512, 768, 768), (257, 513, 1031), (49, 2049, 511), (25, 3000, 300), (2100, 65, 97)]
CUT += [(1031, 33, 257), (100, 65, 4099), (130, 2, 20011), (4100, 48, 64), (1000, 1, 5000), (1, 5000, 1000)]


def check_threads(dtype: str, shapes, layouts=LAYOUTS, backend: str = "blas") -> None:
    for shape in shapes:
        ta, _, tb, _ = drawn(shape, dtype, seed=23)
        for layout in layouts:
            a, b = stored(ta, layout[0]), stored(tb, layout[1])
            want = None
            for threads in THREADS:
                xt.set_num_threads(threads)
                got = bits(xt.matmul(a, b, backend=backend))
                want = want or got
                assert got == want, f"{name_of(shape)} {layout} {dtype}: {threads} threads"


@pytest.mark.on_cpu
@pytest.mark.parametrize("dtype", (*DTYPES, "float64", "float16"))
@pytest.mark.parametrize("shape", CUT, ids=name_of)
def test_threads_change_no_bit_of_a_cut_product(shape, dtype: str, threads_back) -> None:
    check_threads(dtype, [shape])


@pytest.mark.on_cpu
@pytest.mark.parametrize("dtype", (*DTYPES, "float64"))
def test_threads_change_no_bit_of_any_product(dtype: str, threads_back) -> None:
    """Random shapes, all large enough to be cut, in a random layout each."""
    random = np.random.default_rng(29)
    shapes = [tuple(int(2 ** random.uniform(2, 11)) for _ in range(3)) for _ in range(100)]
    for shape in shapes:
        if 4e6 < np.prod(shape) < 1e8:
            check_threads(dtype, [shape], [random.choice(LAYOUTS)])


@pytest.mark.on_cpu
@pytest.mark.parametrize("dtype", (*DTYPES, "float64"))
def test_threads_change_no_bit_of_a_batch_or_a_sum(dtype: str, threads_back) -> None:
    """A batch has the bits of its products one by one, and beta = 1 adds the same to what is there, for any number of threads."""
    kind = getattr(xt, dtype)
    a, b = xt.randn(3, 300, 200).to(kind), xt.randn(3, 200, 260).to(kind)
    w, dy = xt.randn(200, 300).to(kind), xt.randn(200, 200).to(kind)
    found = set()
    for threads in THREADS:
        xt.set_num_threads(threads)
        together = bits(xt.matmul(a, b, backend="blas"))
        assert together == b"".join(bits(xt.matmul(a[i], b[i], backend="blas")) for i in range(3)), f"{threads} threads"
        v = w.detach().clone()
        v.requires_grad = True
        for i in (0, 1):  # the second gradient is added inside the product
            xt.matmul(v, a[i], backend="blas").backward(dy)
        found.add((together, bits(v.grad)))
    assert len(found) == 1


@pytest.mark.parametrize("core", ["Prescott", "Nehalem", "Sandybridge", "Haswell", "SkylakeX"])
def test_threads_change_no_bit_with_the_kernels_of(core: str) -> None:
    """OpenBLAS has other kernels for every CPU: those that this one can run."""
    needs = {"Nehalem": "sse4.2", "Sandybridge": "avx", "Haswell": "avx2", "SkylakeX": "avx512bw"}
    if needs.get(core, "avx") not in _C.cpu_features():
        pytest.skip(f"this CPU cannot run the kernels of {core}")
    script = "import sys; sys.path.insert(0, sys.argv[1]); import test_gemm as t; t.check_cut_products()"
    environment = {**os.environ, "XTRAIN_BLAS_CORE": core}
    subprocess.run([sys.executable, "-c", script, os.path.dirname(__file__)], env=environment, check=True)


def check_cut_products() -> None:
    for dtype in ("float32", "float64"):
        check_threads(dtype, CUT[:8])


# ---- the choice of a backend ------------------------------------------------------------------------------------------------------------


@pytest.mark.on_cpu
def test_backends_of_the_cpu() -> None:
    assert xt.gemm_backends() == xt.gemm_backends(xt.device("cpu")) == ["few", "amx", "bf16", "blas", "tiled", "naive"]


def sums(backend=None) -> bytes:
    """The bits of a product that tell the backends apart: each adds in another order."""
    random = np.random.default_rng(17)
    a, b = (xt.tensor(random.standard_normal(s, dtype=np.float32)) for s in ((37, 4099), (4099, 41)))
    return xt.matmul(a, b, backend=backend).cpu().numpy().tobytes()


@pytest.mark.on_cpu
@pytest.mark.skipif(
    bool(os.environ.get("XTRAIN_SANITIZE")), reason="tiled and naive may give the same bits without optimisation"
)
def test_choices_are_obeyed() -> None:
    """By argument, by context, by nested contexts; the argument wins; the context gives the choice back, also after an error."""
    bits = {name: sums(name) for name in CPU_BACKENDS}
    assert len(set(bits.values())) == len(CPU_BACKENDS), "two backends give the same bits here: this test sees nothing"
    assert sums() == bits[CPU_BACKENDS[0]] == sums("auto")
    with xt.use_gemm_backend("naive"):
        assert sums() == bits["naive"]
        assert sums("tiled") == bits["tiled"]
        with xt.use_gemm_backend("tiled"):
            assert sums() == bits["tiled"]
        with xt.use_gemm_backend("auto"):
            assert sums() == bits[CPU_BACKENDS[0]]
        assert sums() == bits["naive"]
    with pytest.raises(ZeroDivisionError), xt.use_gemm_backend("naive"):
        raise ZeroDivisionError
    assert sums() == bits[CPU_BACKENDS[0]]


@pytest.mark.parametrize("name", BACKENDS)
def test_backward_keeps_the_choice_of_the_call(name: str) -> None:
    """The gradient runs on the backend that the call named, not on the one in force by then."""
    random = np.random.default_rng(19)
    a, b = (random.standard_normal(s, dtype=np.float32) for s in ((4099, 37), (4099, 41)))

    def gradient(backend, around) -> bytes:
        w = xt.zeros(37, 41)
        w.requires_grad = True
        with xt.use_gemm_backend(around):
            xt.matmul(xt.tensor(a), w, backend=backend).backward(xt.tensor(b))
        return w.grad.cpu().numpy().tobytes()

    assert gradient(name, "auto") == gradient(name, "naive") == gradient(None, name)


@pytest.mark.on_cpu
@pytest.mark.parametrize(
    ("value", "expected"), [(None, "blas"), ("", "blas"), ("auto", "blas"), ("tiled", "tiled"), ("naive", "naive")]
)
def test_environment(value, expected: str) -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_gemm as t; sys.exit(t.sums() != t.sums(sys.argv[2]))"
    )
    environment = {k: v for k, v in os.environ.items() if k != "XTRAIN_GEMM"} | (
        {} if value is None else {"XTRAIN_GEMM": value}
    )
    subprocess.run([sys.executable, "-c", script, os.path.dirname(__file__), expected], env=environment, check=True)


@pytest.mark.on_cpu
def test_environment_with_an_unknown_name() -> None:
    script = "import xtrain as xt; xt.matmul(xt.ones(2, 2), xt.ones(2, 2))"
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "XTRAIN_GEMM": "magic"}, capture_output=True, text=True
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "magic" in last and all(name in last for name in CPU_BACKENDS)


@pytest.mark.on_cpu
@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda: xt.matmul(xt.ones(2, 3), xt.ones(3, 2), backend="magic"),
            ValueError,
            ["matmul", "backend", "magic", *KNOWN],
        ),
        (lambda: xt.matmul(xt.ones(2, 3), xt.ones(3, 2), backend=3), TypeError, ["matmul", "backend", "int"]),
        (lambda: xt.use_gemm_backend("magic"), ValueError, ["use_gemm_backend", "magic", *KNOWN]),
        (lambda: _C.use_gemm_backend("magic"), ValueError, ["use_gemm_backend", "magic", *KNOWN]),
        (lambda: xt.gemm_backends("tpu"), ValueError, ["gemm_backends", "tpu", "cpu", "cuda"]),
        (lambda: xt.gemm_backends(3), TypeError, ["gemm_backends", "int"]),
    ],
)
def test_unknown_names_list_what_exists(call, error, words) -> None:
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


@pytest.mark.on_cpu
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(7, 9), (100, 9), (1500, 700), (33, 9000), (5000, 64), (31, 20000), (1, 300_000)]
)
def test_products_with_a_vector_are_cut_alike_for_any_number_of_threads(dtype: str, outputs: int, inputs: int) -> None:
    """A row times a matrix that lies either way, and a matrix times a column: pieces that depend on the sizes alone."""
    rng = np.random.default_rng(outputs)
    x, w = rng.standard_normal((1, inputs)), rng.standard_normal((outputs, inputs))
    a, rows, columns = (_C.tensor(v.astype(dtype)) for v in (x, w, np.ascontiguousarray(w.T)))
    before, found = _C.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            _C.set_num_threads(threads)
            made = _C.linear(a, rows), _C.matmul(a, columns), _C.transpose(_C.matmul(rows, _C.transpose(a, 0, 1)), 0, 1)
            found.append([one.numpy().copy() for one in made])
    finally:
        _C.set_num_threads(before)
    want, size = x @ w.T, np.abs(x) @ np.abs(w).T
    unit = np.finfo(dtype).eps
    for one in found:
        for got, first in zip(one, found[0], strict=True):
            assert got.tobytes() == first.tobytes()
            assert (np.abs(got - want) <= unit * inputs**0.5 * 2 * size).all()
