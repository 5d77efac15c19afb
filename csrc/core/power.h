/* power.h - b^n of every device, for the bias corrections of optimizers. C and CUDA.
 *
 * The library's pow() of the host and that of a GPU differ in their last bit, and square-and-multiply in float64 loses a bit for each
 * doubling of n. Here the factors are pairs of float64 (about 106 bits), rounded once at the end: for n < 2^40
 * and b^n > 2^-900 the result is less than 0.51 units in the last place away from b^n. 1 - b^n is 1 long before that bound.
 *
 * Bit for bit the same everywhere: products are fused multiply-adds, which no compiler may contract further.
 */
#pragma once

#include "xtrain.h"

#include <math.h>

#ifdef __CUDACC__
#define XT_POWER_FN static __host__ __device__ __forceinline__
#else
#define XT_POWER_FN static inline
#endif

/* high + low, where |low| is at most half a unit in the last place of high. */
typedef struct XtPair {
    double high, low;
} XtPair;

/* a * b without the product of the low parts. fma(x, y, 0) is x * y that is not fused with the addition behind it. */
XT_POWER_FN XtPair xt_pair_product(XtPair a, XtPair b) {
    double product = fma(a.high, b.high, 0.0), rest = fma(a.high, b.high, -product); /* exact: a.high * b.high - product */
    rest = fma(a.high, b.low, rest);
    rest = fma(a.low, b.high, rest);
    XtPair sum;
    sum.high = product + rest;
    sum.low = rest - (sum.high - product);
    return sum;
}

/* b^n for 0 <= b < 1 and n >= 0. */
XT_POWER_FN double xt_power(double b, int64_t n) {
    XtPair result = {1, 0}, square = {b, 0}; /* square = b^(2^i) */
    for (; n > 0; n >>= 1) {
        if (n & 1) result = xt_pair_product(result, square);
        square = xt_pair_product(square, square);
    }
    return result.high;
}
