/* unary_math.cuh - functions of one number and their derivatives, in float and double.
 *
 * XT_UNARY_TABLE lists y = f(x), XT_UNARY_BWD_TABLE the statements that set dx from dy and x. T is the stored dtype, W the
 * computing one. The formulas are the CPU's; results that round differently are within a few ulp on both. The forms in e =
 * exp(-|x|) keep their relative precision for large |x|. GELU_TANH is x sigmoid(2u): equal to x (1 + tanh(u)) / 2, and precise for
 * small results.
 */
#pragma once

#include "arch/sm80.cuh"
#include "common/cuda.cuh"

/* a / (1 + e), e >= 0. 16-bit results use the approximate quotient: its 2 ulp of float32 vanish in the rounding to 8 or 11 bits. It
 * gives 0 for denominators above 2^126; a quarter of a and of 1 + e, exact for 16-bit a, keeps finite denominators below that. */
template <typename T> __device__ inline XtAcc<T> xt_over_one_plus(XtAcc<T> a, XtAcc<T> e) {
    if constexpr (sizeof(T) == 2) return __fdividef(0.25f * a, fmaf(0.25f, e, 0.25f));
    else return a / (1 + e);
}

/* Phi(x) for 16-bit x, as below with a shorter P. Relative errors: the fit 5e-6 for |x| <= 14; g 2^-22; the rounding of the
 * exponent |x|^2 2^-24, which is 1.1e-5 at |x| = 13, just before g becomes 0, and 2e-6 at the smallest float16 result. For
 * comparison, half a unit in the last place is 2e-3 of a bfloat16 and 2.4e-4 of a float16. */
__device__ inline float xt_normal_cdf_short(float x, float *gauss) {
    float u = 0.849321800f * x; /* u^2 = x^2 / 2 log2(e) */
    float g = xt_exp2_approx(-u * u);
    float t = xt_reciprocal_approx(fmaf(0.31f, fabsf(x), 1.0f));
    float p = -0.0739291981f;
    p = p * t + 0.180450514f;
    p = p * t + 0.0157445204f;
    p = p * t + 0.133429885f;
    p = p * t + 0.120441258f;
    p = p * t + 0.123860702f;
    float half = g * (p * t);
    *gauss = g;
    return x < 0.0f ? half : 1.0f - half;
}

/* Standard normal distribution Phi(x), and gauss = exp(-x^2 / 2) for the density. Both tails keep their relative precision:
 * erfc(z) = exp(-z^2) t P(t), t = 1 / (1 + z / 2), z = |x| / sqrt(2), P fitted for the least relative error. */
template <typename T> __device__ inline float xt_normal_cdf(float x, float *gauss) {
    if constexpr (sizeof(T) == 2) return xt_normal_cdf_short(x, gauss);
    float g = expf(-0.5f * x * x);
    float t = xt_over_one_plus<T>(1.0f, 0.5f * (fabsf(x) * 0.707106781f));
    float p = -0.0593638311f;
    p = p * t + 0.286013938f;
    p = p * t - 0.490179536f;
    p = p * t + 0.281475185f;
    p = p * t - 0.0289719557f;
    p = p * t + 0.203678471f;
    p = p * t + 0.242853621f;
    p = p * t + 0.282409592f;
    p = p * t + 0.282084472f;
    float half = 0.5f * (g * (p * t));
    *gauss = g;
    return x < 0.0f ? half : 1.0f - half;
}
template <typename T> __device__ inline double xt_normal_cdf(double x, double *gauss) {
    *gauss = exp(-0.5 * x * x);
    return 0.5 * erfc(-x * 0.70710678118654752440);
}

#define XT_SQRT_2_PI 0.79788456080286535588    /* sqrt(2 / pi) */
#define XT_SQRT_2PI_INV 0.39894228040143267794 /* 1 / sqrt(2 pi) */
#define XT_2_SQRT_PI 1.12837916709551257390    /* 2 / sqrt(pi) */
#define XT_CUBIC 0.044715

/* X(name, statements that set y from x) */
/* clang-format off */
#define XT_UNARY_TABLE(X)                                                                                       \
    X(NEG, y = -x)                                                                                              \
    X(ABS, y = fabs(x))                                                                                         \
    X(EXP, y = exp(x))                                                                                          \
    X(LOG, y = log(x))                                                                                          \
    X(SQRT, y = sqrt(x))                                                                                        \
    X(RSQRT, y = rsqrt(x))                                                                                      \
    X(RECIPROCAL, y = 1 / x)                                                                                    \
    X(SIN, y = sin(x))                                                                                          \
    X(COS, y = cos(x))                                                                                          \
    X(TANH, y = tanh(x))                                                                                        \
    X(SIGMOID, y = xt_over_one_plus<T>(1, xt_exp_for<T>(-x)))                                                   \
    X(RELU, y = x <= 0 ? 0 : x)                                                                                 \
    X(SILU, y = xt_over_one_plus<T>(x, xt_exp_for<T>(-x)))                                                      \
    X(GELU, W gauss; W cdf = xt_normal_cdf<T>(x, &gauss); y = x * cdf)                                          \
    X(GELU_TANH, y = xt_over_one_plus<T>(x, xt_exp_for<T>(-2 * (W)XT_SQRT_2_PI * (x + (W)XT_CUBIC * x * x * x)))) \
    X(ERF, y = erf(x))

/* X(name, statements that set dx from dy and x) */
#define XT_UNARY_BWD_TABLE(X)                                                                                   \
    X(NEG, dx = -dy)                                                                                            \
    X(ABS, dx = x > 0 ? dy : x < 0 ? -dy : dy * (x * 0))                                                        \
    X(EXP, dx = dy * exp(x))                                                                                    \
    X(LOG, dx = dy / x)                                                                                         \
    X(SQRT, dx = dy * (W)0.5 / sqrt(x))                                                                         \
    X(RSQRT, dx = dy * (W)-0.5 / (x * sqrt(x)))                                                                 \
    X(RECIPROCAL, W r = 1 / x; dx = -dy * r * r)                                                                \
    X(SIN, dx = dy * cos(x))                                                                                    \
    X(COS, dx = -dy * sin(x))                                                                                   \
    X(TANH, W e = xt_exp_for<T>(-2 * fabs(x)); W q = xt_over_one_plus<T>(1, e); dx = dy * (4 * e * q * q))      \
    X(SIGMOID, W e = xt_exp_for<T>(-fabs(x)); W q = xt_over_one_plus<T>(1, e); dx = dy * (e * q * q))           \
    X(RELU, dx = x <= 0 ? 0 : dy)                                                                               \
    X(SILU, W e = xt_exp_for<T>(-fabs(x)); W q = xt_over_one_plus<T>(1, e); W s = x < 0 ? e * q : q;            \
      dx = dy * (s + x * (e * q * q)))                                                                          \
    X(GELU, W gauss; W cdf = xt_normal_cdf<T>(x, &gauss); dx = dy * (cdf + x * gauss * (W)XT_SQRT_2PI_INV))     \
    X(GELU_TANH, W x2 = x * x; W u2 = 2 * (W)XT_SQRT_2_PI * (x + (W)XT_CUBIC * x2 * x);                         \
      W e = xt_exp_for<T>(-fabs(u2)); W q = xt_over_one_plus<T>(1, e); W s = u2 < 0 ? e * q : q;                \
      W du2 = 2 * (W)XT_SQRT_2_PI * (1 + 3 * (W)XT_CUBIC * x2); dx = dy * (s + x * (e * q * q) * du2))          \
    X(ERF, dx = dy * ((W)XT_2_SQRT_PI * exp(-x * x)))
/* clang-format on */
