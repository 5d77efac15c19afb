/* gemv.cu - C = alpha A W^T + beta C for few rows of A, as in a step of generation: W [N, K] is read once, at the speed of memory.
 *
 * Plan: a warp has a row of W, an element of C for each row of A. Its lanes take 16 bytes of W in turn, with as many loads under way as
 * the unrolled loop has; A, a few KiB, comes from L1. Bytes moved: W once, A from memory once.
 *
 * Each element: a sum per lane over its k in order, in ACC, then a tree over the lanes. The same for every number of rows.
 * Chosen by name only ("gemv"): cuBLAS is asked first, and tiled takes everything else.
 */
#include "gemm.cuh"

enum {
    WARPS = 4,     /* of a block */
    MOST_ROWS = 8, /* of A */
};

template <typename T, typename C, int M>
__global__ void __launch_bounds__(32 * WARPS) gemv_kernel(XtGemm p) { // A [m <= M, K], W [N, K] of T, C [m, N]
    constexpr int W = XT_WIDTH<T>;
    const int lane = threadIdx.x % 32;
    for (int64_t n = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32; n < p.n; n += (int64_t)gridDim.x * WARPS) {
        const T *w = (const T *)p.b + n * p.ldb; // [K]
        float sum[M] = {};
#pragma unroll 4
        for (int64_t k = lane * W; k < p.k; k += 32 * W) {
            const XtVector<T, W> row = xt_elements(xt_read<T, W>(w + k));
#pragma unroll
            for (int m = 0; m < M; m++) {
                if (m >= p.m) break;
                const XtVector<T, W> x = xt_elements(xt_read<T, W>((const T *)p.a + m * p.lda + k));
#pragma unroll
                for (int e = 0; e < W; e++) sum[m] += xt_load(x.at[e]) * xt_load(row.at[e]);
            }
        }
#pragma unroll
        for (int m = 0; m < M; m++) {
            if (m >= p.m) break;
            float value = (float)p.alpha * xt_warp_sum(sum[m]);
            C *c = (C *)p.c + m * p.ldc + n;
            if (lane == 0) *c = xt_store<C>(p.beta == 0 ? value : value + (float)p.beta * xt_load(*c));
        }
    }
}

const char *xt_cuda_gemm_gemv_supports(const XtGemm *p, const XtDeviceTraits *device) {
    (void)device;
    const char *reason = xt_gemm_dtypes(p);
    if (reason) return reason;
    const int64_t width = (int64_t)(16 / xt_dtype_size(p->dtype_a));
    if (p->dtype_a == XT_FLOAT64) return "float64";
    if (p->m > MOST_ROWS) return "M is above 8";
    if (p->batch[0] != 1 || p->batch[1] != 1) return "a batch";
    if (p->trans_a || !p->trans_b) return "B is not transposed, or A is";
    if (p->k % width || p->lda % width || p->ldb % width || (uintptr_t)p->a % 16 || (uintptr_t)p->b % 16)
        return "rows are not aligned to 16 bytes";
    return NULL;
}

XtStatus xt_cuda_gemm_gemv(const XtGemm *p) {
    XtStatus status;
    if (xt_cuda_gemm_trivial(p, &status)) return status;
    return xt_by_gemm_dtypes(p, [&](auto a, auto c) {
        using T = decltype(a);
        using C = decltype(c);
        if constexpr (sizeof(T) < 8) {
            const unsigned blocks = xt_blocks(p->n, WARPS);
            if (p->m == 1) xt_launch(gemv_kernel<T, C, 1>, blocks, 32 * WARPS, 0, *p);
            else if (p->m <= 4) xt_launch(gemv_kernel<T, C, 4>, blocks, 32 * WARPS, 0, *p);
            else xt_launch(gemv_kernel<T, C, MOST_ROWS>, blocks, 32 * WARPS, 0, *p);
        }
        return xt_launched("gemm_gemv", p->m, p->n, p->k);
    });
}
