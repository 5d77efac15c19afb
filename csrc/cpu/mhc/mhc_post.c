/* mhc_post.c - the way back into the streams of hyper-connections (Xie et al. 2025, https://arxiv.org/abs/2512.24880).
 *
 *     forward    out_i = sum_j M_ij x_j + h_i y
 *     backward   dx_j = sum_i M_ij g_i,   dy = sum_i h_i g_i,   dh_i = g_i . y,   dM_ij = g_i . x_j,   g = dout
 *
 * Tokens are independent. A token is walked in chunks of channels that stay in the L1 cache while they are read several times.
 */
#ifndef T
#include "contract/mhc.h"
#include "cpu/kernel.h"

#define CHUNK 1024    /* channels at a time */
#define MAX_STREAMS 8 /* of the contract */

#define XT_TEMPLATE "cpu/mhc/mhc_post.c"
#include "cpu/each_float.h"

XtStatus xt_cpu_mhc_post_fwd(const XtMhcPostFwd *p) {
    return xt_parallel(p->tokens, xt_row_grain(p->streams * p->cols, 8192), XT_BY_FLOAT(p->dtype, mhc_post_fwd), (void *)p);
}

XtStatus xt_cpu_mhc_post_bwd(const XtMhcPostBwd *p) {
    return xt_parallel(p->tokens, xt_row_grain(p->streams * p->cols, 8192), XT_BY_FLOAT(p->dtype, mhc_post_bwd), (void *)p);
}

#else
#include "mhc.h"

/* One token, inlined for the usual n so that the loops over streams disappear. out, x [n, cols], y [cols], h [n], m [n, n]. */
XT_INLINE void NAME(mhc_post_token)(T *out, const T *x, const T *y, const ACC *h, const ACC *m, int64_t n, int64_t cols) {
#pragma omp simd
    for (int64_t c = 0; c < cols; c++) {
        ACC v[MAX_STREAMS];
        for (int64_t j = 0; j < n; j++) v[j] = LOAD(x[j * cols + c]);
        for (int64_t i = 0; i < n; i++) {
            ACC sum = h[i] * LOAD(y[c]);
            for (int64_t j = 0; j < n; j++) sum += m[i * n + j] * v[j];
            out[i * cols + c] = STORE(sum);
        }
    }
}
/* The same for any n. */
XT_INLINE void NAME(mhc_post_any)(T *out, const T *x, const T *y, const ACC *h, const ACC *m, int64_t n, int64_t cols) {
    ACC sum[CHUNK];
    for (int64_t c0 = 0; c0 < cols; c0 += CHUNK) {
        int64_t count = cols - c0 < CHUNK ? cols - c0 : CHUNK;
        for (int64_t i = 0; i < n; i++) {
#pragma omp simd
            for (int64_t c = 0; c < count; c++) sum[c] = h[i] * LOAD(y[c0 + c]);
            NAME(mhc_add_rows)(sum, m + i * n, 1, x + c0, n, cols, count);
#pragma omp simd
            for (int64_t c = 0; c < count; c++) out[i * cols + c0 + c] = STORE(sum[c]);
        }
    }
}

XT_FAST static XtStatus NAME(mhc_post_fwd)(void *context, int64_t begin, int64_t end) {
    const XtMhcPostFwd *p = context;
    int64_t n = p->streams, cols = p->cols;
    for (int64_t t = begin; t < end; t++) {
        T *out = (T *)p->out + t * n * cols;              /* [n, cols] */
        const T *x = (const T *)p->x + t * n * cols;      /* [n, cols] */
        const T *y = (const T *)p->y + t * cols;          /* [cols] */
        const ACC *h = (const ACC *)p->h_post + t * n;    /* [n] */
        const ACC *m = (const ACC *)p->m_res + t * n * n; /* [n, n] */
        if (n == 4) NAME(mhc_post_token)(out, x, y, h, m, 4, cols);
        else if (n == 2) NAME(mhc_post_token)(out, x, y, h, m, 2, cols);
        else NAME(mhc_post_any)(out, x, y, h, m, n, cols);
    }
    return XT_OK;
}

XT_FAST static XtStatus NAME(mhc_post_bwd)(void *context, int64_t begin, int64_t end) {
    const XtMhcPostBwd *p = context;
    int64_t n = p->streams, cols = p->cols;
    ACC sum[CHUNK];
    for (int64_t t = begin; t < end; t++) {
        const ACC *h = (const ACC *)p->h_post + t * n;    /* [n] */
        const ACC *m = (const ACC *)p->m_res + t * n * n; /* [n, n] */
        ACC dh[MAX_STREAMS] = {0}, dm[MAX_STREAMS * MAX_STREAMS] = {0};
        for (int64_t c0 = 0; c0 < cols; c0 += CHUNK) {
            int64_t count = cols - c0 < CHUNK ? cols - c0 : CHUNK, at = t * n * cols + c0;
            const T *g = (const T *)p->dout + at, *x = (const T *)p->x + at; /* [n, cols] from c0 */
            const T *y = (const T *)p->y + t * cols + c0;                    /* [count] */
            if (p->dh_post) NAME(mhc_dots)(dh, y, g, n, cols, count);
            for (int64_t i = 0; p->dm_res && i < n; i++) NAME(mhc_dots)(dm + i * n, g + i * cols, x, n, cols, count);
            if (p->dy) {
                T *dy = (T *)p->dy + t * cols + c0; /* [count] */
                memset(sum, 0, (size_t)count * sizeof *sum);
                NAME(mhc_add_rows)(sum, h, 1, g, n, cols, count);
#pragma omp simd
                for (int64_t c = 0; c < count; c++) dy[c] = STORE(sum[c]);
            }
            for (int64_t j = 0; p->dx && j < n; j++) {
                T *dx = (T *)p->dx + at + j * cols;                                      /* [count] */
                const T *more = p->dx_add ? (const T *)p->dx_add + at + j * cols : NULL; /* [count], may be dx */
                for (int64_t c = 0; c < count; c++) sum[c] = more ? LOAD(more[c]) : 0;
                NAME(mhc_add_rows)(sum, m + j, n, g, n, cols, count);
#pragma omp simd
                for (int64_t c = 0; c < count; c++) dx[c] = STORE(sum[c]);
            }
        }
        if (p->dh_post) memcpy((ACC *)p->dh_post + t * n, dh, (size_t)n * sizeof *dh);
        if (p->dm_res) memcpy((ACC *)p->dm_res + t * n * n, dm, (size_t)(n * n) * sizeof *dm);
    }
    return XT_OK;
}

#endif
