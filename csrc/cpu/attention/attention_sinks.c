/* attention_sinks.c - a sink of each head joins the softmax after attention has run (contract/attention.h).
 *
 *     forward   l = log(exp(lse) + exp(sink));  out *= exp(lse - l);  lse = l
 *     backward  dsink = -sum_rows exp(sink - lse) delta,  delta = dout . out
 */
#ifndef T
#include "attention.h"

#include <math.h>
#define XT_TEMPLATE "cpu/attention/attention_sinks.c"
#include "cpu/each_float.h"

XtStatus xt_cpu_attention_sinks_fwd(const XtAttentionSinksFwd *p) {
    return xt_parallel(p->batch * p->heads * p->sq, xt_row_grain(p->dim, 16384), XT_BY_FLOAT(p->dtype, join_rows), (void *)p);
}
XtStatus xt_cpu_attention_sinks_bwd(const XtAttentionSinksBwd *p) {
    return xt_parallel(p->heads, 1, XT_BY_FLOAT(p->dtype, sum_heads), (void *)p);
}
#else

XT_FAST static XtStatus NAME(join_rows)(void *context, int64_t begin, int64_t end) {
    const XtAttentionSinksFwd *p = context;
    ACC *lse = p->lse; /* [B, H, sq] */
    for (int64_t row = begin; row < end; row++) {
        const int64_t i = row % p->sq, h = row / p->sq % p->heads, b = row / p->sq / p->heads;
        T *out = (T *)p->out + b * p->out_stride[0] + h * p->out_stride[1] + i * p->out_stride[2]; /* [D] */
        const ACC sink = LOAD(((const T *)p->sinks)[h]), max = lse[row] > sink ? lse[row] : sink;
        if (max == -(ACC)INFINITY) continue; /* no key and no sink */
        const ACC keys = EXP(lse[row] - max), sum = keys + EXP(sink - max), factor = keys / sum;
        for (int64_t d = 0; d < p->dim; d++) out[d] = STORE(LOAD(out[d]) * factor);
        lse[row] = max + (ACC)log((double)sum);
    }
    return XT_OK;
}

/* A piece: sinks of heads [begin, end), each summed over all rows in order, in double: there may be millions. */
XT_FAST static XtStatus NAME(sum_heads)(void *context, int64_t begin, int64_t end) {
    const XtAttentionSinksBwd *p = context;
    for (int64_t h = begin; h < end; h++) {
        const ACC sink = LOAD(((const T *)p->sinks)[h]);
        double sum = 0;
        for (int64_t b = 0; b < p->batch; b++) {
            const ACC *lse = (const ACC *)p->lse + (b * p->heads + h) * p->sq; /* [sq] */
            for (int64_t i = 0; i < p->sq; i++) {
                const T *dout =
                    (const T *)p->dout + b * p->dout_stride[0] + h * p->dout_stride[1] + i * p->dout_stride[2];        /* [D] */
                const T *out = (const T *)p->out + b * p->out_stride[0] + h * p->out_stride[1] + i * p->out_stride[2]; /* [D] */
                ACC delta = 0;
#pragma omp simd reduction(+ : delta)
                for (int64_t d = 0; d < p->dim; d++) delta += LOAD(dout[d]) * LOAD(out[d]);
                if (lse[i] > -(ACC)INFINITY) sum += (double)(EXP(sink - lse[i]) * delta);
            }
        }
        ((T *)p->dsinks)[h] = STORE((ACC)-sum);
    }
    return XT_OK;
}
#endif
