/* rope.c - rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864), half-split form.
 *
 *     a = x[:D/2], b = x[D/2:], angle_i = pos theta^(-2i/D):   out = (a cos - b sin,  b cos + a sin)
 *
 * Each pair (a_i, b_i) is turned by its angle. A rotation is orthogonal, so the backward turns dy by -angle: `inverse`.
 *
 * cos and sin depend on (pos, i) alone: a table of them is made first, one row per position, and shared by all heads and by all
 * sequences of a batch. Frequencies and angles are made in ACC: in float32 exactly as Hugging Face does, so that far positions,
 * where a float32 angle is already off by some 1e-4, are off by the same amount in both.
 */
#ifndef T
#include "contract/layers.h"
#include "cpu/kernel.h"

#include <stdlib.h>

typedef struct RopeJob {
    const XtRope *p;
    void *table;     /* [positions, 2, D/2] of ACC: cos, then sin */
    void *frequency; /* [D/2] of ACC */
} RopeJob;

#define XT_TEMPLATE "cpu/layers/rope.c"
#include "cpu/each_float.h"

XtStatus xt_cpu_rope(const XtRope *p) {
    if (p->rows == 0 || p->heads == 0 || p->dim == 0) return XT_OK;
    int64_t positions = p->positions || p->period > p->rows ? p->rows : p->period; /* rows of the table */
    size_t row_nbytes = (size_t)p->dim * xt_dtype_size(xt_dtype_accumulator(p->dtype)),
           nbytes = (size_t)(positions + 1) * row_nbytes;
    char *scratch = malloc(nbytes);
    if (!scratch) return xt_error(XT_OUT_OF_MEMORY, "rope: scratch of %zu bytes could not be allocated", nbytes);
    RopeJob job = {p, scratch + row_nbytes, scratch};
    XtStatus status = xt_need_float("x", p->dtype);
    if (status == XT_OK) XT_BY_FLOAT(p->dtype, rope_frequency)(&job);
    if (status == XT_OK) status = xt_parallel(positions, xt_row_grain(p->dim, 2048), XT_BY_FLOAT(p->dtype, rope_table), &job);
    if (status == XT_OK)
        status = xt_parallel(p->rows, xt_row_grain(p->heads * p->dim, 16384), XT_BY_FLOAT(p->dtype, rope_rotate), &job);
    free(scratch);
    return status;
}

#else

#include "cpu/layers/row_loops.h"

static void NAME(rope_frequency)(const RopeJob *job) { NAME(rope_frequencies)(job->frequency, &job->p->base, job->p->dim); }

/* Rows [begin, end) of the table: row t is position positions[t], or t itself. */
static XtStatus NAME(rope_table)(void *context, int64_t begin, int64_t end) {
    const RopeJob *job = context;
    const XtRope *p = job->p;
    const ACC *frequency = job->frequency; /* [D/2] */
    int64_t half = p->dim / 2;
    ACC sign = p->inverse ? -1 : 1;
    for (int64_t t = begin; t < end; t++) {
        ACC *c = (ACC *)job->table + t * p->dim, *s = c + half; /* [D/2] each */
        ACC pos = (ACC)(p->positions ? p->positions[t] : t);
        NAME(rope_angles)(c, s, pos, frequency, half, sign);
    }
    return XT_OK;
}

XT_FAST static XtStatus NAME(rope_rotate)(void *context, int64_t begin, int64_t end) {
    const RopeJob *job = context;
    const XtRope *p = job->p;
    int64_t half = p->dim / 2;
    for (int64_t r = begin; r < end; r++) {
        int64_t t = p->positions ? r : r % p->period;
        const ACC *c = (const ACC *)job->table + t * p->dim, *s = c + half; /* [D/2] each */
        for (int64_t h = 0; h < p->heads; h++) {
            const T *x = (const T *)p->x + r * p->x_stride[0] + h * p->x_stride[1]; /* [D] */
            T *out = (T *)p->out + r * p->out_stride[0] + h * p->out_stride[1];     /* [D] */
            NAME(turn_row)(out, x, c, s, half);
        }
    }
    return XT_OK;
}

#endif
