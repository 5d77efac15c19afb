/* gemm.h - the matrix product and its named implementations. The rules for all kernels are in kernels.h. */
#pragma once

#include "contract/traits.h"
#include "xtrain.h"

/* What becomes of a product besides C, for one matrix with alpha 1, beta 0 and one dtype of 16 bits; of these only GELU has a bias. Which
 * implementations have it is theirs to say; each has the bits of the product, rounded to the dtype, followed by the slot of that name. */
typedef enum XtGemmEpilogue {
    XT_GEMM_PRODUCT = 0, /* nothing */
    XT_GEMM_SWIGLU,      /* C is gate and up side by side; extra [M, N / 2], dense, gets silu(gate) up */
    XT_GEMM_SWIGLU_BWD,  /* C [M, 2 N] holds gate and up and gets their gradients, dy being the product, which is not written; extra
                          * [M, N], dense, or NULL, gets silu(gate) up */
    XT_GEMM_GELU,        /* C without the bias; extra [M, N], dense, gets gelu(C + bias), by tanh */
    XT_GEMM_GELU_BWD /* C holds v and gets dy gelu'(v + bias), dy being the product, which is not written; extra, or NULL, gets sums of
                          * its rows, XT_GEMM_SUMS for each XT_GEMM_SUMMED of them, dense, in float32 */
} XtGemmEpilogue;
enum { XT_GEMM_SUMMED = 128, XT_GEMM_SUMS = 4 };

/* C[b0,b1] = alpha * op(A[b0,b1]) op(B[b0,b1]) + beta * C[b0,b1] + bias, row-major. op(A) is M x K, op(B) is K x N, C is M x N.
 * Stored A has rows of `lda` elements: A[m * lda + k], or A[k * lda + m] when trans_a; B and C alike (C is never transposed).
 * Batch strides may be 0 (broadcast) for A and B. Sums in ACC of C's dtype; beta == 0 never reads C; K == 0 scales C.
 * A, B and C have one floating point dtype, or A and B one of 16 bits and C float32: its sums are not rounded, and products that
 * follow with beta == 1 go on from them. What no implementation takes is refused by name.
 * Leading dimensions are >= the row length; columns have stride 1. tf32: float32 operands may be rounded to TF32 (10 mantissa bits)
 * on devices that have such units; sums stay float32. bias [N], or NULL: of C's dtype, added to the sum in ACC, before the one rounding.
 * An implementation that adds none refuses it, and the caller adds it. */
typedef struct XtGemm {
    void *c, *extra; /* extra: of an epilogue, else NULL */
    const void *a, *b, *bias;
    XtDtype dtype_a, dtype_b, dtype_c;
    bool tf32;
    int64_t m, n, k;
    bool trans_a, trans_b;
    int64_t lda, ldb, ldc;
    int64_t batch[2];
    int64_t stride_a[2], stride_b[2], stride_c[2];
    double alpha, beta;
    XtGemmEpilogue epilogue;
} XtGemm;

/* A row of a device's table of implementations. The preferred rows come first, and a NULL name ends the table. */
typedef struct XtGemmBackend {
    const char *name;        /* what users choose */
    const char *kernel;      /* the stem of its source file; rows of one name stand together and differ in this */
    XtStatus (*check)(void); /* NULL: it runs on every machine. Else XT_OK, or the error that names what this machine lacks */
    const char *(*supports)(const XtGemm *p, const XtDeviceTraits *device); /* NULL: it does p; else why not, in a few words */
    XtStatus (*run)(const XtGemm *p);                                       /* of a problem that it supports */
} XtGemmBackend;

/* The choice: the first row, from `first` on, that supports p; a NULL name when there is none. A function of its arguments alone.
 * No implementation hands a problem on to another: this is where that is decided. */
static inline const XtGemmBackend *xt_gemm_select(const XtGemmBackend *first, const XtGemm *p, const XtDeviceTraits *device) {
    while (first->name && first->supports(p, device)) first++;
    return first;
}

/* What all implementations ask that have no epilogue and add no bias. NULL, or the reason. */
static inline const char *xt_gemm_plain(const XtGemm *p) {
    if (p->bias) return "it adds no bias";
    if (p->epilogue) return "it writes the product alone";
    bool one = p->dtype_a == p->dtype_b && xt_dtype_is_float(p->dtype_a);
    bool wide = xt_dtype_size(p->dtype_a) == 2 && p->dtype_c == XT_FLOAT32;
    return one && (p->dtype_c == p->dtype_a || wide) ? NULL : "A, B and C must have one floating point dtype, C float32 at most";
}
