"""Products of bfloat16 in AMX tiles (csrc/cpu/gemm/amx.c), and in AVX512-BF16 instructions where that is the same code: compiled with
emulate.h, which has their instructions in plain C, so that any CPU runs their loops, packing and tails. At the end what a CPU that has
AMX does."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import numpy as np
import pytest
from emulated import GUARD, at_the_end_of_memory, bits_of, compiled, wide

import xtrain as xt
from xtrain import _C

pytestmark = pytest.mark.on_cpu
REASON = _C.explain_gemm((4, 4, 4), "bfloat16", backend="amx")[0][2]
HAS = REASON is None
needs_tiles = pytest.mark.skipif(not HAS, reason="this process may use no AMX tiles")
FLOAT32, BFLOAT16 = 0, 2
Two = ctypes.c_int64 * 2


class Gemm(ctypes.Structure):
    """XtGemm."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("c", "extra", "a", "b", "bias")]
    _fields_ += [(name, ctypes.c_int) for name in ("dtype_a", "dtype_b", "dtype_c")]
    _fields_ += [("tf32", ctypes.c_bool), *((name, ctypes.c_int64) for name in "mnk")]
    _fields_ += [("trans_a", ctypes.c_bool), ("trans_b", ctypes.c_bool)]
    _fields_ += [(name, ctypes.c_int64) for name in ("lda", "ldb", "ldc")]
    _fields_ += [(name, Two) for name in ("batch", "stride_a", "stride_b", "stride_c")]
    _fields_ += [("alpha", ctypes.c_double), ("beta", ctypes.c_double), ("epilogue", ctypes.c_int)]


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    return compiled(tmp_path_factory.mktemp("amx"), "gemm/bf16.c")


def flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < 2.0**-126, np.float32(0), x).astype(np.float32)


def by_tiles(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """float32 [M, N] as Intel's manual has tdpbf16ps: in each 32 of k the even elements and the odd ones, which meet, and then C."""
    fill = -a.shape[1] % 32
    a, b = (flushed(np.pad(x, p)) for x, p in ((a, ((0, 0), (0, fill))), (b, ((0, fill), (0, 0)))))
    total = np.zeros((len(a), b.shape[1]), np.float32)
    for k in range(0, len(b), 32):
        halves = np.zeros((2, *total.shape), np.float32)
        for i in range(32):  # a product is exact in float64, and so is its sum with a float32, nearly always
            halves[i % 2] = flushed(
                (halves[i % 2] + a[:, k + i, None].astype(np.float64) * b[k + i]).astype(np.float32)
            )
        total = flushed(total + flushed(halves[0] + halves[1]))
    return total


def by_pairs(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """float32 [M, N] as vdpbf16ps adds: the odd element of each pair of k first."""
    a, b = (flushed(np.pad(x, p)) for x, p in ((a, ((0, 0), (0, a.shape[1] % 2))), (b, ((0, b.shape[0] % 2), (0, 0)))))
    total = np.zeros((len(a), b.shape[1]), np.float32)
    for pair in range(0, len(b), 2):
        for k in (pair + 1, pair):
            total = flushed((total + a[:, k, None].astype(np.float64) * b[k]).astype(np.float32))
    return total


DEFINED = {"amx": by_tiles, "bf16": by_pairs}


def surround(x: np.ndarray, behind: int) -> np.ndarray:
    """x [..., rows, columns] as columns of rows that are `behind` longer, with a row of guards at the end of all."""
    rows = np.full((*x.shape[:-1], x.shape[-1] + behind), GUARD, x.dtype)
    rows[..., : x.shape[-1]] = x
    return np.concatenate([rows.reshape(-1), np.full(64, GUARD, x.dtype)])


def multiply(
    library,
    name,
    a,
    b,
    layout="nn",
    c=None,
    alpha=1.0,
    beta=0.0,
    threads=1,
    behind=(0, 0, 0),
    dtype=BFLOAT16,
    place=surround,
):
    """C of uint16 arrays a [batch, M, K] and b [batch, K, N], as bits; the guards are unharmed."""
    batch, m, k = a.shape
    n = b.shape[2]
    kind = np.uint16 if dtype == BFLOAT16 else np.float32
    start = np.full((batch, m, n), GUARD, kind) if c is None else c
    lay = [np.ascontiguousarray(x.swapaxes(1, 2)) if t == "t" else x for x, t in zip((a, b), layout)]
    arrays = [place(x, s) for x, s in zip((*lay, start), behind)]
    p = Gemm(
        c=arrays[2].ctypes.data, a=arrays[0].ctypes.data, b=arrays[1].ctypes.data, m=m, n=n, k=k, alpha=alpha, beta=beta
    )
    p.dtype_a, p.dtype_b, p.dtype_c, p.trans_a, p.trans_b = (
        BFLOAT16,
        BFLOAT16,
        dtype,
        layout[0] == "t",
        layout[1] == "t",
    )
    p.lda, p.ldb, p.ldc = lay[0].shape[2] + behind[0], lay[1].shape[2] + behind[1], n + behind[2]
    p.batch, p.stride_a, p.stride_b = Two(1, batch), Two(0, p.lda * lay[0].shape[1]), Two(0, p.ldb * lay[1].shape[1])
    p.stride_c = Two(0, p.ldc * m)
    assert library.xt_set_num_threads(threads) == 0
    assert getattr(library, f"xt_gemm_{name}")(ctypes.byref(p)) == 0, library.xt_error_message()
    rows = arrays[2][: batch * m * (n + behind[2])].reshape(batch, m, n + behind[2])
    assert (arrays[2][rows.size :] == GUARD).all() and (rows[..., n:] == GUARD).all(), "written beside C"
    return rows[..., :n].copy()


def drawn(m: int, n: int, k: int, batch: int = 1) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng([m, n, k])
    return tuple(bits_of(random.standard_normal((batch, *s)).astype(np.float32)) for s in ((m, k), (k, n)))


# M x N x K: each number of tiles of C and their tails; K in whole tiles, read in place, and with tails; several blocks of K
SHAPES = [(1, 1, 1), (15, 16, 31), (16, 17, 32), (17, 15, 33), (31, 33, 64), (32, 32, 96), (33, 31, 2), (48, 65, 160)]
SHAPES += [(257, 40, 64), (20, 130, 515), (40, 20, 1024), (33, 18, 1057)]


@pytest.mark.parametrize("name", ["amx", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_emulated_bits_are_those_of_the_instruction(library, name: str, shape) -> None:
    """In every layout, from rows that lie apart, and beside what follows them."""
    m, n, k = shape
    a, b = drawn(m, n, k)
    sums = DEFINED[name](wide(a[0]), wide(b[0]))
    for layout in ("nn", "nt", "tn", "tt"):
        for behind in ((0, 0, 0), (5, 3, 7)):
            assert np.array_equal(multiply(library, name, a, b, layout, behind=behind)[0], bits_of(sums)), (
                layout,
                behind,
            )
    assert np.array_equal(multiply(library, name, a, b, dtype=FLOAT32)[0], sums)


@pytest.mark.parametrize("name", ["amx", "bf16"])
def test_emulated_sums_are_scaled_and_added(library, name: str) -> None:
    a, b = drawn(37, 45, 70)
    sums = DEFINED[name](wide(a[0]), wide(b[0]))
    c = np.random.default_rng(1).standard_normal((1, 37, 45)).astype(np.float32)
    scaled, half = (np.float32(-1.5) * sums).astype(np.float32), np.float64(0.5)
    want = (half * c[0] + scaled).astype(np.float32)
    assert np.array_equal(multiply(library, name, a, b, c=c, alpha=-1.5, beta=0.5, dtype=FLOAT32)[0], want)
    low = bits_of(c)
    want = bits_of((half * wide(low[0]) + scaled).astype(np.float32))
    assert np.array_equal(multiply(library, name, a, b, c=low, alpha=-1.5, beta=0.5, behind=(1, 1, 1))[0], want)


@pytest.mark.parametrize("name", ["amx", "bf16"])
def test_emulated_threads_and_batches_change_no_bit(library, name: str) -> None:
    for m, n, k, batch in ((520, 70, 600, 1), (90, 300, 40, 3), (20, 30, 50, 9)):
        a, b = drawn(m, n, k, batch)
        alone = np.concatenate([multiply(library, name, a[i : i + 1], b[i : i + 1]) for i in range(batch)])
        for threads in (1, 2, 5):
            assert np.array_equal(multiply(library, name, a, b, threads=threads), alone), threads


@pytest.mark.parametrize("name", ["amx", "bf16"])
def test_emulated_kernels_touch_nothing_behind_an_operand(library, name: str) -> None:
    """The process would end."""
    for shape in ((20, 17, 64), (1, 1, 32), (33, 31, 35), (47, 63, 1)):
        a, b = drawn(*shape)
        for layout in ("nn", "nt", "tn", "tt"):
            multiply(library, name, a, b, layout, place=lambda x, behind: at_the_end_of_memory(x))


def test_emulated_tiles_are_released(library) -> None:
    multiply(library, "amx", *drawn(520, 70, 600), threads=3)
    assert ctypes.c_int.in_dll(library, "tiles_in_use").value == 0


def test_emulated_infinities_stay_in_their_row(library) -> None:
    """What fills the end of K, of rows and of columns is zero in both operands, whatever the memory held before."""
    multiply(library, "amx", *(np.full((1, *s), 0x7FC0, np.uint16) for s in ((33, 96), (96, 32))))
    a, b = (np.full((1, *s), 0x3F80, np.uint16) for s in ((33, 65), (65, 17)))
    a[0, 1, 2], a[0, 3, 64] = 0x7FC0, 0x7F80
    out = wide(multiply(library, "amx", a, b, behind=(3, 3, 3))[0])
    assert np.isnan(out[1]).all() and np.isposinf(out[3]).all() and (np.delete(out, [1, 3], 0) == 65).all()


def test_emulated_subnormals_count_as_zero(library) -> None:
    tiny, small, large = (np.full((1, 2, 2), bits, np.uint16) for bits in (0x0008, 0x1C80, 0x7180))
    for x, y, value in ((tiny, large, 0), (small, small, 0), (small, large, 2.0**31)):
        assert (wide(multiply(library, "amx", x, y)) == value).all()


# ---- a CPU that has them ----------------------------------------------------------------------------------------------------------


@needs_tiles
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_bits_are_those_of_the_instruction(shape) -> None:
    a, b = (wide(x[0]) for x in drawn(*shape))
    want = bits_of(by_tiles(a, b)).tobytes()
    found = xt.matmul(*(xt.tensor(x).to(xt.bfloat16) for x in (a, b)), backend="amx")
    assert bits_of(found.float().numpy()).tobytes() == want


def chosen(**environment: str) -> str:
    code = "from xtrain import _C; print(next(r[0] for r in _C.explain_gemm((64, 64, 64), 'bfloat16') if r[2] is None))"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("XTRAIN_")}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**kept, **environment}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_the_environment_turns_it_off() -> None:
    """XTRAIN_AMX also where the kernel is asked by name, and before the process asks for tiles."""
    low = "bf16" if "avx512bf16" in _C.cpu_features() else "blas"
    assert chosen() == ("amx" if HAS else low)
    assert chosen(XTRAIN_AMX="0") == low == chosen(XTRAIN_GEMM="bf16")
    if REASON == "amx is not built for this CPU":
        return
    code = "from xtrain import _C; print(_C.explain_gemm((64, 64, 64), 'bfloat16', backend='amx')[0][2])"
    environment = {**os.environ, "XTRAIN_AMX": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "XTRAIN_AMX is 0\n"


SMALL_STACK = """
import ctypes
class Stack(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
room = ctypes.create_string_buffer(6144)
stack = Stack(ctypes.addressof(room), 0, 6144)
assert ctypes.CDLL(None, use_errno=True).sigaltstack(ctypes.byref(stack), None) == 0, ctypes.get_errno()
from xtrain import _C
print([row[2] for row in _C.explain_gemm((64, 64, 64), "bfloat16") if row[0] == "amx"])
"""


@needs_tiles
def test_a_small_stack_for_signals_leaves_the_process_without_tiles() -> None:
    done = subprocess.run([sys.executable, "-c", SMALL_STACK], capture_output=True, text=True)
    assert done.stdout == "['the kernel refuses AMX tiles to this process']\n", done.stderr


FORK = """
import os, xtrain as xt
xt.set_num_threads(2)
a, b = (xt.randn(512, 512).to(xt.bfloat16) for _ in range(2))
bits = lambda: xt.matmul(a, b, backend="amx").float().numpy().tobytes()
before = bits()
for _ in range(3):
    pid = os.fork()
    if pid == 0:
        os._exit(0 if bits() == before else 1)
    assert os.waitpid(pid, 0)[1] == 0
assert bits() == before
"""


@needs_tiles
def test_a_child_has_the_tiles_of_its_parent() -> None:
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=120)
