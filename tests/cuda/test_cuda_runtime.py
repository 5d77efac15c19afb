"""What cuda/runtime promises at its edges: memory that another library still uses, an index out of range on the way, waiting after every
slot, and a product that cuBLASLt refuses after all."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess

import pytest
from runs import HANGS, python

import xtrain as xt
import xtrain.functional as F

pytestmark = [
    pytest.mark.on_cpu,
    pytest.mark.skipif(not xt.cuda.is_available(), reason="needs an NVIDIA GPU (make test-gpu)"),
]


def test_memory_that_the_legacy_stream_reads_is_not_used_again_before() -> None:
    """Lent through DLPack to a consumer on the default stream, and back while the consumer's copy is queued behind long work."""
    cuda, legacy, n = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(1), 1 << 20

    def address(t: xt.Tensor) -> ctypes.c_void_p:
        return ctypes.c_void_p(t.data_ptr())

    busy = xt.empty(1 << 30, dtype=xt.uint8, device="cuda")
    lent, seen = xt.full((n,), 1.0, device="cuda"), xt.zeros(n, device="cuda")
    capsule, place = lent.__dlpack__(stream=1), lent.data_ptr()
    for _ in range(300):  # some 0.1 s
        assert cuda.cuMemsetD8Async(address(busy), 0, ctypes.c_size_t(busy.nbytes), legacy) == 0
    assert cuda.cuMemcpyDtoDAsync_v2(address(seen), address(lent), ctypes.c_size_t(4 * n), legacy) == 0
    del lent, capsule
    again = xt.full((n,), 7.0, device="cuda")
    assert again.data_ptr() == place
    assert cuda.cuStreamSynchronize(legacy) == 0
    assert seen.amin().item() == seen.amax().item() == 1.0


def test_another_library_waits_for_what_makes_the_tensor() -> None:
    """Its stream copies the tensor at once, while what fills it is queued behind long work."""
    cuda, stream, n = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), 1 << 20
    x, lent, seen = xt.rand(6000, 6000, device="cuda"), xt.zeros(n, device="cuda"), xt.zeros(n, device="cuda")
    xt.cuda.synchronize()
    assert cuda.cuStreamCreate(ctypes.byref(stream), 1) == 0  # CU_STREAM_NON_BLOCKING: it waits for no default stream
    products = [xt.matmul(x, x, backend="naive") for _ in range(3)]  # some 0.1 s each
    lent.fill_(7.0)
    capsule = lent.__dlpack__(stream=stream.value)
    places = (ctypes.c_void_p(t.data_ptr()) for t in (seen, lent))
    assert cuda.cuMemcpyDtoDAsync_v2(*places, ctypes.c_size_t(4 * n), stream) == 0
    assert cuda.cuStreamSynchronize(stream) == 0
    assert seen.amin().item() == seen.amax().item() == 7.0
    del capsule, products
    assert cuda.cuStreamDestroy_v2(stream) == 0


def test_memory_goes_back_although_an_index_was_out_of_range() -> None:
    xt.cuda.empty_cache()
    large = xt.empty(1 << 29, dtype=xt.uint8, device="cuda")
    reserved = xt.cuda.memory_reserved()
    del large  # kept by the driver's pool
    F.embedding(xt.tensor([1, 10, 3], device="cuda"), xt.ones(10, 4, device="cuda"))
    with pytest.raises(IndexError, match="embedding: id must be"):
        xt.cuda.empty_cache()
    assert xt.cuda.memory_reserved() <= reserved - (1 << 29)


@pytest.mark.parametrize(("value", "status"), [("1", 0), ("0", 600)])  # done, and CUDA_ERROR_NOT_READY
def test_the_stream_is_done_after_every_slot_that_waits(value: str, status: int) -> None:
    code = """
import ctypes
import xtrain as xt
x = xt.rand(6000, 6000, device="cuda")
xt.cuda.synchronize()
stream = ctypes.c_void_p(xt.cuda.current_stream())
y = xt.matmul(x, x, backend="naive")
print(ctypes.CDLL("libcuda.so.1").cuStreamQuery(stream))
"""
    done = python("-c", code, env={**os.environ, "XTRAIN_CUDA_SYNC": value})
    assert done.stdout == f"{status}\n", done.stdout + done.stderr


# Offers an algorithm for every product, and then computes none.
REFUSES = """
#include <stddef.h>
#include <string.h>
static char made;
#define MAKE(name) int name(void **out) { return *out = &made, 0; }
#define TAKE(name) int name(void) { return 0; }
MAKE(cublasLtCreate) MAKE(cublasLtMatmulDescCreate) MAKE(cublasLtMatrixLayoutCreate) MAKE(cublasLtMatmulPreferenceCreate)
TAKE(cublasLtMatmulDescSetAttribute) TAKE(cublasLtMatmulDescDestroy) TAKE(cublasLtMatrixLayoutSetAttribute)
TAKE(cublasLtMatrixLayoutDestroy) TAKE(cublasLtMatmulPreferenceSetAttribute) TAKE(cublasLtMatmulPreferenceDestroy)
size_t cublasLtGetVersion(void) { return 130000; }
const char *cublasLtGetStatusName(int status) { return status == 14 ? "INTERNAL_ERROR" : "another"; }
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *desc, void *a, void *b, void *c, void *d, void *preference, int wanted,
                                   void *choices, int *found) {
    (void)handle, (void)desc, (void)a, (void)b, (void)c, (void)d, (void)preference, (void)wanted;
    return memset(choices, 0, 96), *found = 1, 0;
}
int cublasLtMatmulAlgoConfigGetAttribute(void) { return 15; }
int cublasLtMatmulAlgoConfigSetAttribute(void) { return 15; }
int cublasLtMatmulAlgoCheck(void) { return 15; }
int cublasLtMatmul(void) { return 14; }
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_product_that_the_library_refuses_after_its_offer_is_an_error(tmp_path) -> None:
    """A library of that name is loaded already."""
    source = tmp_path / "refuses.c"
    source.write_text(REFUSES)
    fake = tmp_path / f"libcublasLt.so.{xt.cuda.get_device_properties()['runtime'] // 1000}"
    build = ["cc", "-shared", "-fPIC", "-Wall", "-Werror", source, "-o", fake, f"-Wl,-soname,{fake.name}"]
    subprocess.run(build, check=True, timeout=HANGS)
    code = """
import xtrain as xt
try:
    xt.matmul(xt.ones(33, 65, device="cuda"), xt.ones(65, 17, device="cuda"), backend="cublas")
except xt.CudaError as error:
    print(error)
"""
    done = python("-c", code, env={**os.environ, "LD_PRELOAD": str(fake)})
    want = "gemm: cublasLtMatmul failed with INTERNAL_ERROR (14) for float32, M 33, N 17, K 65, batch (1, 1)\n"
    assert done.stdout == want, done.stdout + done.stderr
