/* reduce.h - reductions, statistics and comparison of views. The rules for all kernels are in kernels.h. */
#pragma once

#include "xtrain.h"

/* clang-format off */
#define XT_REDUCE_OPS(X) X(SUM) X(MEAN) X(MAX) X(MIN) X(ARGMAX)
/* clang-format on */
typedef enum XtReduceOp {
#define XT_X(name) XT_REDUCE_##name,
    XT_REDUCE_OPS(XT_X)
#undef XT_X
        XT_REDUCE_OP_COUNT
} XtReduceOp;

/* x has its kept dims first, then its reduced dims: x.shape = out.shape + reduced. Any strides.
 * SUM keeps integers in int64 (out int64), floats in ACC (out x's dtype). MEAN: floats only; NaN for no elements. MAX, MIN: the
 * first NaN wins; the op refuses an empty set. ARGMAX: out int64, flat index among the reduced elements, the first one on ties.
 * The order of additions is a function of the shape alone. */
typedef struct XtReduce {
    XtReduceOp op;
    XtView out, x;
} XtReduce;

/* out[r, i, c] = sum of x[r, j, c] over j <= i, with `reverse` over j >= i; both [rows, count, inner], dense, of a float dtype, added
 * in ACC and rounded once, or int64, which wraps around. The order of additions is a function of the shape alone. */
typedef struct XtCumsum {
    void *out;
    const void *x;
    XtDtype dtype;
    int64_t rows, count, inner;
    bool reverse;
} XtCumsum;

/* Four float64: minimum, maximum, sum over the finite elements of x, and the number of NaN; then the number of +-Inf. out[5]. */
typedef struct XtStats {
    XtView x;    /* any strides, any dtype */
    double *out; /* [5] in host memory */
} XtStats;

/* What XtCompare leaves in host memory. With d = |out - ref| and limit = atol + rtol |ref|, an element is right when both values are
 * finite, d is finite and d <= limit, or when both are the same infinity. NaN is never right. The distances are maxima over the
 * elements where both are finite, 0 when there is none; max_rel = d / |ref| leaves out ref == 0. */
typedef struct XtComparison {
    int64_t errors;                             /* elements that are not right */
    int64_t out_nan, out_inf, ref_nan, ref_inf; /* how many */
    int64_t worst; /* row-major index of the first element with the largest d / limit; -1: no elements */
    double max_abs, max_rel, max_ref, worst_ratio; /* max_ref = |ref|; worst_ratio = d / limit, Inf where a value is not finite */
} XtComparison;

/* Compares views of equal shape and any strides: both of float dtypes, in float64, or both of integer dtypes (bool too), whose
 * distances are exact. */
typedef struct XtCompare {
    XtView out, ref;
    double rtol, atol; /* finite, >= 0 */
    XtComparison *result;
} XtCompare;
