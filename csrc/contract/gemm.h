/* gemm.h - the matrix product and its named implementations. The rules for all kernels are in kernels.h. */
#ifndef XT_CONTRACT_GEMM_H
#define XT_CONTRACT_GEMM_H

#include "xtrain.h"

#ifdef __cplusplus
extern "C" {
#endif

/* C[b0,b1] = alpha * op(A[b0,b1]) op(B[b0,b1]) + beta * C[b0,b1], row-major. op(A) is M x K, op(B) is K x N, C is M x N.
 * Stored A has rows of `lda` elements: A[m * lda + k], or A[k * lda + m] when trans_a; B and C alike (C is never transposed).
 * Batch strides may be 0 (broadcast) for A and B. One dtype for all three; ACC accumulation; beta == 0 never reads C; K == 0 scales C.
 * Leading dimensions are >= the row length; columns have stride 1. tf32: float32 operands may be rounded to TF32 (10 mantissa bits)
 * on devices that have such units; sums stay float32. */
typedef struct XtGemm {
    void *c;
    const void *a, *b;
    XtDtype dtype;
    bool tf32;
    int64_t m, n, k;
    bool trans_a, trans_b;
    int64_t lda, ldb, ldc;
    int64_t batch[2];
    int64_t stride_a[2], stride_b[2], stride_c[2];
    double alpha, beta;
} XtGemm;

/* A named implementation. The first usable one of a table is what "auto" picks, unless an environment variable or a context says
 * otherwise. */
typedef struct XtGemmBackend {
    const char *name;
    XtStatus (*run)(const XtGemm *p);
    bool (*usable)(void); /* NULL: always; asked for "auto" and for a list of names: asking may open a library */
} XtGemmBackend;

#ifdef __cplusplus
}
#endif

#endif
