/* layer_norm.c - layer normalisation (Ba, Kiros & Hinton 2016, https://arxiv.org/abs/1607.06450).
 *
 *     forward    mean = mean_j x_j,  rstd = 1 / sqrt(mean_j (x_j - mean)^2 + eps),  xh = (x - mean) rstd,  out = w xh + b
 *     backward   with g = dy w:  dx = rstd (g - mean_j(g_j) - xh mean_j(g_j xh_j)),  dw = sum_rows dy xh,  db = sum_rows dy
 *
 * The mean is known before the first square, and corrected by the mean of what is left (Chan, Golub & LeVeque 1983): a row far from
 * zero loses no digits of its variance, however its elements are added up. All in ACC, rounded once.
 * With a residual, a row of x + residual is rounded to memory first and then read as x; dsum is added to a row of dx that has been rounded.
 * dw and db are sums over all rows: every piece of rows adds up partial rows of its own; then the partial rows are added in order.
 */
#ifndef T
#include "contract/layers.h"
#include "cpu/kernel.h"

#include <stdlib.h>

typedef struct LayerNormBwdJob {
    const XtLayerNormBwd *p;
    void *partial;  /* of dweight [pieces, stride] of ACC, then of dbias */
    int64_t stride; /* cols, rounded up so that no two threads write to one cache line */
    int64_t grain;  /* rows in a piece */
    int64_t pieces;
} LayerNormBwdJob;

#define XT_TEMPLATE "cpu/layers/layer_norm.c"
#include "cpu/each_float.h"

XtStatus xt_cpu_layer_norm_fwd(const XtLayerNormFwd *p) {
    return xt_parallel(p->rows, xt_row_grain(p->cols, 16384), XT_BY_FLOAT(p->dtype, layer_norm_fwd), (void *)p);
}

XtStatus xt_cpu_layer_norm_bwd(const XtLayerNormBwd *p) {
    if (p->cols == 0) return XT_OK;
    /* At most 64 pieces, so that the partial rows stay few when there are many rows. */
    int64_t grain = xt_row_grain(p->cols, 16384), widest = (p->rows + 63) / 64;
    if (grain < widest) grain = widest;
    int64_t pieces = (p->rows + grain - 1) / grain, most = pieces > 0 ? pieces : 1;
    LayerNormBwdJob job = {p, NULL, (p->cols + 31) / 32 * 32, grain, pieces};
    size_t nbytes = 2 * (size_t)most * (size_t)job.stride * xt_dtype_size(xt_dtype_accumulator(p->dtype));
    job.partial = aligned_alloc(128, nbytes);
    if (!job.partial) return xt_error(XT_OUT_OF_MEMORY, "layer_norm: scratch of %zu bytes could not be allocated", nbytes);
    XtStatus status = xt_parallel(p->rows, grain, XT_BY_FLOAT(p->dtype, layer_norm_bwd), &job);
    if (status == XT_OK) XT_BY_FLOAT(p->dtype, layer_norm_sums)(&job);
    free(job.partial);
    return status;
}

#else
#include "cpu/layers/row_loops.h"

/* A row forward. Inlined once for each of the four, so that the loop does not branch. All [cols]. */
XT_INLINE void NAME(layer_norm_row)(T *out, const T *x, const T *weight, const T *bias, ACC mean, ACC rstd, int64_t cols) {
#pragma omp simd
    for (int64_t j = 0; j < cols; j++)
        out[j] = STORE((LOAD(x[j]) - mean) * rstd * (weight ? LOAD(weight[j]) : 1) + (bias ? LOAD(bias[j]) : 0));
}

XT_FAST static XtStatus NAME(layer_norm_fwd)(void *context, int64_t begin, int64_t end) {
    const XtLayerNormFwd *p = context;
    const T *weight = p->weight, *bias = p->bias; /* [cols] or NULL */
    int64_t cols = p->cols;
    for (int64_t r = begin; r < end; r++) {
        const T *x = (const T *)p->x + r * cols; /* [cols] */
        T *out = (T *)p->out + r * cols;         /* [cols] */
        if (p->sum) {
            const T *residual = (const T *)p->residual + r * cols; /* [cols] */
            T *total = (T *)p->sum + r * cols;                     /* [cols] */
#pragma omp simd
            for (int64_t j = 0; j < cols; j++) total[j] = STORE(LOAD(x[j]) + LOAD(residual[j]));
            x = total;
        }
        ACC sum = 0, squares = 0, rest = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < cols; j++) sum += LOAD(x[j]);
        ACC mean = sum / (ACC)cols;
#pragma omp simd reduction(+ : squares, rest)
        for (int64_t j = 0; j < cols; j++) {
            ACC d = LOAD(x[j]) - mean;
            squares += d * d;
            rest += d;
        }
        rest /= (ACC)cols; /* what the sum of large numbers has lost of the mean */
        mean += rest;
        ACC variance = squares / (ACC)cols - rest * rest;
        variance = variance < 0 ? 0 : variance; /* of a constant row, by rounding */
        ACC rstd = 1 / SQRT(variance + (ACC)p->eps);
        if (weight && bias) NAME(layer_norm_row)(out, x, weight, bias, mean, rstd, cols);
        else if (weight) NAME(layer_norm_row)(out, x, weight, NULL, mean, rstd, cols);
        else if (bias) NAME(layer_norm_row)(out, x, NULL, bias, mean, rstd, cols);
        else NAME(layer_norm_row)(out, x, NULL, NULL, mean, rstd, cols);
        ((ACC *)p->mean)[r] = mean;
        ((ACC *)p->rstd)[r] = rstd;
    }
    return XT_OK;
}

/* dx (or NULL) of a row; adds the row's shares of dweight and dbias to partial and partial_bias. All [cols], weight or NULL. */
XT_INLINE void NAME(layer_norm_row_bwd)(T *dx, ACC *partial, ACC *partial_bias, const T *dy, const T *x, const T *weight, ACC mean,
                                        ACC rstd, int64_t cols) {
    ACC dot = 0, sum = 0; /* of g xh, of g */
#pragma omp simd reduction(+ : dot, sum)
    for (int64_t j = 0; j < cols; j++) {
        ACC d = LOAD(dy[j]), xh = (LOAD(x[j]) - mean) * rstd, g = d * (weight ? LOAD(weight[j]) : 1);
        dot += g * xh;
        sum += g;
        partial[j] += d * xh;
        partial_bias[j] += d;
    }
    if (!dx) return;
    ACC along = dot / (ACC)cols, level = sum / (ACC)cols;
#pragma omp simd
    for (int64_t j = 0; j < cols; j++) {
        ACC xh = (LOAD(x[j]) - mean) * rstd;
        dx[j] = STORE(rstd * (LOAD(dy[j]) * (weight ? LOAD(weight[j]) : 1) - level - xh * along));
    }
}

XT_FAST static XtStatus NAME(layer_norm_bwd)(void *context, int64_t begin, int64_t end) {
    const LayerNormBwdJob *job = context;
    const XtLayerNormBwd *p = job->p;
    int64_t cols = p->cols, piece = begin / job->grain;
    ACC *partial = (ACC *)job->partial + piece * job->stride, *partial_bias = partial + job->pieces * job->stride; /* [cols] */
    const T *weight_sum = p->accumulate_weight && begin == 0 ? p->dweight : NULL; /* [cols] so far */
    const T *bias_sum = p->accumulate_bias && begin == 0 ? p->dbias : NULL;       /* [cols] so far */
    for (int64_t j = 0; j < cols; j++) partial[j] = weight_sum ? LOAD(weight_sum[j]) : 0;
    for (int64_t j = 0; j < cols; j++) partial_bias[j] = bias_sum ? LOAD(bias_sum[j]) : 0;
    for (int64_t r = begin; r < end; r++) {
        const T *dy = (const T *)p->dy + r * cols, *x = (const T *)p->x + r * cols; /* [cols] */
        T *dx = p->dx ? (T *)p->dx + r * cols : NULL;                               /* [cols] */
        ACC mean = ((const ACC *)p->mean)[r], rstd = ((const ACC *)p->rstd)[r];
        if (p->weight) NAME(layer_norm_row_bwd)(dx, partial, partial_bias, dy, x, p->weight, mean, rstd, cols);
        else NAME(layer_norm_row_bwd)(dx, partial, partial_bias, dy, x, NULL, mean, rstd, cols);
        if (!dx || !p->dsum) continue;
        const T *dsum = (const T *)p->dsum + r * cols; /* [cols] */
#pragma omp simd
        for (int64_t j = 0; j < cols; j++) dx[j] = STORE(LOAD(dx[j]) + LOAD(dsum[j]));
    }
    return XT_OK;
}

XT_FAST static void NAME(layer_norm_sums)(const LayerNormBwdJob *job) {
    const XtLayerNormBwd *p = job->p;
    ACC *partial = job->partial, *partial_bias = partial + job->pieces * job->stride;
    if (p->dweight) NAME(sum_partials)(p->dweight, partial, job->pieces, job->stride, p->cols, p->accumulate_weight);
    if (p->dbias) NAME(sum_partials)(p->dbias, partial_bias, job->pieces, job->stride, p->cols, p->accumulate_bias);
}

#endif
