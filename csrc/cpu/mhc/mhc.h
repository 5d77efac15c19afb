/* mhc.h - loops that mhc_pre.c and mhc_post.c share. Part of a template: included once per dtype, hence no include guard. */

/* sums[i] += sum_c a_c b_ic for the `rows` rows of b, four at a time (missing rows repeat the last one, and are dropped). */
XT_INLINE void NAME(mhc_dots)(ACC *sums, const T *a, const T *b, int64_t rows, int64_t ld, int64_t count) {
    for (int64_t i = 0; i < rows; i += 4) {
        const T *b0 = b + i * ld, *b1 = b + (i + 1 < rows ? i + 1 : i) * ld; /* [count] each */
        const T *b2 = b + (i + 2 < rows ? i + 2 : i) * ld, *b3 = b + (i + 3 < rows ? i + 3 : i) * ld;
        ACC s0 = 0, s1 = 0, s2 = 0, s3 = 0;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
        for (int64_t c = 0; c < count; c++) {
            ACC v = LOAD(a[c]);
            s0 += v * LOAD(b0[c]);
            s1 += v * LOAD(b1[c]);
            s2 += v * LOAD(b2[c]);
            s3 += v * LOAD(b3[c]);
        }
        sums[i] += s0;
        if (i + 1 < rows) sums[i + 1] += s1;
        if (i + 2 < rows) sums[i + 2] += s2;
        if (i + 3 < rows) sums[i + 3] += s3;
    }
}

/* to[c] += sum_i weight[i * step] b_ic over `rows` rows of b, row i of it at b + i ld; all pointers [count]. */
XT_INLINE void NAME(mhc_add_rows)(ACC *to, const ACC *weight, int64_t step, const T *b, int64_t rows, int64_t ld, int64_t count) {
    int64_t i = 0;
    for (; i + 4 <= rows; i += 4) {
        const T *b0 = b + i * ld, *b1 = b0 + ld, *b2 = b1 + ld, *b3 = b2 + ld;
        ACC w0 = weight[i * step], w1 = weight[(i + 1) * step], w2 = weight[(i + 2) * step], w3 = weight[(i + 3) * step];
#pragma omp simd
        for (int64_t c = 0; c < count; c++) to[c] += w0 * LOAD(b0[c]) + w1 * LOAD(b1[c]) + (w2 * LOAD(b2[c]) + w3 * LOAD(b3[c]));
    }
    for (; i < rows; i++) {
        const T *b0 = b + i * ld;
        ACC w0 = weight[i * step];
#pragma omp simd
        for (int64_t c = 0; c < count; c++) to[c] += w0 * LOAD(b0[c]);
    }
}
