/* reference.c - attention as plain loops over one row of scores at a time: the specification of the fast implementations.
 *
 * Forward, per query row i: s_j = scale q_i . k_j over the j it sees, p = softmax(s), out_i = sum_j p_j v_j,
 * lse_i = log sum_j exp s_j. With a softcap c, c tanh(s_j / c) is in the place of s_j.
 * Backward: p_j = exp(s_j - lse_i), dp_j = dout_i . v_j, delta_i = dout_i . out_i, ds_j = p_j (dp_j - delta_i), with a softcap
 * times 1 - tanh(s_j / c)^2;
 * dq_i = scale sum_j ds_j k_j, dk_j = scale sum_i ds_j q_i, dv_j = sum_i p_j dout_i, the latter two also over the heads of a group.
 */
#ifndef T
#include "attention.h"
#include "cpu/gemm/gemm.h"

/* What query i of entry b sees: no key outside the sequence, also by bounds that another thread has changed since the check. */
static XtSeen keys_of(const int32_t *documents, bool causal, int64_t window, int64_t b, int64_t i, int64_t sq, int64_t skv) {
    if (!documents) return xt_seen(causal, window, i, sq, skv, 0, skv);
    const int32_t *at = documents + 2 * b * sq + i; /* start; the end is sq further */
    const int64_t start = XT_READ_ONCE(at), end = XT_READ_ONCE(at + sq);
    return xt_seen(causal, window, i, sq, skv, start > 0 ? start : 0, end < skv ? end : skv);
}

#define XT_TEMPLATE "cpu/attention/reference.c"

#include "cpu/each_float.h"

XtStatus xt_attention_reference_fwd(const XtAttentionFwd *p) {
    XT_CHECK(xt_check_documents(p->documents, p->batch, p->sq));
    return xt_parallel(p->batch * p->heads, 1, XT_BY_FLOAT(p->dtype, forward_heads), (void *)p);
}
XtStatus xt_attention_reference_bwd(const XtAttentionBwd *p) {
    XT_CHECK(xt_check_documents(p->documents, p->batch, p->sq));
    return xt_parallel(p->batch * p->kv_heads, 1, XT_BY_FLOAT(p->dtype, backward_groups), (void *)p);
}
#else

static ACC NAME(dot)(const T *a, const T *b, int64_t n) {
    ACC sum = 0;
    for (int64_t i = 0; i < n; i++) sum += LOAD(a[i]) * LOAD(b[i]);
    return sum;
}

static ACC NAME(tanh_of)(ACC x) { return IS_F64 ? (ACC)tanh((double)x) : (ACC)tanhf((float)x); }

/* A piece: query heads [begin, end) of all the batch. */
static XtStatus NAME(forward_heads)(void *context, int64_t begin, int64_t end) {
    const XtAttentionFwd *p = context;
    void *scratch;
    XT_CHECK(xt_scratch((size_t)(p->skv + p->dim) * sizeof(ACC), &scratch));
    ACC *s = scratch, *sum_v = s + p->skv; /* [skv], [D] */
    const ACC cap = (ACC)p->softcap;
    for (int64_t bh = begin; bh < end; bh++) {
        int64_t b = bh / p->heads, h = bh % p->heads, g = h / (p->heads / p->kv_heads);
        const T *k = (const T *)p->k + b * p->k_stride[0] + g * p->k_stride[1]; /* [skv, D] */
        const T *v = (const T *)p->v + b * p->v_stride[0] + g * p->v_stride[1]; /* [skv, D] */
        for (int64_t i = 0; i < p->sq; i++) {
            const T *q = (const T *)p->q + b * p->q_stride[0] + h * p->q_stride[1] + i * p->q_stride[2]; /* [D] */
            T *out = (T *)p->out + b * p->out_stride[0] + h * p->out_stride[1] + i * p->out_stride[2];   /* [D] */
            const XtSeen seen = keys_of(p->documents, p->causal, p->window, b, i, p->sq, p->skv);
            ACC max = -INFINITY, sum = 0;
            for (int64_t j = seen.begin; j < seen.end; j++) {
                s[j] = (ACC)p->scale * NAME(dot)(q, k + j * p->k_stride[2], p->dim);
                if (cap > 0) s[j] = cap * NAME(tanh_of)(s[j] / cap);
                if (s[j] > max || s[j] != s[j]) max = s[j];
            }
            for (int64_t d = 0; d < p->dim; d++) sum_v[d] = 0;
            for (int64_t j = seen.begin; j < seen.end; j++) {
                ACC e = EXP(s[j] - max);
                sum += e;
                for (int64_t d = 0; d < p->dim; d++) sum_v[d] += e * LOAD(v[j * p->v_stride[2] + d]);
            }
            for (int64_t d = 0; d < p->dim; d++) out[d] = STORE(seen.end > seen.begin ? sum_v[d] / sum : 0);
            ((ACC *)p->lse)[bh * p->sq + i] = seen.end > seen.begin ? max + (ACC)log((double)sum) : -(ACC)INFINITY;
        }
    }
    return XT_OK;
}

/* A piece: kv heads [begin, end) of all the batch, each with the query heads that share it, in order. */
static XtStatus NAME(backward_groups)(void *context, int64_t begin, int64_t end) {
    const XtAttentionBwd *p = context;
    int64_t group = p->heads / p->kv_heads, dim = p->dim;
    void *scratch;
    XT_CHECK(xt_scratch((size_t)((2 * p->skv + 1) * dim) * sizeof(ACC), &scratch));
    ACC *sum_k = scratch, *sum_v = sum_k + p->skv * dim, *sum_q = sum_v + p->skv * dim; /* [skv, D] twice, [D] */
    ACC scale = (ACC)p->scale, cap = (ACC)p->softcap;
    for (int64_t bg = begin; bg < end; bg++) {
        int64_t b = bg / p->kv_heads, g = bg % p->kv_heads;
        const T *k = (const T *)p->k + b * p->k_stride[0] + g * p->k_stride[1]; /* [skv, D] */
        const T *v = (const T *)p->v + b * p->v_stride[0] + g * p->v_stride[1]; /* [skv, D] */
        for (int64_t j = 0; j < p->skv * dim; j++) sum_k[j] = sum_v[j] = 0;
        for (int64_t row = 0; row < group * p->sq; row++) {
            int64_t h = g * group + row / p->sq, i = row % p->sq;
            const T *q = (const T *)p->q + b * p->q_stride[0] + h * p->q_stride[1] + i * p->q_stride[2];                /* [D] */
            const T *dout = (const T *)p->dout + b * p->dout_stride[0] + h * p->dout_stride[1] + i * p->dout_stride[2]; /* [D] */
            const T *out = (const T *)p->out + b * p->out_stride[0] + h * p->out_stride[1] + i * p->out_stride[2];      /* [D] */
            T *dq = (T *)p->dq + b * p->dq_stride[0] + h * p->dq_stride[1] + i * p->dq_stride[2];                       /* [D] */
            ACC lse = ((const ACC *)p->lse)[(b * p->heads + h) * p->sq + i], delta = NAME(dot)(dout, out, dim);
            const XtSeen seen = keys_of(p->documents, p->causal, p->window, b, i, p->sq, p->skv);
            for (int64_t d = 0; d < dim; d++) sum_q[d] = 0;
            for (int64_t j = seen.begin; j < seen.end; j++) {
                const T *kj = k + j * p->k_stride[2], *vj = v + j * p->v_stride[2]; /* [D] */
                ACC s = scale * NAME(dot)(q, kj, dim), t = cap > 0 ? NAME(tanh_of)(s / cap) : 0;
                ACC pj = EXP((cap > 0 ? cap * t : s) - lse);
                ACC ds = scale * pj * (NAME(dot)(dout, vj, dim) - delta) * (1 - t * t);
                for (int64_t d = 0; d < dim; d++) {
                    sum_q[d] += ds * LOAD(kj[d]);
                    sum_k[j * dim + d] += ds * LOAD(q[d]);
                    sum_v[j * dim + d] += pj * LOAD(dout[d]);
                }
            }
            for (int64_t d = 0; d < dim; d++) dq[d] = STORE(sum_q[d]);
        }
        for (int64_t j = 0; j < p->skv; j++) {
            T *dk = (T *)p->dk + b * p->dk_stride[0] + g * p->dk_stride[1] + j * p->dk_stride[2]; /* [D] */
            T *dv = (T *)p->dv + b * p->dv_stride[0] + g * p->dv_stride[1] + j * p->dv_stride[2]; /* [D] */
            for (int64_t d = 0; d < dim; d++) dk[d] = STORE(sum_k[j * dim + d]), dv[d] = STORE(sum_v[j * dim + d]);
        }
    }
    return XT_OK;
}

#endif
