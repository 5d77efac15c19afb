/* row_loops.h - loops over one row or one head that several kernels share; included inside a template of each_float.h, so without a
 * guard. Each is inlined into its caller and compiled for the caller's instructions. */
#include "core/rope_scale.h"

/* out = weight cast(x rstd), or with plus_one cast((1 + weight) x rstd), all [cols], weight or NULL; returns rstd. */
XT_INLINE ACC NAME(norm_row)(T *out, const T *x, const T *weight, bool plus_one, int64_t cols, ACC eps) {
    ACC squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t j = 0; j < cols; j++) squares += LOAD(x[j]) * LOAD(x[j]);
    ACC rstd = 1 / SQRT(squares / (ACC)cols + eps);
    if (weight && plus_one) {
#pragma omp simd
        for (int64_t j = 0; j < cols; j++) out[j] = STORE(LOAD(x[j]) * rstd * (1 + LOAD(weight[j])));
    } else if (weight) {
#pragma omp simd
        for (int64_t j = 0; j < cols; j++) out[j] = STORE(LOAD(weight[j]) * LOAD(STORE(LOAD(x[j]) * rstd)));
    } else {
#pragma omp simd
        for (int64_t j = 0; j < cols; j++) out[j] = STORE(LOAD(x[j]) * rstd);
    }
    return rstd;
}

/* dx (or NULL) of a row, which may be dy; adds the row's share of dweight to partial. Inlined once with and once without `weight`, so
 * that the loops do not branch, and with plus_one for 1 + weight. All pointers are [cols]. */
XT_INLINE void NAME(norm_row_bwd)(T *dx, ACC *partial, const T *dy, const T *x, const T *weight, bool plus_one, ACC rstd,
                                  int64_t cols) {
    ACC dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int64_t j = 0; j < cols; j++) {
        ACC product = LOAD(dy[j]) * LOAD(x[j]);
        dot += product * (!weight ? 1 : plus_one ? 1 + LOAD(weight[j]) : LOAD(weight[j]));
        partial[j] += product * rstd;
    }
    if (!dx) return;
    ACC shrink = rstd * rstd * dot / (ACC)cols; /* rstd mean(g xh) */
#pragma omp simd
    for (int64_t j = 0; j < cols; j++) {
        ACC w = !weight ? 1 : plus_one ? 1 + LOAD(weight[j]) : LOAD(weight[j]);
        dx[j] = STORE(rstd * (LOAD(dy[j]) * w - LOAD(x[j]) * shrink));
    }
}

/* dweight [cols] = the partial rows [pieces, stride] added in order, into the first of them; without a piece it is 0, or kept. */
XT_INLINE void NAME(sum_partials)(T *dweight, ACC *partial, int64_t pieces, int64_t stride, int64_t cols, bool accumulate) {
    if (pieces == 0 && accumulate) return;
    if (pieces == 0) memset(partial, 0, (size_t)cols * sizeof(ACC));
    for (int64_t i = 1; i < pieces; i++) {
        const ACC *next = partial + i * stride; /* [cols] */
#pragma omp simd
        for (int64_t j = 0; j < cols; j++) partial[j] += next[j];
    }
#pragma omp simd
    for (int64_t j = 0; j < cols; j++) dweight[j] = STORE(partial[j]);
}

/* Turns the pairs (x_i, x_i+half) by the angles whose cosines and sines are c and s, [half] each; out may be x. */
XT_INLINE void NAME(turn_row)(T *out, const T *x, const ACC *c, const ACC *s, int64_t half) {
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        ACC a = LOAD(x[i]), b = LOAD(x[i + half]);
        out[i] = STORE(a * c[i] - b * s[i]);
        out[i + half] = STORE(b * c[i] + a * s[i]);
    }
}

/* frequency[i] = theta^(-2i/D), scaled, i < D/2. */
XT_INLINE void NAME(rope_frequencies)(ACC *frequency, const XtRopeBase *base, int64_t dim) {
    for (int64_t i = 0; i < dim / 2; i++) {
        ACC exponent = (ACC)(2 * i) / (ACC)dim;
        ACC f = 1 / (IS_F64 ? (ACC)pow(base->theta, (double)exponent) : (ACC)powf((float)base->theta, (float)exponent));
        frequency[i] =
            (ACC)xt_scaled_frequency((double)f, base->factor, base->low_freq_factor, base->high_freq_factor, base->original_length);
    }
}

/* Cosines c and sines s [D/2] of the angles of one position, rounded to T; the sines times `sign`. */
XT_INLINE void NAME(rope_angles)(ACC *c, ACC *s, ACC pos, const ACC *frequency, int64_t half, ACC sign) {
    for (int64_t i = 0; i < half; i++) {
        ACC angle = pos * frequency[i];
        c[i] = LOAD(STORE(IS_F64 ? (ACC)cos((double)angle) : (ACC)cosf((float)angle)));
        s[i] = LOAD(STORE(IS_F64 ? (ACC)sin((double)angle) : (ACC)sinf((float)angle))) * sign;
    }
}
