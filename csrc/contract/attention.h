/* attention.h - attention and its named implementations. The rules for all kernels are in kernels.h. */
#pragma once

#include "contract/traits.h"
#include "xtrain.h"

/* Which keys query i sees is an interval, low(i) <= j < high(i), whose two ends never fall from one row to the next:
 *
 *     t = i + (skv - sq)                 the place of query i among the keys: the last query is the last key
 *     high = causal ? t + 1 : skv
 *     low  = window > 0 ? t - window + 1 : 0        the query itself counts; window = 0: none; with causal only
 *     documents: low = max(low, start[t]), high = min(high, end[t])                  with sq == skv only
 *
 * documents is NULL or int32 [B, 2, S], dense: for each token the first token of its document, and the one behind its last. Documents
 * lie one behind the other and fill the row: start[0] = 0, end[S - 1] = S, start[end[i]] = end[i]. The shape is that of the tokens
 * alone and the host reads no value, so that a captured step takes other documents each time. Kernels read what they need directly:
 * the first tile of keys of query rows [i0, i1) is that of low(i0), the last that of high(i1 - 1) - 1. Keys [j0, j1) of a causal square
 * are seen by queries j0 <= i < min(end[j1 - 1], window > 0 ? j1 - 1 + window : S), and of one that is not by start[j0] <= i < end[j1 - 1].
 * Documents that break the rule are XT_VALUE_ERROR: at once on the CPU, at the next wait after a forward on CUDA, whose kernels read
 * start[t] as clamp(start[t], 0, t) and end[t] as clamp(end[t], t + 1, S), so that they stay inside their tensors and every token sees
 * itself; their results are then unspecified.
 */
/* out[b,h,i] = sum_j P[i,j] v[b,h/(H/K),j], P = softmax_j(scale * q_i . k_j), over the keys that query i sees.
 * A row that sees nothing gives out = 0 and lse = -inf.
 * lse[b,h,i] (ACC, dense) = log sum_j exp(scale * q_i . k_j). Strides are (b, head, row), the last dim is dense.
 * Bwd: with P rebuilt from lse, delta_i = dout_i . out_i: dV = P^T dO; dP = dO V^T; dS = P * (dP - delta); dQ = scale dS K;
 * dK = scale dS^T Q; dk and dv sum over the H/K query heads that share a kv head. dq, dk, dv are all written, in strides of their own.
 * softcap > 0: a score s = scale * q_i . k_j is softcap * tanh(s / softcap) above, and dS of the backward has the factor
 * 1 - tanh(s / softcap)^2 (Gemma 2, arXiv 2408.00118, 2.2). 0: none.
 * tf32: as in XtGemm, for the products. */
typedef struct XtAttentionFwd {
    void *out, *lse;
    const void *q, *k, *v;
    const int32_t *documents;
    XtDtype dtype;
    int64_t batch, heads, kv_heads, sq, skv, dim, window;
    int64_t out_stride[3], q_stride[3], k_stride[3], v_stride[3];
    double scale, softcap;
    bool causal, tf32;
} XtAttentionFwd;
typedef struct XtAttentionBwd {
    void *dq, *dk, *dv;
    const void *dout, *q, *k, *v, *out, *lse;
    const int32_t *documents;
    XtDtype dtype;
    int64_t batch, heads, kv_heads, sq, skv, dim, window;
    int64_t dq_stride[3], dk_stride[3], dv_stride[3];
    int64_t dout_stride[3], q_stride[3], k_stride[3], v_stride[3], out_stride[3];
    double scale, softcap;
    bool causal, tf32;
} XtAttentionBwd;

/* A sink is one more logit of a head in the denominator of its softmaxes, with no value (gpt-oss, arXiv 2508.10925). After any forward
 * without sinks: l = log(exp(lse) + exp(sinks[h])); out *= exp(lse - l); lse = l. A row that sees nothing keeps out = 0. The backward of
 * XtAttentionBwd is right with such out and lse: P is then the probabilities beside the sink, and delta holds the sink's share.
 * Bwd, beside that one: dsinks[h] = -sum_b,i exp(sinks[h] - lse[b,h,i]) delta[b,h,i]. sinks and dsinks [H], dense; strides and lse as in
 * XtAttentionFwd. */
typedef struct XtAttentionSinksFwd {
    void *out, *lse;
    const void *sinks;
    XtDtype dtype;
    int64_t batch, heads, sq, dim;
    int64_t out_stride[3];
} XtAttentionSinksFwd;
typedef struct XtAttentionSinksBwd {
    void *dsinks;
    const void *dout, *out, *lse, *sinks;
    XtDtype dtype;
    int64_t batch, heads, sq, dim;
    int64_t dout_stride[3], out_stride[3];
} XtAttentionSinksBwd;

/* Checks documents [B, 2, S]: XT_VALUE_ERROR (when: above) with the bounds, place and row of a token that breaks the rule, the first one on
 * the CPU, any of them on CUDA. Each forward makes this check; call it where documents are read before attention. */
typedef struct XtAttentionDocuments {
    const int32_t *documents; /* NULL: none */
    int64_t batch, seq;
    int64_t stride[3]; /* of documents, in elements */
} XtAttentionDocuments;

static inline XtAttentionDocuments xt_dense_documents(const int32_t *documents, int64_t batch, int64_t seq) {
    return (XtAttentionDocuments){documents, batch, seq, {2 * seq, seq, 1}};
}

/* One query per sequence, over keys and values that are kept. With n = positions[b]: keys[b, g, n] = k[b, g], values[b, g, n] = v[b, g];
 * out[b, h] = sum_j P[j] values[b, h / (H/K), j], P = softmax_j(scale * q[b, h] . keys[b, h / (H/K), j]) over j <= n and, with a
 * window > 0, j > n - window; a softcap as in XtAttentionFwd. Where n is not in [0, L), nothing is stored and out[b] is NaN. keys and
 * values [B, K, L, D] and out [B, H, D] dense; strides of q, k and v are (b, head), the last dim is dense. positions [B] is read when
 * the kernel runs. plain: the simplest of a device's kernels. */
typedef struct XtCachedAttention {
    void *out, *keys, *values;
    const void *q, *k, *v;
    const int64_t *positions;
    XtDtype dtype;
    int64_t batch, heads, kv_heads, length, dim, window;
    int64_t q_stride[2], k_stride[2], v_stride[2];
    double scale, softcap;
    bool plain;
} XtCachedAttention;

/* A row of a device's table of implementations, as in XtGemmBackend. Forward and backward are chosen each on its own: an alignment or
 * a size may suit one and not the other. supports: NULL where it does p, else why not; without it, it does every problem, as the last
 * row of a table. */
typedef struct XtAttentionBackend {
    const char *name;   /* what users choose */
    const char *kernel; /* the stem of its source file; rows of one name stand together and differ in this */
    const char *(*supports_fwd)(const XtAttentionFwd *p, const XtDeviceTraits *device);
    XtStatus (*forward)(const XtAttentionFwd *p);
    const char *(*supports_bwd)(const XtAttentionBwd *p, const XtDeviceTraits *device);
    XtStatus (*backward)(const XtAttentionBwd *p);
} XtAttentionBackend;

/* The choice: the first row, from `first` on, that supports p. Functions of their arguments alone. */
static inline const XtAttentionBackend *xt_attention_select_fwd(const XtAttentionBackend *first, const XtAttentionFwd *p,
                                                                const XtDeviceTraits *device) {
    while (first->supports_fwd && first->supports_fwd(p, device)) first++;
    return first;
}
static inline const XtAttentionBackend *xt_attention_select_bwd(const XtAttentionBackend *first, const XtAttentionBwd *p,
                                                                const XtDeviceTraits *device) {
    while (first->supports_bwd && first->supports_bwd(p, device)) first++;
    return first;
}
