/* qk_norm_rope.c - RMSNorm of every head of queries and keys, then rotary embedding (formulas: rms_norm.c, rope.c).
 *
 *     forward    n = w cast(x rstd),  out = rope(n)
 *     backward   dn = rope^-1(dout),  dx and dw as in rms_norm for dy = dn
 *
 * A line is one head of one row, D elements. It is normalised into its place in out and turned there; backward, dout is turned into
 * its place in dx, which then takes the norm's gradient. So every line is in the cache between its two steps, and n, which the
 * backward does not need, is not kept. Pieces of lines and the order of dw are those of rms_norm over lines.
 */
#ifndef T
#include "contract/layers.h"
#include "cpu/kernel.h"

#include <stdlib.h>

/* What both passes know of the angles. */
typedef struct QkTable {
    void *at;        /* [places, 2, D/2] of ACC: cosines, then sines */
    void *frequency; /* [D/2] of ACC */
    const int64_t *positions;
    int64_t period, half, places;
    bool inverse;
    XtRopeBase base;
} QkTable;
typedef struct QkJob {
    const QkTable *table;
    const XtQkNormRopeFwd *fwd;
    const XtQkNormRopeBwd *bwd;
    int part;
    void *partial;         /* [pieces, stride] of ACC: the share of each piece in dweight */
    int64_t stride, grain; /* of a row of partial, in elements; lines of a piece */
} QkJob;

#define XT_TEMPLATE "cpu/layers/qk_norm_rope.c"
#include "cpu/each_float.h"

/* Allocates and fills the table for `rows` rows; the caller frees *memory. */
static XtStatus make_table(QkTable *t, XtDtype dtype, int64_t rows, void **memory) {
    XT_CHECK(xt_need_float("q", dtype));
    t->places = t->positions || t->period > rows ? rows : t->period;
    size_t row_nbytes = (size_t)t->half * 2 * xt_dtype_size(xt_dtype_accumulator(dtype)),
           nbytes = (size_t)(t->places + 1) * row_nbytes;
    char *scratch = *memory = malloc(nbytes);
    if (!scratch) return xt_error(XT_OUT_OF_MEMORY, "qk_norm_rope: scratch of %zu bytes could not be allocated", nbytes);
    t->frequency = scratch;
    t->at = scratch + row_nbytes;
    XT_BY_FLOAT(dtype, qk_frequency)(t);
    return xt_parallel(t->places, xt_row_grain(2 * t->half, 2048), XT_BY_FLOAT(dtype, qk_table), t);
}

XtStatus xt_cpu_qk_norm_rope_fwd(const XtQkNormRopeFwd *p) {
    if (p->rows == 0 || p->dim == 0) return XT_OK;
    QkTable table = {.positions = p->positions, .period = p->period, .half = p->dim / 2, .base = p->base};
    void *memory = NULL;
    XtStatus status = make_table(&table, p->dtype, p->rows, &memory);
    for (int i = 0; i < 2 && status == XT_OK; i++) {
        QkJob job = {.table = &table, .fwd = p, .part = i};
        status = xt_parallel(p->rows * p->heads[i], xt_row_grain(p->dim, 16384), XT_BY_FLOAT(p->dtype, qk_fwd), &job);
    }
    free(memory);
    return status;
}

XtStatus xt_cpu_qk_norm_rope_bwd(const XtQkNormRopeBwd *p) {
    if (p->dim == 0) return XT_OK;
    QkTable table = {.positions = p->positions, .period = p->period, .half = p->dim / 2, .inverse = true, .base = p->base};
    void *memory = NULL;
    XtStatus status = make_table(&table, p->dtype, p->rows, &memory);
    for (int i = 0; i < 2 && status == XT_OK; i++) {
        /* At most 64 pieces, so that the partial rows stay few when there are many lines. */
        int64_t lines = p->rows * p->heads[i], grain = xt_row_grain(p->dim, 16384), widest = (lines + 63) / 64;
        if (grain < widest) grain = widest;
        int64_t pieces = (lines + grain - 1) / grain;
        QkJob job = {.table = &table, .bwd = p, .part = i, .stride = (p->dim + 31) / 32 * 32, .grain = grain};
        size_t nbytes = (size_t)(pieces > 0 ? pieces : 1) * (size_t)job.stride * xt_dtype_size(xt_dtype_accumulator(p->dtype));
        job.partial = aligned_alloc(128, nbytes);
        if (!job.partial) status = xt_error(XT_OUT_OF_MEMORY, "qk_norm_rope: scratch of %zu bytes could not be allocated", nbytes);
        if (status == XT_OK) status = xt_parallel(lines, grain, XT_BY_FLOAT(p->dtype, qk_bwd), &job);
        if (status == XT_OK && p->dweight[i]) XT_BY_FLOAT(p->dtype, qk_dweight)(&job, pieces);
        free(job.partial);
    }
    free(memory);
    return status;
}

#else
#include "cpu/layers/row_loops.h"

static void NAME(qk_frequency)(const QkTable *t) { NAME(rope_frequencies)(t->frequency, &t->base, 2 * t->half); }

/* Rows [begin, end) of the table: row r is position positions[r], or r itself. */
static XtStatus NAME(qk_table)(void *context, int64_t begin, int64_t end) {
    const QkTable *t = context;
    for (int64_t r = begin; r < end; r++) {
        ACC *c = (ACC *)t->at + r * 2 * t->half; /* [D/2], and as many sines */
        ACC pos = (ACC)(t->positions ? t->positions[r] : r);
        NAME(rope_angles)(c, c + t->half, pos, t->frequency, t->half, t->inverse ? -1 : 1);
    }
    return XT_OK;
}

XT_FAST static XtStatus NAME(qk_fwd)(void *context, int64_t begin, int64_t end) {
    const QkJob *job = context;
    const XtQkNormRopeFwd *p = job->fwd;
    const QkTable *t = job->table;
    int i = job->part;
    int64_t heads = p->heads[i];
    const T *weight = p->weight[i]; /* [D] */
    if (!weight) return XT_OK;      /* never: it tells the compiler that there is one */
    for (int64_t line = begin; line < end; line++) {
        int64_t r = line / heads, h = line % heads;
        const ACC *c = (const ACC *)t->at + (t->positions ? r : r % t->period) * p->dim; /* [D/2] */
        const T *x = (const T *)p->x[i] + r * p->x_stride[i][0] + h * p->x_stride[i][1]; /* [D] */
        T *out = (T *)p->out[i] + r * p->out_stride[i][0] + h * p->out_stride[i][1];     /* [D] */
        ((ACC *)p->rstd[i])[line] = NAME(norm_row)(out, x, weight, false, p->dim, (ACC)p->eps);
        NAME(turn_row)(out, out, c, c + t->half, t->half);
    }
    return XT_OK;
}

XT_FAST static XtStatus NAME(qk_bwd)(void *context, int64_t begin, int64_t end) {
    const QkJob *job = context;
    const XtQkNormRopeBwd *p = job->bwd;
    const QkTable *t = job->table;
    int i = job->part;
    int64_t heads = p->heads[i], dim = p->dim;
    const T *weight = p->weight[i];                                        /* [D] */
    if (!weight) return XT_OK;                                             /* never: it tells the compiler that there is one */
    ACC *partial = (ACC *)job->partial + begin / job->grain * job->stride; /* [D] of this piece */
    const T *sum = p->accumulate[i] && begin == 0 ? p->dweight[i] : NULL;  /* [D] so far */
    for (int64_t j = 0; j < dim; j++) partial[j] = sum ? LOAD(sum[j]) : 0;
    for (int64_t line = begin; line < end; line++) {
        int64_t r = line / heads, h = line % heads;
        const ACC *c = (const ACC *)t->at + (t->positions ? r : r % t->period) * dim;                /* [D/2] */
        const T *x = (const T *)p->x[i] + r * p->x_stride[i][0] + h * p->x_stride[i][1];             /* [D] */
        const T *dout = (const T *)p->dout[i] + r * p->dout_stride[i][0] + h * p->dout_stride[i][1]; /* [D] */
        T *dx = (T *)p->dx[i] + r * p->dx_stride[i][0] + h * p->dx_stride[i][1];                     /* [D] */
        NAME(turn_row)(dx, dout, c, c + t->half, t->half);
        NAME(norm_row_bwd)(dx, partial, dx, x, weight, false, ((const ACC *)p->rstd[i])[line], dim);
    }
    return XT_OK;
}

XT_FAST static void NAME(qk_dweight)(const QkJob *job, int64_t pieces) {
    const XtQkNormRopeBwd *p = job->bwd;
    NAME(sum_partials)(p->dweight[job->part], job->partial, pieces, job->stride, p->dim, p->accumulate[job->part]);
}

#endif
