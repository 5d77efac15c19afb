/* philox.h - the random numbers of every device: Philox4x32-10, and what fills make of its words. C and CUDA.
 *
 * Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) is a function from (key, counter) to four 32-bit
 * words; there is no state to keep, so any thread can make any element. Fills use key = seed, counter = (block index, stream).
 *
 * Bit for bit the same everywhere: integer arithmetic is exact, and all float arithmetic below is written as explicit fused
 * multiply-adds, square roots and lone multiplications, which IEEE 754 rounds in one way only and no compiler may contract further.
 */
#pragma once

#include "xtrain.h"

#include <math.h>
#include <string.h>

#ifdef __CUDACC__
#define XT_PHILOX_FN static __host__ __device__ __forceinline__
#elif defined(__GNUC__)
#define XT_PHILOX_FN static inline __attribute__((always_inline))
#else
#define XT_PHILOX_FN static inline
#endif

#ifdef __CUDA_ARCH__
#define XT_FMA(a, b, c) __fmaf_rn(a, b, c)
#define XT_MUL(a, b) __fmul_rn(a, b)
#define XT_ROOT(a) __fsqrt_rn(a)
#else
#define XT_FMA(a, b, c) fmaf(a, b, c)
#define XT_MUL(a, b) ((a) * (b))
#define XT_ROOT(a) sqrtf(a)
#endif

typedef struct XtWords {
    uint32_t w[4];
} XtWords;

/* Philox4x32-10: ten rounds of two 32 x 32 -> 64-bit products, the key going up by the Weyl constants after each. */
XT_PHILOX_FN XtWords xt_philox4x32(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
#define XT_ROUND                                                                   \
    {                                                                              \
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2; \
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;                                       \
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;                                       \
        c1 = (uint32_t)p1;                                                         \
        c3 = (uint32_t)p0;                                                         \
        k0 += 0x9E3779B9u;                                                         \
        k1 += 0xBB67AE85u;                                                         \
    }
    XT_ROUND XT_ROUND XT_ROUND XT_ROUND XT_ROUND XT_ROUND XT_ROUND XT_ROUND XT_ROUND XT_ROUND
#undef XT_ROUND
        XtWords out;
    out.w[0] = c0;
    out.w[1] = c1;
    out.w[2] = c2;
    out.w[3] = c3;
    return out;
}

/* Block `block` of a fill: words 4 * block to 4 * block + 3 of its sequence. */
XT_PHILOX_FN XtWords xt_philox_block(XtPhilox philox, uint64_t block) {
    return xt_philox4x32((uint32_t)block, (uint32_t)(block >> 32), (uint32_t)philox.stream, (uint32_t)(philox.stream >> 32),
                         (uint32_t)philox.seed, (uint32_t)(philox.seed >> 32));
}

/* Uniform: low + span * u with u = (word >> 8) * 2^-24 in [0, 1). Rounding can reach high: `top`, the largest number of the target
 * dtype below high (xt_uniform_top), bounds it. */
XT_PHILOX_FN float xt_uniform(uint32_t word, float low, float span, float top) {
    float u = XT_MUL((float)(word >> 8), 5.9604644775390625e-8f); /* 2^-24 */
    float v = XT_FMA(span, u, low);
    return v < top ? v : top;
}

/* ln(u) for u in [2^-33, 1], to about 1 ulp: u = m 2^e, m in [sqrt(1/2), sqrt(2)); with f = m - 1,
 * ln(m) = f + f^2 (-1/2 + f Q(f)), Q fitted for least relative error. */
XT_PHILOX_FN float xt_random_ln(float u) {
    uint32_t bits;
    memcpy(&bits, &u, sizeof bits);
    uint32_t above = bits - 0x3f3504f3u; /* the bits of sqrt(1/2) */
    float e = (float)((int32_t)above >> 23), m;
    bits = (above & 0x7fffffu) + 0x3f3504f3u;
    memcpy(&m, &bits, sizeof m);
    float f = m - 1.0f;
    float q = -0.078596115f;
    q = XT_FMA(q, f, 0.128816475f);
    q = XT_FMA(q, f, -0.131287548f);
    q = XT_FMA(q, f, 0.141811919f);
    q = XT_FMA(q, f, -0.16624554f);
    q = XT_FMA(q, f, 0.200022863f);
    q = XT_FMA(q, f, -0.250008104f);
    q = XT_FMA(q, f, 0.333333167f);
    q = XT_FMA(q, f, -0.5f);
    float f2 = XT_MUL(f, f);
    return XT_FMA(e, 0.693147181f, XT_FMA(f2, q, f));
}

/* Two independent standard normals from two words (Box & Muller 1958): radius sqrt(-2 ln u1), u1 = word1 2^-32 + 2^-33 in (0, 1];
 * angle 2 pi u2, u2 = word2 2^-32: z[0] = radius cos, z[1] = radius sin. The angle is reduced to its quadrant in integers. */
XT_PHILOX_FN void xt_box_muller(uint32_t word1, uint32_t word2, float *z0, float *z1) {
    float u1 = XT_FMA((float)word1, 2.3283064365386963e-10f, 1.1641532182693481e-10f); /* 2^-32, 2^-33 */
    float radius = XT_ROOT(XT_MUL(-2.0f, xt_random_ln(u1)));
    uint32_t quadrant = (word2 + 0x20000000u) >> 30;                              /* nearest multiple of a quarter turn */
    float x = XT_MUL((float)(int32_t)(word2 - (quadrant << 30)), 1.46291808e-9f); /* times 2 pi / 2^32: in [-pi/4, pi/4] */
    float x2 = XT_MUL(x, x);
    float s = XT_FMA(-0.000195166557f, x2, 0.00833217354f);
    s = XT_FMA(s, x2, -0.166666549f);
    s = XT_FMA(XT_MUL(x, x2), s, x);
    float c = XT_FMA(2.44377299e-5f, x2, -0.00138873614f);
    c = XT_FMA(c, x2, 0.0416666467f);
    c = XT_FMA(XT_MUL(x2, x2), c, XT_FMA(-0.5f, x2, 1.0f));
    float cosine = quadrant & 1u ? s : c, sine = quadrant & 1u ? c : s;
    cosine = (quadrant + 1u) & 2u ? -cosine : cosine;
    sine = quadrant & 2u ? -sine : sine;
    *z0 = XT_MUL(radius, cosine);
    *z1 = XT_MUL(radius, sine);
}

/* Normal with a mean and a deviation. */
XT_PHILOX_FN float xt_normal(float z, float mean, float deviation) { return XT_FMA(deviation, z, mean); }

/* Integer in [low, low + range) from two words; range 0 means 2^64. */
XT_PHILOX_FN int64_t xt_randint(uint32_t word1, uint32_t word2, int64_t low, uint64_t range) {
    uint64_t bits = (uint64_t)word2 << 32 | word1;
    return (int64_t)((uint64_t)low + (range ? bits % range : bits));
}

/* Host: the largest number of a float dtype that is below high (but never below low), as a float32. */
static inline float xt_uniform_top(XtDtype dtype, double low, double high) {
    float top = (float)high;
    if (!(low < high)) return (float)low;
    if ((double)top >= high) top = nextafterf(top, -INFINITY);
    if (dtype == XT_BFLOAT16 || dtype == XT_FLOAT16) {
        /* Round down to a multiple of the dtype's last place: 8 or 11 bits, and no finer than its smallest subnormal. */
        int exponent, bits = dtype == XT_BFLOAT16 ? 8 : 11, finest = dtype == XT_BFLOAT16 ? -133 : -24;
        frexpf(top, &exponent);
        int place = exponent - bits > finest ? exponent - bits : finest;
        top = (float)ldexp(floor(ldexp((double)top, -place)), place);
    }
    return top < (float)low ? (float)low : top;
}
