/* attention.h - attention and its named implementations. The rules for all kernels are in kernels.h. */
#pragma once

#include "contract/traits.h"
#include "xtrain.h"

/* out[b,h,i] = sum_j P[i,j] v[b,h/(H/K),j], P = softmax_j(scale * q_i . k_j), over j <= i + (skv - sq) when causal (the last query
 * sees everything; for sq == skv the usual triangle). A row that sees nothing gives out = 0 and lse = -inf.
 * lse[b,h,i] (ACC, dense) = log sum_j exp(scale * q_i . k_j). Strides are (b, head, row), the last dim is dense.
 * Bwd: with P rebuilt from lse, delta_i = dout_i . out_i: dV = P^T dO; dP = dO V^T; dS = P * (dP - delta); dQ = scale dS K;
 * dK = scale dS^T Q; dk and dv sum over the H/K query heads that share a kv head. dq, dk, dv are all written, in strides of their own.
 * tf32: as in XtGemm, for the products. */
typedef struct XtAttentionFwd {
    void *out, *lse;
    const void *q, *k, *v;
    XtDtype dtype;
    int64_t batch, heads, kv_heads, sq, skv, dim;
    int64_t out_stride[3], q_stride[3], k_stride[3], v_stride[3];
    double scale;
    bool causal, tf32;
} XtAttentionFwd;
typedef struct XtAttentionBwd {
    void *dq, *dk, *dv;
    const void *dout, *q, *k, *v, *out, *lse;
    XtDtype dtype;
    int64_t batch, heads, kv_heads, sq, skv, dim;
    int64_t dq_stride[3], dk_stride[3], dv_stride[3];
    int64_t dout_stride[3], q_stride[3], k_stride[3], v_stride[3], out_stride[3];
    double scale;
    bool causal, tf32;
} XtAttentionBwd;

/* One query per sequence, over keys and values that are kept. With n = positions[b]: keys[b, g, n] = k[b, g], values[b, g, n] = v[b, g];
 * out[b, h] = sum_j P[j] values[b, h / (H/K), j], P = softmax_j(scale * q[b, h] . keys[b, h / (H/K), j]) over j <= n. Where n is not in
 * [0, L), nothing is stored and out[b] is NaN. keys and values [B, K, L, D] and out [B, H, D] dense; strides of q, k and v are (b, head),
 * the last dim is dense. positions [B] is read when the kernel runs. plain: the simplest of a device's kernels. */
typedef struct XtCachedAttention {
    void *out, *keys, *values;
    const void *q, *k, *v;
    const int64_t *positions;
    XtDtype dtype;
    int64_t batch, heads, kv_heads, length, dim;
    int64_t q_stride[2], k_stride[2], v_stride[2];
    double scale;
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
