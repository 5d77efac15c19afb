/* attention.cuh - what the implementations of attention share. The formulas are in kernels.h. */
#ifndef XT_ATTENTION_CUH
#define XT_ATTENTION_CUH

#include "cuda.cuh"

#include <math.h>

XtStatus xt_cuda_attention_flash_fwd(const XtAttentionFwd *p); /* what does not suit it goes to the next */
XtStatus xt_cuda_attention_flash_bwd(const XtAttentionBwd *p);
XtStatus xt_cuda_attention_materialized_fwd(const XtAttentionFwd *p);
XtStatus xt_cuda_attention_materialized_bwd(const XtAttentionBwd *p);
XtStatus xt_cuda_attention_reference_fwd(const XtAttentionFwd *p); /* any shape, any strides */
XtStatus xt_cuda_attention_reference_bwd(const XtAttentionBwd *p);

/* How many keys query `row` sees: a causal square ends in the lower right corner, at key row + (skv - sq). */
template <typename I> __host__ __device__ inline I xt_visible_columns(bool causal, I row, I sq, I skv) {
    if (!causal) return skv;
    I seen = skv - (sq - row) + 1;
    return seen < 0 ? 0 : seen;
}

#endif
