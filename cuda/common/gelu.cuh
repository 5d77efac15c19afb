/* gelu.cuh - GELU and its derivative for one element: kernels that compute them in the epilogue of a product get the bits of
 * bias_gelu.cu. TANH: the approximation by tanh, in the form x sigmoid(2 u), see elementwise/unary_math.cuh.
 *
 * For 16-bit types by tanh: 2 u = x (A + A c x^2), approximate exponential and reciprocal. The relative error, some |2 u| 2^-23, is a
 * twentieth of a rounding, and the slope's error 1e-6 where it is small. An exponential above 2^126 gives 0, where the sigmoid is below
 * 1.2e-38. Fewer instructions than the general form; what that saves has not been measured by itself.
 */
#pragma once

#include "elementwise/unary_math.cuh"

constexpr float XT_GELU_A = 2 * (float)XT_SQRT_2_PI, XT_GELU_B = XT_GELU_A * (float)XT_CUBIC, XT_GELU_LOG2 = -1.4426950408889634f;

/* sigmoid(2 u), x2 = x^2 */
__device__ inline float xt_gelu_sigmoid(float x, float x2) {
    return xt_reciprocal_approx(1 + xt_exp2_approx(x * fmaf(XT_GELU_B * XT_GELU_LOG2, x2, XT_GELU_A * XT_GELU_LOG2)));
}

template <typename T, bool TANH> __device__ inline XtAcc<T> xt_gelu(XtAcc<T> x) {
    using W = XtAcc<T>;
    if constexpr (TANH && sizeof(T) == 2) return x * xt_gelu_sigmoid(x, x * x);
    else if constexpr (TANH) return xt_over_one_plus<T>(x, xt_exp_for<T>(-2 * (W)XT_SQRT_2_PI * (x + (W)XT_CUBIC * x * x * x)));
    else {
        W gauss;
        return x * xt_normal_cdf<T>(x, &gauss);
    }
}

template <typename T, bool TANH> __device__ inline XtAcc<T> xt_gelu_slope(XtAcc<T> x) {
    using W = XtAcc<T>;
    if constexpr (TANH && sizeof(T) == 2) { // s + x (2 u)' s (1 - s)
        float x2 = x * x, s = xt_gelu_sigmoid(x, x2);
        return fmaf(x * fmaf(3 * XT_GELU_B, x2, XT_GELU_A), fmaf(-s, s, s), s);
    } else if constexpr (TANH) {
        W x2 = x * x, u2 = 2 * (W)XT_SQRT_2_PI * (x + (W)XT_CUBIC * x2 * x);
        W e = xt_exp_for<T>(-fabs(u2)), q = xt_over_one_plus<T>(1, e), s = u2 < 0 ? e * q : q;
        return s + x * (e * q * q) * (2 * (W)XT_SQRT_2_PI * (1 + 3 * (W)XT_CUBIC * x2));
    } else {
        W gauss, cdf = xt_normal_cdf<T>(x, &gauss);
        return cdf + x * gauss * (W)XT_SQRT_2PI_INV;
    }
}
