/* rope.cuh - angles of the rotary embedding, for rope.cu and qk_norm_rope.cu.
 *
 * The host computes the frequencies (core/rope_scale.h) with the calls of the CPU kernel and passes them as a kernel argument. They must
 * be the same bits: at position 1e6 one ulp of a frequency is 0.06 in the angle. Positions and angles are rounded to ACC, as on the
 * CPU. */
#pragma once

#include "common/cuda.cuh"
#include "contract/layers.h"
#include "core/rope_scale.h"

#include <math.h>

static constexpr int PAIRS = 256; /* of one launch: all of them up to D = 512 */

template <typename A> struct RopeFrequencies {
    A at[PAIRS];
};

/* Rounded to ACC: the compiler must not fuse the product with the first step of the cosine. */
__device__ inline float angle_of(float pos, float frequency) { return __fmul_rn(pos, frequency); }
__device__ inline double angle_of(double pos, double frequency) { return __dmul_rn(pos, frequency); }
__device__ inline void sine_cosine(float angle, float *s, float *c) { sincosf(angle, s, c); }
__device__ inline void sine_cosine(double angle, double *s, double *c) { sincos(angle, s, c); }

/* a / b, both >= 0. A 64-bit division costs several times a 32-bit one. */
__device__ inline int64_t quotient(int64_t a, int64_t b) {
    if (((uint64_t)a | (uint64_t)b) >> 32 == 0) return (unsigned)a / (unsigned)b;
    return a / b;
}

static inline float power(float base, float exponent) { return powf(base, exponent); }
static inline double power(double base, double exponent) { return pow(base, exponent); }

/* Of the pairs [first, first + count), count <= PAIRS. */
template <typename A>
static inline RopeFrequencies<A> rope_frequencies(const XtRopeBase &base, int64_t dim, int64_t first, int count) {
    RopeFrequencies<A> frequency = {};
    for (int i = 0; i < count; i++) {
        const A f = 1 / power((A)base.theta, (A)(2 * (first + i)) / (A)dim);
        frequency.at[i] =
            (A)xt_scaled_frequency((double)f, base.factor, base.low_freq_factor, base.high_freq_factor, base.original_length);
    }
    return frequency;
}

/* Turns the pairs of two pieces. */
template <typename T, int N>
__device__ inline void turn(XtPiece<T, N> (&pair)[2], const XtPiece<T, N> &cosines, const XtPiece<T, N> &sines) {
    using A = XtAcc<T>;
    XtVector<A, N> turned_a, turned_b, of_a = xt_load(pair[0]), of_b = xt_load(pair[1]);
    const XtVector<A, N> c = xt_load(cosines), s = xt_load(sines);
#pragma unroll
    for (int e = 0; e < N; e++) {
        turned_a.at[e] = of_a.at[e] * c.at[e] - of_b.at[e] * s.at[e];
        turned_b.at[e] = of_b.at[e] * c.at[e] + of_a.at[e] * s.at[e];
    }
    pair[0] = xt_store<T>(turned_a);
    pair[1] = xt_store<T>(turned_b);
}
