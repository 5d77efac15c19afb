/* unary_math.h - float32 functions that vectorise: branch-free, a few ulp, right at 0, Inf and NaN. Polynomials are near-minimax
 * fits (iteratively reweighted least squares on Chebyshev points). The float64 twins are libm's. */
#pragma once

#include "cpu/kernel.h"

/* ln(x): x = m 2^e, m in [sqrt(1/2), sqrt(2)); with f = m - 1, ln(m) = f + f^2 (-1/2 + f Q(f)). */
XT_INLINE float xt_logf(float x) {
    bool subnormal = x < 0x1p-126f;
    float scaled = subnormal ? x * 0x1p24f : x;
    uint32_t above = xt_float_bits(scaled) - 0x3f3504f3u; /* the bits of sqrt(1/2) */
    float e = (float)((int32_t)above >> 23) - (subnormal ? 24.0f : 0.0f);
    float f = xt_bits_float((above & 0x7fffffu) + 0x3f3504f3u) - 1.0f;
    float q = -0.078596115f;
    q = q * f + 0.128816475f;
    q = q * f - 0.131287548f;
    q = q * f + 0.141811919f;
    q = q * f - 0.16624554f;
    q = q * f + 0.200022863f;
    q = q * f - 0.250008104f;
    q = q * f + 0.333333167f;
    q = q * f - 0.5f;
    float y = f * f * q + (f + e * 1.42860677e-6f) + e * 0.693145752f; /* ln 2 in two parts, the first times e exact */
    y = x == INFINITY ? x : y;
    y = x == 0.0f ? -INFINITY : y;
    y = x < 0.0f ? NAN : y;
    return x != x ? x : y;
}

/* tanh(x): an odd polynomial below 0.65, where the quotient would cancel; 1 - 2 / (e^2x + 1) above. */
XT_INLINE float xt_tanhf(float x) {
    float z = x * x, a = fabsf(x);
    float p = 0.00206466512f;
    p = p * z - 0.00809196832f;
    p = p * z + 0.0216663469f;
    p = p * z - 0.0539405632f;
    p = p * z + 0.133331579f;
    p = p * z - 0.333333296f;
    float small = x + x * z * p;
    float large = copysignf(1.0f - 2.0f / (xt_expf(2.0f * a) + 1.0f), x);
    return a < 0.65f ? small : a == a ? large : x;
}

/* erfc(z) for z >= 0 to about 1e-7 relative near 0 and z^2 ulp far out, given gauss = exp(-z^2):
 * erfc(z) = gauss * t P(t), t = 1 / (1 + z / 2). */
XT_INLINE float xt_erfc_of(float z, float gauss) {
    float t = 1.0f / (1.0f + 0.5f * z);
    float p = -0.0593638311f;
    p = p * t + 0.286013938f;
    p = p * t - 0.490179536f;
    p = p * t + 0.281475185f;
    p = p * t - 0.0289719557f;
    p = p * t + 0.203678471f;
    p = p * t + 0.242853621f;
    p = p * t + 0.282409592f;
    p = p * t + 0.282084472f;
    return gauss * (p * t);
}

XT_INLINE float xt_erff(float x) {
    float z = x * x, a = fabsf(x);
    float p = 7.88912284e-5f;
    p = p * z - 0.000802084227f;
    p = p * z + 0.00518953545f;
    p = p * z - 0.0268544446f;
    p = p * z + 0.112836002f;
    p = p * z - 0.376126271f;
    /* 2 / sqrt(pi) = 1 + 0.128379167: the exact 1 saves the rounding of the constant. */
    float small = x + x * (p * z + 0.128379167f);
    float large = copysignf(1.0f - xt_erfc_of(a, xt_expf(-z)), x);
    return a < 1.0f ? small : a == a ? large : x;
}

/* Standard normal distribution Phi(x), and gauss = exp(-x^2 / 2) for the density. Both tails keep their relative precision. */
XT_INLINE float xt_normal_cdff(float x, float *gauss) {
    float g = xt_expf(-0.5f * x * x);
    float half = 0.5f * xt_erfc_of(fabsf(x) * 0.707106781f, g);
    *gauss = g;
    return x < 0.0f ? half : 1.0f - half;
}

/* sin and cos for |x| <= XT_TRIG_LIMIT: pi/2 in three parts (the first two of 11 bits, so that their multiples are exact), then
 * polynomials on [-pi/4, pi/4]. `turn` 0 gives the sine, 1 the cosine. */
#define XT_TRIG_LIMIT 10000.0f
XT_INLINE float xt_trigf(float x, int32_t turn) {
    float n = rintf(x * 0.636619772f);
    float r = x - n * 1.5703125f;
    r = r - n * 0.0004837512969970703125f;
    r = r - n * 7.54978995e-8f;
    float z = r * r;
    float s = r + r * z * ((-0.000195166557f * z + 0.00833217354f) * z - 0.166666549f);
    float c = 1.0f - 0.5f * z + z * z * ((2.44377299e-5f * z - 0.00138873614f) * z + 0.0416666467f);
    int32_t quadrant = (int32_t)n + turn;
    float y = quadrant & 1 ? c : s;
    return quadrant & 2 ? -y : y;
}
