/* gelu.cuh - GELU and its derivative for one element: kernels that compute them in the epilogue of a product get the bits of
 * bias_gelu.cu. TANH: the approximation by tanh, in the form x sigmoid(2 u), see elementwise/unary_math.cuh.
 */
#pragma once

#include "elementwise/unary_math.cuh"

template <typename T, bool TANH> __device__ inline XtAcc<T> xt_gelu(XtAcc<T> x) {
    using W = XtAcc<T>;
    if constexpr (TANH) return xt_over_one_plus<T>(x, xt_exp_for<T>(-2 * (W)XT_SQRT_2_PI * (x + (W)XT_CUBIC * x * x * x)));
    W gauss;
    return x * xt_normal_cdf<T>(x, &gauss);
}

template <typename T, bool TANH> __device__ inline XtAcc<T> xt_gelu_slope(XtAcc<T> x) {
    using W = XtAcc<T>;
    if constexpr (TANH) {
        W x2 = x * x, u2 = 2 * (W)XT_SQRT_2_PI * (x + (W)XT_CUBIC * x2 * x);
        W e = xt_exp_for<T>(-fabs(u2)), q = xt_over_one_plus<T>(1, e), s = u2 < 0 ? e * q : q;
        return s + x * (e * q * q) * (2 * (W)XT_SQRT_2_PI * (1 + 3 * (W)XT_CUBIC * x2));
    }
    W gauss, cdf = xt_normal_cdf<T>(x, &gauss);
    return cdf + x * gauss * (W)XT_SQRT_2PI_INV;
}
