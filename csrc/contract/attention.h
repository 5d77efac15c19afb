/* attention.h - attention and its named implementations. The rules for all kernels are in kernels.h. */
#ifndef XT_CONTRACT_ATTENTION_H
#define XT_CONTRACT_ATTENTION_H

#include "xtrain.h"

#ifdef __cplusplus
extern "C" {
#endif

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

/* A named implementation. The first usable one of a table is what "auto" picks, unless an environment variable or a context says
 * otherwise. */
typedef struct XtAttentionBackend {
    const char *name;
    XtStatus (*forward)(const XtAttentionFwd *p);
    XtStatus (*backward)(const XtAttentionBwd *p);
} XtAttentionBackend;

#ifdef __cplusplus
}
#endif

#endif
