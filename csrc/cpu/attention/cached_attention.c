/* cached_attention.c - one query per sequence, over keys and values that are kept: plain loops (contract/attention.h).
 *
 * A piece: the query heads that share a kv head of a sequence, so that it alone writes the new key and value of that head.
 */
#ifndef T
#include "attention.h"
#include "cpu/gemm/gemm.h"
#define XT_TEMPLATE "cpu/attention/cached_attention.c"
#include "cpu/each_float.h"

XtStatus xt_cpu_cached_attention(const XtCachedAttention *p) {
    return xt_parallel(p->batch * p->kv_heads, 1, XT_BY_FLOAT(p->dtype, attend_groups), (void *)p);
}
#else

/* out[h] = softmax(scale q[h] . keys) values, each score with the softcap, over positions 0 to last, or those of the window that ends there */
XT_FAST static void NAME(attend)(const XtCachedAttention *p, const T *q, const T *keys, const T *values, int64_t last, ACC *s,
                                 ACC *sum_v, T *out) { /* q, sum_v, out [D], keys, values [L, D], s [L] */
    const int64_t first = p->window > 0 && last >= p->window ? last - p->window + 1 : 0;
    ACC max = -INFINITY, sum = 0, cap = (ACC)p->softcap;
    for (int64_t j = first; j <= last; j++) {
        ACC dot = 0;
#pragma omp simd reduction(+ : dot)
        for (int64_t d = 0; d < p->dim; d++) dot += LOAD(q[d]) * LOAD(keys[j * p->dim + d]);
        s[j] = (ACC)p->scale * dot;
        if (cap > 0) s[j] = cap * (IS_F64 ? (ACC)tanh((double)(s[j] / cap)) : (ACC)tanhf((float)(s[j] / cap)));
        if (s[j] > max || s[j] != s[j]) max = s[j];
    }
    for (int64_t d = 0; d < p->dim; d++) sum_v[d] = 0;
    for (int64_t j = first; j <= last; j++) {
        ACC e = EXP(s[j] - max);
        sum += e;
#pragma omp simd
        for (int64_t d = 0; d < p->dim; d++) sum_v[d] += e * LOAD(values[j * p->dim + d]);
    }
    for (int64_t d = 0; d < p->dim; d++) out[d] = STORE(sum_v[d] / sum);
}

static XtStatus NAME(attend_groups)(void *context, int64_t begin, int64_t end) {
    const XtCachedAttention *p = context;
    const int64_t group = p->heads / p->kv_heads, size = p->length * p->dim;
    void *scratch;
    XT_CHECK(xt_scratch((size_t)(p->length + p->dim) * sizeof(ACC), &scratch));
    ACC *s = scratch, *sum_v = s + p->length; /* [L], [D] */
    for (int64_t bg = begin; bg < end; bg++) {
        const int64_t b = bg / p->kv_heads, g = bg % p->kv_heads, position = XT_READ_ONCE(p->positions + b);
        const bool known = position >= 0 && position < p->length;
        T *keys = (T *)p->keys + bg * size, *values = (T *)p->values + bg * size; /* [L, D] */
        if (known && p->dim > 0) { /* memcpy takes no NULL, which heads without elements may have */
            const size_t row = (size_t)p->dim * sizeof(T);
            memcpy(keys + position * p->dim, (const T *)p->k + b * p->k_stride[0] + g * p->k_stride[1], row);
            memcpy(values + position * p->dim, (const T *)p->v + b * p->v_stride[0] + g * p->v_stride[1], row);
        }
        for (int64_t h = g * group; h < (g + 1) * group; h++) {
            const T *q = (const T *)p->q + b * p->q_stride[0] + h * p->q_stride[1]; /* [D] */
            T *out = (T *)p->out + (b * p->heads + h) * p->dim;                     /* [D] */
            if (known) NAME(attend)(p, q, keys, values, position, s, sum_v, out);
            else
                for (int64_t d = 0; d < p->dim; d++) out[d] = STORE((ACC)NAN);
        }
    }
    return XT_OK;
}
#endif
