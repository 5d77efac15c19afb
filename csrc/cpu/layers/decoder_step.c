/* decoder_step.c - all layers of a decoder for one new token a row: plain loops over one row after the other (contract/layers.h).
 *
 * It is the oracle of the kernel that does a step in one launch. Models on a CPU compute a step with the kernels of its parts.
 */
#ifndef T
#include "contract/layers.h"
#include "core/rope_scale.h"
#include "cpu/gemm/gemm.h"
#include "cpu/kernel.h"

#include <math.h>
#include <string.h>

#define XT_TEMPLATE "cpu/layers/decoder_step.c"
#include "cpu/each_float.h"

XtStatus xt_cpu_decoder_step(const XtDecoderStep *p) {
    if (p->channels == 0) return XT_OK;
    return xt_parallel(p->batch, 1, XT_BY_FLOAT(p->dtype, step_rows), (void *)p);
}

#else
#include "cpu/layers/row_loops.h"

/* out = weight x, weight [outs, ins] */
XT_FAST static void NAME(step_product)(T *out, const T *weight, const T *x, int64_t outs, int64_t ins) {
    for (int64_t i = 0; i < outs; i++) {
        const T *row = weight + i * ins; /* [ins] */
        ACC sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < ins; j++) sum += LOAD(row[j]) * LOAD(x[j]);
        out[i] = STORE(sum);
    }
}
/* x += y */
static void NAME(step_add)(T *x, const T *y, int64_t count) {
    for (int64_t i = 0; i < count; i++) x[i] = STORE(LOAD(x[i]) + LOAD(y[i]));
}
/* Norm, unless weight is NULL, and RoPE of heads [heads, D]. */
static void NAME(step_turn)(T *heads, const T *weight, int64_t count, int64_t dim, const ACC *angles, ACC eps) {
    for (int64_t h = 0; h < count; h++) {
        T *head = heads + h * dim; /* [D] */
        if (weight) NAME(norm_row)(head, head, weight, false, dim, eps);
        NAME(turn_row)(head, head, angles, angles + dim / 2, dim / 2);
    }
}
/* out = softmax(scale q . keys) values over positions 0 to last; s [last + 1] */
static void NAME(step_attend)(T *out, const T *q, const T *keys, const T *values, int64_t last, int64_t dim, ACC scale, ACC *s) {
    ACC max = -INFINITY, sum = 0;
    for (int64_t j = 0; j <= last; j++) {
        s[j] = 0;
        for (int64_t d = 0; d < dim; d++) s[j] += LOAD(q[d]) * LOAD(keys[j * dim + d]);
        s[j] *= scale;
        if (s[j] > max || s[j] != s[j]) max = s[j];
    }
    for (int64_t j = 0; j <= last; j++) sum += s[j] = EXP(s[j] - max);
    for (int64_t d = 0; d < dim; d++) {
        ACC total = 0;
        for (int64_t j = 0; j <= last; j++) total += s[j] * LOAD(values[j * dim + d]);
        out[d] = STORE(total / sum);
    }
}

static XtStatus NAME(step_rows)(void *context, int64_t begin, int64_t end) {
    const XtDecoderStep *p = context;
    const int64_t c = p->channels, f = p->inner, dim = p->dim, queries = p->heads * dim, keys = p->kv_heads * dim;
    const int64_t group = p->kv_heads ? p->heads / p->kv_heads : 1;
    const size_t reals = (size_t)(dim + dim / 2 + p->length), elements = (size_t)(3 * c + 2 * queries + 2 * keys + 2 * f);
    void *scratch;
    XT_CHECK(xt_scratch(reals * sizeof(ACC) + elements * sizeof(T), &scratch));
    ACC *frequency = scratch, *angles = frequency + dim / 2, *s = angles + dim;                     /* [D/2], [2, D/2], [L] */
    T *h = (T *)(s + p->length), *q = h + c, *k = q + queries, *v = k + keys, *attended = v + keys; /* [C], [H D], [K D], .. */
    T *gate = attended + queries, *up = gate + f, *y = up + f, *stream = y + c;                     /* [F], [F], [C], [C] */
    NAME(rope_frequencies)(frequency, &p->base, dim);
    for (int64_t b = begin; b < end; b++) {
        const int64_t position = XT_READ_ONCE(p->positions + b);
        const bool known = position >= 0 && position < p->length;
        T *x = p->head ? stream : (T *)p->out + b * c; /* [C] */
        memcpy(x, (const T *)p->x + b * c, (size_t)c * sizeof(T));
        NAME(rope_angles)(angles, angles + dim / 2, (ACC)position, frequency, dim / 2, 1);
        for (int64_t l = 0; l < p->layers; l++) {
            const XtDecoderLayer *w = &p->layer[l];
            NAME(norm_row)(h, x, w->norm, false, c, (ACC)p->eps);
            NAME(step_product)(q, w->q, h, queries, c);
            NAME(step_product)(k, w->k, h, keys, c);
            NAME(step_product)(v, w->v, h, keys, c);
            NAME(step_turn)(q, w->q_norm, p->heads, dim, angles, (ACC)p->eps);
            NAME(step_turn)(k, w->k_norm, p->kv_heads, dim, angles, (ACC)p->eps);
            for (int64_t g = 0; g < p->kv_heads; g++) {
                T *all_keys = (T *)w->keys + (b * p->kv_heads + g) * p->length * dim;     /* [L, D] */
                T *all_values = (T *)w->values + (b * p->kv_heads + g) * p->length * dim; /* [L, D] */
                if (known && dim > 0) {
                    memcpy(all_keys + position * dim, k + g * dim, (size_t)dim * sizeof(T));
                    memcpy(all_values + position * dim, v + g * dim, (size_t)dim * sizeof(T));
                }
                for (int64_t i = g * group; i < (g + 1) * group; i++) {
                    T *out = attended + i * dim; /* [D] */
                    if (known) NAME(step_attend)(out, q + i * dim, all_keys, all_values, position, dim, (ACC)p->scale, s);
                    for (int64_t d = 0; d < dim && !known; d++) out[d] = STORE((ACC)NAN);
                }
            }
            NAME(step_product)(y, w->o, attended, c, queries);
            NAME(step_add)(x, y, c);
            NAME(norm_row)(h, x, w->mlp_norm, false, c, (ACC)p->eps);
            NAME(step_product)(gate, w->gate, h, f, c);
            NAME(step_product)(up, w->up, h, f, c);
            for (int64_t i = 0; i < f; i++) gate[i] = STORE(LOAD(gate[i]) / (1 + EXP(-LOAD(gate[i]))) * LOAD(up[i]));
            NAME(step_product)(y, w->down, gate, c, f);
            NAME(step_add)(x, y, c);
        }
        if (!p->head) continue;
        NAME(norm_row)(h, x, p->last_norm, false, c, (ACC)p->eps);
        NAME(step_product)((T *)p->out + b * p->vocab, p->head, h, p->vocab, c);
    }
    return XT_OK;
}
#endif
