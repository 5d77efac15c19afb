/* gemm.cuh - what the matrix products on CUDA share: the named GEMMs, the trivial cases, offsets in a batch.
 *
 * Every backend agrees on the corners, with each other and with the CPU: M, N or a batch of 0 does nothing; K == 0 or alpha == 0
 * scales C without reading A or B; beta == 0 writes C without reading it.
 */
#pragma once

#include "common/cuda.cuh"
#include "contract/gemm.h"

XtStatus xt_cuda_gemm_few(const XtGemm *p);    /* up to 16 rows of 16 bits: a step of generation */
XtStatus xt_cuda_gemm_naive(const XtGemm *p);  /* one thread an element: the specification */
XtStatus xt_cuda_gemm_tiled(const XtGemm *p);  /* tiles in shared memory and registers: no library needed */
XtStatus xt_cuda_gemm_cublas(const XtGemm *p); /* cuBLASLt, found at run time */
XtStatus xt_cuda_gemm_hopper(const XtGemm *p); /* Hopper's tensor cores: products with an epilogue */
const char *xt_cuda_gemm_few_supports(const XtGemm *p, const XtDeviceTraits *device);
const char *xt_cuda_gemm_cublas_supports(const XtGemm *p, const XtDeviceTraits *device);
const char *xt_cuda_gemm_hopper_supports(const XtGemm *p, const XtDeviceTraits *device);

extern const XtGemmBackend xt_cuda_gemm[];  /* hopper, few, cublas, tiled, naive */
XtStatus xt_cuda_multiply(const XtGemm *p); /* selects and runs: what other kernels call */

/* Whether there is a sum to compute: C has elements, and not all of them are beta times what was there. */
inline bool xt_gemm_multiplies(const XtGemm *p) {
    return p->m > 0 && p->n > 0 && p->batch[0] > 0 && p->batch[1] > 0 && p->k > 0 && p->alpha != 0.0;
}
/* True when there is nothing left to do: C is empty, or K == 0 or alpha == 0 and C is being scaled by beta. */
bool xt_cuda_gemm_trivial(const XtGemm *p, XtStatus *status);

/* f(a zero of the dtype of A and B, a zero of the dtype of C): a kernel has both as template parameters. */
template <typename F> static XtStatus xt_by_gemm_dtypes(const XtGemm *p, F f) {
    return xt_by_float(p->dtype_a, [&](auto zero) {
        if constexpr (sizeof zero == 2)
            if (p->dtype_c == XT_FLOAT32) return f(zero, 0.0f);
        return f(zero, zero);
    });
}

/* One matrix of a batch: the flat batch index as offsets in elements. */
typedef struct XtGemmOffsets {
    int64_t a, b, c;
} XtGemmOffsets;
__host__ __device__ inline XtGemmOffsets xt_gemm_offsets(const XtGemm *p, int64_t index) {
    int64_t i = index / p->batch[1], j = index % p->batch[1];
    XtGemmOffsets at = {i * p->stride_a[0] + j * p->stride_a[1], i * p->stride_b[0] + j * p->stride_b[1],
                        i * p->stride_c[0] + j * p->stride_c[1]};
    return at;
}

/* From a matrix's first element to its last. */
inline int64_t xt_matrix_span(int64_t rows, int64_t cols, int64_t ld) { return (rows - 1) * ld + cols; }

inline const void *xt_moved(const void *x, int64_t elements, XtDtype dtype) {
    return (const char *)x + elements * (int64_t)xt_dtype_size(dtype);
}
