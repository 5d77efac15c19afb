/* bf16_rows.h - what the two attentions of bfloat16, bf16.c and amx.c, share: who sees what, the exponential, scratch. */
#pragma once

#include "bf16_shares.h"
#include "cpu/elementwise/unary_math.h"
#include "cpu/gemm/bf16_pairs.h"

#ifdef XT_BF16_TILES

#define LOG2_E 1.44269504088896341f

/* Room for the arrays of a piece: those of a NULL base only count. */
static void *carve(char *base, size_t *used, int64_t numbers) {
    void *at = base ? base + *used : NULL;
    *used += ((size_t)numbers * 4 + 63) / 64 * 64;
    return at;
}

/* ---- who sees what ----------------------------------------------------------------------------------------------------------- */

typedef struct Sight {
    bool causal;
    int64_t window, sq, skv;
} Sight;

/* The keys that some of rows row ... row + rows - 1 see, counted from key `first`, of `count` there. */
static XtSeen seen_by(const Sight *sight, int64_t row, int64_t rows, int64_t first, int64_t count) {
    int64_t begin = xt_seen(sight->causal, sight->window, row, sight->sq, sight->skv, 0, sight->skv).begin - first;
    int64_t end = xt_seen(sight->causal, sight->window, row + rows - 1, sight->sq, sight->skv, 0, sight->skv).end - first;
    begin = begin > 0 ? least(begin, count) : 0, end = least(end, count);
    return (XtSeen){begin, end > begin ? end : begin};
}

/* The rows of a block, which begins with `row`, that may see some of keys key ... key + keys - 1. */
static XtSeen seeing(const Sight *sight, int64_t key, int64_t keys, int64_t row, int64_t rows) {
    const int64_t off = sight->skv - sight->sq + row;
    int64_t begin = sight->causal ? key - off : 0, end = sight->window > 0 ? key + keys + sight->window - 1 - off : rows;
    begin = begin > 0 ? least(begin, rows) : 0, end = least(end, rows);
    return (XtSeen){begin, end > begin ? end : begin};
}

/* ---- vectors ----------------------------------------------------------------------------------------------------------------- */

/* 2^x to 2^-23: x = n + r, |r| <= 1/2, a minimax polynomial of degree 5 in r. 0 below -150, Inf from 128 on, NaN stays NaN. */
PAIRS_INLINE __m512 exp2_of(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-160.0f), x); /* the second operand, if one is NaN */
    __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), r = _mm512_sub_ps(x, n);
    __m512 y = _mm512_set1_ps(0.0013276471f);
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.009675541f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.05550713f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.2402212f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.69314694f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0000001f));
    return _mm512_scalef_ps(y, n);
}

/* Which of 16 keys from `key` on a row sees. */
PAIRS_INLINE __mmask16 mask_of(XtSeen seen, int64_t key) {
    return first_of(seen.end - key) & (__mmask16)~first_of(seen.begin - key);
}

/* a b, rounded as the maximum of such products is: fused with a subtraction, a huge score would lie far from its own maximum. */
PAIRS_INLINE __m512 product_of(__m512 a, __m512 b) { return _mm512_mul_round_ps(a, b, _MM_FROUND_CUR_DIRECTION); }

/* 2^x, at most 1, where lse is rounded and x is not. NaN stays NaN. */
PAIRS_INLINE __m512 weight_of(__m512 x) { return exp2_of(_mm512_min_ps(_mm512_setzero_ps(), x)); }

/* 16 numbers of P and dS, zero outside the mask. capped: s holds t = tanh, and dS has the factor 1 - t^2. */
PAIRS_INLINE __m512 slope_of(__m512 *s, __m512 dp, __m512 factor, __m512 lse, __m512 delta, __mmask16 mask, const bool masked,
                             const bool capped) {
    const __m512 t = *s;
    __m512 e = weight_of(_mm512_fmsub_ps(t, factor, lse));
    if (masked) e = _mm512_maskz_mov_ps(mask, e);
    __m512 ds = _mm512_mul_ps(e, _mm512_sub_ps(dp, delta));
    if (capped) ds = _mm512_fnmadd_ps(_mm512_mul_ps(ds, t), t, ds);
    *s = e;
    return masked ? _mm512_maskz_mov_ps(mask, ds) : ds;
}

#endif
