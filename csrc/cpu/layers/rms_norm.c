/* rms_norm.c - root mean square normalisation (Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467).
 *
 *     forward    rstd = 1 / sqrt(mean_j x_j^2 + eps),  xh = x rstd,  out = w cast(xh)
 *     backward   with g = dy w:  d rstd / dx_i = -rstd^3 x_i / cols, hence
 *                dx_i = rstd (g_i - xh_i mean_j(g_j xh_j)),   dw_j = sum_rows dy_j xh_j
 *
 * The cast before the weight is what Hugging Face models do; it only shows in bfloat16 and float16. plus_one is what its Gemma does:
 * out = cast((1 + w) x rstd).
 * With a residual, a row of x + residual is rounded to memory first and then read as x; dsum is added to a row of dx that has been
 * rounded: the bits are those of separate ops.
 * dw is a sum over all rows: every piece of rows adds up a partial row of its own; then the partial rows are added in order.
 */
#ifndef T
#include "contract/layers.h"
#include "cpu/kernel.h"

#include <stdlib.h>

typedef struct RmsNormBwdJob {
    const XtRmsNormBwd *p;
    void *partial;  /* [pieces, stride] of ACC: the share of each piece in dweight */
    int64_t stride; /* cols, rounded up so that no two threads write to one cache line */
    int64_t grain;  /* rows in a piece */
} RmsNormBwdJob;

#define XT_TEMPLATE "cpu/layers/rms_norm.c"
#include "cpu/each_float.h"

XtStatus xt_cpu_rms_norm_fwd(const XtRmsNormFwd *p) {
    return xt_parallel(p->rows, xt_row_grain(p->cols, 16384), XT_BY_FLOAT(p->dtype, rms_norm_fwd), (void *)p);
}

XtStatus xt_cpu_rms_norm_bwd(const XtRmsNormBwd *p) {
    if (p->cols == 0) return XT_OK;
    /* At most 64 pieces, so that the partial rows stay few when there are many rows. */
    int64_t grain = xt_row_grain(p->cols, 16384), widest = (p->rows + 63) / 64;
    if (grain < widest) grain = widest;
    int64_t pieces = (p->rows + grain - 1) / grain;
    RmsNormBwdJob job = {p, NULL, (p->cols + 31) / 32 * 32, grain};
    size_t row_nbytes = (size_t)job.stride * xt_dtype_size(xt_dtype_accumulator(p->dtype));
    size_t nbytes = (size_t)(pieces > 0 ? pieces : 1) * row_nbytes;
    job.partial = aligned_alloc(128, nbytes);
    if (!job.partial) return xt_error(XT_OUT_OF_MEMORY, "rms_norm: scratch of %zu bytes could not be allocated", nbytes);
    XtStatus status = xt_parallel(p->rows, grain, XT_BY_FLOAT(p->dtype, rms_norm_bwd), &job);
    if (status == XT_OK && p->dweight) XT_BY_FLOAT(p->dtype, rms_norm_dweight)(&job, pieces);
    free(job.partial);
    return status;
}

#else
#include "cpu/layers/row_loops.h"

XT_FAST static XtStatus NAME(rms_norm_fwd)(void *context, int64_t begin, int64_t end) {
    const XtRmsNormFwd *p = context;
    const T *weight = p->weight; /* [cols] or NULL */
    int64_t cols = p->cols;
    for (int64_t r = begin; r < end; r++) {
        const T *x = (const T *)p->x + r * cols; /* [cols] */
        T *out = (T *)p->out + r * cols;         /* [cols] */
        if (p->sum) {
            const T *residual = (const T *)p->residual + r * cols; /* [cols] */
            T *sum = (T *)p->sum + r * cols;                       /* [cols] */
#pragma omp simd
            for (int64_t j = 0; j < cols; j++) sum[j] = STORE(LOAD(x[j]) + LOAD(residual[j]));
            x = sum;
        }
        ((ACC *)p->rstd)[r] = NAME(norm_row)(out, x, weight, p->plus_one, cols, (ACC)p->eps);
    }
    return XT_OK;
}

XT_FAST static XtStatus NAME(rms_norm_bwd)(void *context, int64_t begin, int64_t end) {
    const RmsNormBwdJob *job = context;
    const XtRmsNormBwd *p = job->p;
    int64_t cols = p->cols;
    ACC *partial = (ACC *)job->partial + begin / job->grain * job->stride; /* [cols] of this piece */
    const T *sum = p->accumulate && begin == 0 ? p->dweight : NULL;        /* [cols] so far */
    for (int64_t j = 0; j < cols; j++) partial[j] = sum ? LOAD(sum[j]) : 0;
    for (int64_t r = begin; r < end; r++) {
        const T *dy = (const T *)p->dy + r * cols, *x = (const T *)p->x + r * cols; /* [cols] */
        T *dx = p->dx ? (T *)p->dx + r * cols : NULL;                               /* [cols] */
        ACC rstd = ((const ACC *)p->rstd)[r];
        if (p->weight && p->plus_one) NAME(norm_row_bwd)(dx, partial, dy, x, p->weight, true, rstd, cols);
        else if (p->weight) NAME(norm_row_bwd)(dx, partial, dy, x, p->weight, false, rstd, cols);
        else NAME(norm_row_bwd)(dx, partial, dy, x, NULL, false, rstd, cols);
        if (!dx || !p->dsum) continue;
        const T *dsum = (const T *)p->dsum + r * cols; /* [cols] */
#pragma omp simd
        for (int64_t j = 0; j < cols; j++) dx[j] = STORE(LOAD(dx[j]) + LOAD(dsum[j]));
    }
    return XT_OK;
}

XT_FAST static void NAME(rms_norm_dweight)(const RmsNormBwdJob *job, int64_t pieces) {
    NAME(sum_partials)(job->p->dweight, job->partial, pieces, job->stride, job->p->cols, job->p->accumulate);
}

#endif
