/* attention.cuh - what the implementations of attention share. Formulas: contract/attention.h. */
#pragma once

#include "common/cuda.cuh"
#include "contract/attention.h"

#include <float.h>
#include <math.h>

/* What select.cu puts in its table: supports and run, forward and backward. The reference supports every problem. */
#define XT_ATTENTION(name)                                                                                      \
    const char *xt_cuda_attention_##name##_supports_fwd(const XtAttentionFwd *p, const XtDeviceTraits *device); \
    const char *xt_cuda_attention_##name##_supports_bwd(const XtAttentionBwd *p, const XtDeviceTraits *device); \
    XtStatus xt_cuda_attention_##name##_fwd(const XtAttentionFwd *p);                                           \
    XtStatus xt_cuda_attention_##name##_bwd(const XtAttentionBwd *p);
XT_ATTENTION(flash_hopper)
XT_ATTENTION(flash_half)
XT_ATTENTION(flash)
XT_ATTENTION(materialized)
XtStatus xt_cuda_attention_reference_fwd(const XtAttentionFwd *p);
XtStatus xt_cuda_attention_reference_bwd(const XtAttentionBwd *p);

extern const XtAttentionBackend xt_cuda_attention[];

/* Keys begin <= j < end of a query, or queries of a key; begin = end where there is none. I: int or int64_t. */
template <typename I> struct XtSeen {
    I begin, end;
};

/* The document of token i of entry b, clamped as the contract says. p: XtAttentionFwd or XtAttentionBwd, with documents. */
template <typename I, typename P> __device__ inline XtSeen<I> xt_document(const P &p, int64_t b, I i) {
    const int32_t *start = p.documents + 2 * b * p.sq + i, *end = start + p.sq;
    const I first = *start, last = *end, tokens = (I)p.sq;
    return {first < 0 ? 0 : first < i ? first : i, last > tokens ? tokens : last > i + 1 ? last : i + 1};
}

/* The keys that query i sees, whose document has these tokens: all keys where there are no documents. */
template <typename I, typename P> __device__ inline XtSeen<I> xt_seen_within(const P &p, XtSeen<I> seen, I i) {
    const I past = (I)(p.skv - p.sq), place = i + past;
    if (p.causal) seen.end = seen.end < place + 1 ? seen.end : place + 1;
    if (p.window > 0) seen.begin = seen.begin > place + 1 - (I)p.window ? seen.begin : place + 1 - (I)p.window;
    return seen.end > seen.begin ? seen : XtSeen<I>{seen.begin, seen.begin};
}

/* The queries that see key j, whose document has these tokens: all queries where there are no documents. */
template <typename I, typename P> __device__ inline XtSeen<I> xt_seen_by_within(const P &p, XtSeen<I> by, I j) {
    const I past = (I)(p.skv - p.sq);
    if (p.causal) by.begin = by.begin > j - past ? by.begin : j - past;
    if (p.window > 0) by.end = by.end < j - past + (I)p.window ? by.end : j - past + (I)p.window;
    return by.end > by.begin ? by : XtSeen<I>{by.begin, by.begin};
}
/* The keys that query i of entry b sees, and the queries that see key j. */
template <typename I, typename P> __device__ inline XtSeen<I> xt_seen(const P &p, int64_t b, I i) {
    return xt_seen_within<I>(p, p.documents ? xt_document<I>(p, b, i) : XtSeen<I>{0, (I)p.skv}, i);
}
template <typename I, typename P> __device__ inline XtSeen<I> xt_seen_by(const P &p, int64_t b, I j) {
    return xt_seen_by_within<I>(p, p.documents ? xt_document<I>(p, b, j) : XtSeen<I>{0, (I)p.sq}, j);
}

/* ---- a softcap --------------------------------------------------------------------------------------------------------------- */

/* With a softcap a score s becomes t = tanh(inner s), and 2^(factor t) stands for exp(cap t). Without one inner is not used, and factor is
 * that of s. */
typedef struct XtBend {
    float inner, factor;
} XtBend;
template <typename P> inline XtBend xt_bend_of(const P *p) {
    const double log2_e = 1.4426950408889634;
    if (p->softcap > 0) return {(float)(p->scale / p->softcap), (float)(p->softcap * log2_e)};
    return {1, (float)(p->scale * log2_e)};
}

/* ---- what both kinds of flash ask of a call --------------------------------------------------------------------------------- */

/* Whether every row of x [batch, heads, rows, D] starts at a multiple of 16 bytes; `width` elements have these. */
inline bool xt_attention_aligned(const void *x, const int64_t stride[3], int64_t batch, int64_t heads, int64_t rows, int width) {
    const int64_t shape[3] = {batch, heads, rows};
    for (int i = 0; i < 3; i++)
        if (shape[i] > 1 && stride[i] % width != 0) return false;
    return (uintptr_t)x % 16 == 0;
}

inline bool xt_attention_all_aligned(const XtAttentionFwd *p, int width) {
    return xt_attention_aligned(p->q, p->q_stride, p->batch, p->heads, p->sq, width) &&
           xt_attention_aligned(p->k, p->k_stride, p->batch, p->kv_heads, p->skv, width) &&
           xt_attention_aligned(p->v, p->v_stride, p->batch, p->kv_heads, p->skv, width) &&
           xt_attention_aligned(p->out, p->out_stride, p->batch, p->heads, p->sq, width);
}
inline bool xt_attention_all_aligned(const XtAttentionBwd *p, int width) {
    return xt_attention_aligned(p->q, p->q_stride, p->batch, p->heads, p->sq, width) &&
           xt_attention_aligned(p->k, p->k_stride, p->batch, p->kv_heads, p->skv, width) &&
           xt_attention_aligned(p->v, p->v_stride, p->batch, p->kv_heads, p->skv, width) &&
           xt_attention_aligned(p->out, p->out_stride, p->batch, p->heads, p->sq, width) &&
           xt_attention_aligned(p->dout, p->dout_stride, p->batch, p->heads, p->sq, width) &&
           xt_attention_aligned(p->dq, p->dq_stride, p->batch, p->heads, p->sq, width) &&
           xt_attention_aligned(p->dk, p->dk_stride, p->batch, p->kv_heads, p->skv, width) &&
           xt_attention_aligned(p->dv, p->dv_stride, p->batch, p->kv_heads, p->skv, width);
}

/* NULL, or the first reason against flash: a softcap, for a kernel that takes none, or one out of reach, nothing to do, rows, heads or blocks of 64 rows beyond
 * 32 bits, rows not aligned. */
template <typename P> inline const char *xt_attention_unfit(const P *p, int width, bool takes_softcap = false) {
    const int64_t most = 1 << 30;
    if (p->softcap > 0 && !takes_softcap) return "the scores have a softcap";
    /* xt_tanh_approx is off by 2^-22, and a score by 2^-22 softcap: 2^-10 here, at most what rounding P to bfloat16 adds. */
    if (p->softcap > 0 && !(p->scale / p->softcap < FLT_MAX && p->softcap <= 4096)) return "the softcap is out of reach";
    if (p->batch <= 0 || p->heads <= 0 || p->sq <= 0 || p->skv <= 0) return "there is nothing to do";
    bool counted = p->sq < most && p->skv < most && p->batch < most && p->heads < most && p->batch * p->heads < most &&
                   p->batch * p->heads * xt_divide_up(p->sq > p->skv ? p->sq : p->skv, 64) < most;
    if (!counted) return "rows, heads or blocks are not counted in 32 bits";
    return xt_attention_all_aligned(p, width) ? NULL : "a tensor has rows that are not aligned to 16 bytes";
}
