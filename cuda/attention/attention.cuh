/* attention.cuh - what the implementations of attention share. Formulas: contract/attention.h. */
#ifndef XT_ATTENTION_CUH
#define XT_ATTENTION_CUH

#include "common/cuda.cuh"
#include "contract/attention.h"

#include <math.h>

XtStatus xt_cuda_attention_flash_fwd(const XtAttentionFwd *p); /* what does not suit it goes to the next */
XtStatus xt_cuda_attention_flash_bwd(const XtAttentionBwd *p);
XtStatus xt_cuda_attention_flash_half_fwd(const XtAttentionFwd *p); /* flash of bfloat16 and float16; hands on likewise */
XtStatus xt_cuda_attention_flash_half_bwd(const XtAttentionBwd *p);
XtStatus xt_cuda_attention_materialized_fwd(const XtAttentionFwd *p);
XtStatus xt_cuda_attention_materialized_bwd(const XtAttentionBwd *p);
XtStatus xt_cuda_attention_reference_fwd(const XtAttentionFwd *p); /* any shape, any strides */
XtStatus xt_cuda_attention_reference_bwd(const XtAttentionBwd *p);

extern const XtAttentionBackend xt_cuda_attention[];

/* How many keys query `row` sees: a causal square ends in the lower right corner, at key row + (skv - sq). */
template <typename I> __host__ __device__ inline I xt_visible_columns(bool causal, I row, I sq, I skv) {
    if (!causal) return skv;
    I seen = skv - (sq - row) + 1;
    return seen < 0 ? 0 : seen;
}

/* ---- what both kinds of flash ask of a call ------------------------------------------------------------------------------------ */

/* Whether every row of x [batch, heads, rows, D] starts at a multiple of 16 bytes; `width` elements have these. */
inline bool xt_attention_aligned(const void *x, const int64_t stride[3], int64_t batch, int64_t heads, int64_t rows, int width) {
    const int64_t shape[3] = {batch, heads, rows};
    for (int i = 0; i < 3; i++)
        if (shape[i] > 1 && stride[i] % width != 0) return false;
    return (uintptr_t)x % 16 == 0;
}

/* Whether there is something to do, and rows, heads and blocks of 64 rows can be counted in 32 bits. */
template <typename P> inline bool xt_attention_fits_int(const P *p) {
    const int64_t most = 1 << 30;
    if (p->batch <= 0 || p->heads <= 0 || p->sq <= 0 || p->skv <= 0 || p->sq >= most || p->skv >= most) return false;
    if (p->batch >= most || p->heads >= most || p->batch * p->heads >= most) return false;
    return p->batch * p->heads * xt_divide_up(p->sq > p->skv ? p->sq : p->skv, 64) < most;
}

/* Lets a kernel have that much shared memory. */
template <typename Kernel> inline XtStatus xt_attention_allow(Kernel kernel, int bytes) {
    if (bytes <= 48 * 1024) return XT_OK;
    return xt_cuda_error("attention", cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
}

#endif
